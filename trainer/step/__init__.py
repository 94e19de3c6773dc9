"""One training step.

incoming        waits for the groups of the step
step            the step: forward, backward, optimizer updates
precompute      passes over the batch before the first update
statistics      sums over micro-batches and ranks; watches the log-probability gap
results         the rows that a step writes
skipped_steps   steps whose loss or gradient is not finite
"""
