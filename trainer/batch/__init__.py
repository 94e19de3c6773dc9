"""From groups of samples to packed micro-batches: sequences, packing, context parallelism."""
