"""The bench of weight updates: transfer, fan-out, deltas."""
