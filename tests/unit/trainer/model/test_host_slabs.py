"""Tensors that share page-locked allocations."""

from __future__ import annotations

import random

import torch

from trainer.model.host_slabs import HostSlabs

MIB = 1 << 20


def test_tensors_share_slabs_of_a_power_of_two_and_do_not_overlap() -> None:
    slabs = HostSlabs(pinned=False, slab_bytes=1 << 12)
    shapes = [(3, 5), (700,), (0,), (1,), (64, 16), (3000,)]
    tensors = [slabs.allocate_tensor(torch.Size(shape), torch.float32) for shape in shapes]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
        assert tensor.shape == shape and tensor.is_contiguous()
        assert bool((tensor == number).all())
    assert all(len(slab).bit_count() == 1 for slab in slabs.slabs)


def test_the_optimizer_of_a_rank_takes_a_tenth_more_than_its_bytes() -> None:
    """Shards of a 32B model on eight ranks, a thousandth of their size: one allocation each would take a third more."""
    random.seed(0)
    sizes = [random.choice([5120 * 27648, 5120 * 5120, 5120 * 7168, 5120, 152064 * 5120]) // 8000 for _ in range(1500)]
    slabs = HostSlabs(pinned=False, slab_bytes=MIB)
    wanted = sum(4 * slabs.allocate_tensor(torch.Size([size]), torch.float32).numel() for size in sizes)
    assert wanted <= sum(map(len, slabs.slabs)) <= 1.1 * wanted
    apart = sum(1 << (4 * size - 1).bit_length() for size in sizes)
    assert apart > 1.2 * wanted
