"""Runs on disk: read, list, compare, report again and clean up. And `run`, which starts one from Python."""
