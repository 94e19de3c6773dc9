"""Trackers: where the scalars of a run go."""
