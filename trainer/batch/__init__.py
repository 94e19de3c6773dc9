"""From groups of samples to packed micro-batches.

sequences          samples -> training sequences with advantages and loss weights -> tensors
packing            assigns sequences to data-parallel ranks and micro-batches
layout             positions of packed sequences, as attention kernels need them
context_parallel   the part of one rank where several ranks share each sequence
"""
