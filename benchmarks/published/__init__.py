"""Published measurements of other systems, predicted: `python -m benchmarks.published`."""
