"""The ranks of the trainer: process groups, and the few exchanges that Megatron does not make."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from msgspec import structs
from torch import Tensor

from async_grpo.config.trainer import TrainerConfig
from async_grpo.errors import ConfigError
from async_grpo.utils.network import LOOPBACK, card_environment
from async_grpo.wire import Batch, Group, decode, encode
from trainer.platform import Platform
from trainer.platform.base import set_defaults
from trainer.ranks.agreement import Agreement, Claim
from trainer.ranks.store import join_store

_SLACK_S = 120.0
"""Seconds that ranks wait for rank 0 beyond the longest wait of rank 0."""

_NO_BATCH = -1
"""Broadcast as the number of groups."""


def start_ranks(
    config: TrainerConfig, platform: Platform, seed: int, longest_wait_s: float, claim: Claim | None = None
) -> None:
    """Join the other ranks, where the environment says that they are (or be the only one), and lay them out.

    With a claim, all of them first agree on what they train. Raises ConfigError if they do not, and if another number
    of ranks than `config.processes` was started; WaitTimeout, NodeLost as `join_store` and `Agreement.reach`.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != config.processes:
        raise ConfigError(
            f"trainer.processes is {config.processes}, but WORLD_SIZE says that {started} ranks were started. Start "
            "`python -m trainer.node_main`, which starts them all, or correct one of the two"
        )
    timeout = timedelta(seconds=longest_wait_s + _SLACK_S)
    if started == 1:
        set_defaults(card_environment(LOOPBACK, platform.network_variables))
        dist.init_process_group(platform.backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
    else:
        rank, patience_s = int(os.environ["RANK"]), config.rendezvous.timeout_s
        store = join_store(patience_s)
        if claim is not None:
            Agreement(store, rank, started, patience_s).reach(claim)
        dist.init_process_group(platform.backend, timeout=timeout, store=store, rank=rank, world_size=started)
    lay_out(config, seed)


def lay_out(config: TrainerConfig, seed: int) -> None:
    """Divide the ranks that have joined into groups, one for each kind of parallelism."""
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        config.tensor_parallel,
        config.pipeline_parallel,
        context_parallel_size=config.context_parallel,
        expert_model_parallel_size=config.expert_parallel,
        expert_tensor_parallel_size=1,  # an expert is never cut: gloo cannot do the exchange that this needs
        create_gloo_process_groups=True,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def stop_ranks() -> None:
    """Wait for all ranks, and leave the process groups."""
    dist.barrier()
    dist.destroy_process_group()


def is_rank_zero() -> bool:
    """Whether this is rank 0, which alone talks to the buffer and writes files."""
    return dist.get_rank() == 0


def is_counting_rank() -> bool:
    """Whether this rank adds its tokens to the sums over ranks.

    Ranks that share a matrix or a sequence compute the same log-probabilities: the first of them counts.
    """
    from megatron.core import parallel_state

    shared = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_context_parallel_rank()
    return shared == (0, 0)


def broadcast_bytes(payload: bytes | None) -> bytes:
    """Send rank 0's bytes to every rank (raw, never pickled)."""
    if dist.get_world_size() == 1:
        assert payload is not None
        return payload
    (size,) = broadcast_ints([len(payload)] if payload is not None else None, 1)
    if not size:  # of which torch makes no tensor
        return b""
    if payload is not None:
        data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    else:
        data = torch.empty(size, dtype=torch.uint8)
    dist.broadcast(data, 0)
    return data.numpy().tobytes()


def broadcast_batch(batch: Batch | None) -> Batch | None:
    """Send rank 0's batch to every rank; None if it has none.

    It goes group by group. A record may not be larger than a value of Redis (512 MiB): a group, which was one, never
    is, but the groups of a step together are as soon as completions are long.
    """
    if dist.get_world_size() == 1:
        return batch
    if is_rank_zero():
        _send_batch(batch)
        return batch
    return _receive_batch()


def _send_batch(batch: Batch | None) -> None:
    if batch is None:
        broadcast_ints([_NO_BATCH], 1)
        return
    broadcast_ints([len(batch.groups)], 1)
    broadcast_bytes(encode(structs.replace(batch, groups=[])))
    for group in batch.groups:
        broadcast_bytes(encode(group))


def _receive_batch() -> Batch | None:
    (count,) = broadcast_ints(None, 1)
    if count == _NO_BATCH:
        return None
    batch = decode(broadcast_bytes(None), Batch)
    groups = [decode(broadcast_bytes(None), Group) for _ in range(count)]
    return structs.replace(batch, groups=groups)


def broadcast_ints(values: list[int] | None, count: int) -> list[int]:
    """Send rank 0's `count` integers to every rank."""
    data = torch.tensor(values if values is not None else [0] * count, dtype=torch.int64)
    dist.broadcast(data, 0)
    shared: list[int] = data.tolist()
    return shared


def gather_ints(values: list[int]) -> list[list[int]]:
    """The integers of every rank, by rank; each gives as many."""
    found = [torch.empty(len(values), dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(found, torch.tensor(values, dtype=torch.int64))
    return [each.tolist() for each in found]


def sum_over_ranks(values: Tensor) -> Tensor:
    """Element-wise sum of a tensor of the host over all ranks, in place and exact to the digits of its dtype."""
    return _reduce(values, dist.ReduceOp.SUM)


def max_over_ranks(values: Tensor) -> Tensor:
    """Element-wise maximum of a tensor of the host over all ranks, in place."""
    return _reduce(values, dist.ReduceOp.MAX)


def _reduce(values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
    """Reduce in place, without `all_reduce`: MindSpeed replaces that by a function that drops float64 results."""
    dist.reduce(values, 0, operation)
    dist.broadcast(values, 0)
    return values
