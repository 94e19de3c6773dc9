"""Sequences into the micro-batches of this rank.

    Batch --sequences_of--> sequences --pack_batch--> indices by rank --micro_batch--> tensors of this rank

Every rank packs the whole batch and picks its share. A sequence without a trained token is not read at all.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import NamedTuple

from megatron.core import parallel_state

from async_grpo.config import RunConfig
from async_grpo.wire import Batch
from trainer.batching import Bins, cost, pack_batch
from trainer.sequences import MicroBatch, Sequence, micro_batch, sequences_of


class Packed(NamedTuple):
    """Sequences, cut for the ranks."""

    micro_batches: list[MicroBatch]
    """Of this data-parallel rank."""
    members: list[Sequence]
    """All of them, those that are not read too."""
    lengths: list[int]
    """Tokens of those that are read, by any rank."""
    slots: int
    """Tokens that the micro-batches of all ranks have room for."""
    balance: float
    """Mean cost of a rank / cost of the dearest; 1 if all have the same work."""


def sequences_in(batch: Batch, config: RunConfig) -> list[Sequence]:
    """Of a batch; what is to become of those that are too long is said in trainer.overlong."""
    trainer = config.trainer
    room = None if trainer.overlong == "error" else trainer.micro_batch_tokens
    longest, rules = config.sampling.max_tokens, trainer.objective
    return sequences_of(batch, rules, longest, room=room, truncate=trainer.overlong == "truncate")


def pack(members: Many[Sequence], config: RunConfig, quadratic: float) -> Packed:
    """`quadratic`: see `batching`. Raises ConfigError for a sequence that is too long, with `overlong: error`."""
    read = [member for member in members if member.trained_tokens]
    lengths = [member.length for member in read]
    ranks, room = parallel_state.get_data_parallel_world_size(), config.trainer.micro_batch_tokens
    packing = pack_batch(lengths, ranks=ranks, max_tokens=room, quadratic=quadratic)
    mine = packing[parallel_state.get_data_parallel_rank()]
    micro_batches = [micro_batch([read[i] for i in chosen]) for chosen in mine]
    balance = _balance(packing, [cost(length, quadratic) for length in lengths])
    return Packed(micro_batches, list(members), lengths, ranks * len(mine) * room, balance)


def pack_for_rank(batch: Batch, config: RunConfig, quadratic: float = 0.0) -> Packed:
    """The batch as sequences, and which of them this data-parallel rank reads, in which micro-batches."""
    return pack(sequences_in(batch, config), config, quadratic)


def _balance(packing: Many[Bins], costs: Many[float]) -> float:
    loads = [sum(costs[i] for chosen in bins for i in chosen) for bins in packing]
    return sum(loads) / (len(loads) * max(loads)) if max(loads) > 0 else 1.0
