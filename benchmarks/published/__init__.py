"""Predictions of other systems' published measurements: `python -m benchmarks.published`."""
