"""One training step: from a batch to the next version of the weights."""
