"""Helpers that know nothing of this project."""
