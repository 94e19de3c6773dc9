"""Runs after their start: read them, list them, compare them, clean them up."""
