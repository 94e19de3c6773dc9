"""The ranks of the trainer: process groups, and collective calls on host data that Megatron does not provide."""

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
"""Broadcast instead of the number of groups."""


def start_ranks(
    config: TrainerConfig, platform: Platform, seed: int, longest_wait_s: float, claim: Claim | None = None
) -> None:
    """Initialise torch.distributed from the environment (or as a single rank) and build the parallel groups.

    With a claim, the ranks first check that they would train the same. Raises ConfigError if they would not, or if
    WORLD_SIZE differs from `config.processes`; WaitTimeout or NodeLost if a rank is missing.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != config.processes:
        raise ConfigError(
            f"trainer.processes is {config.processes}, but {started} ranks were started (WORLD_SIZE). Start `python -m "
            "trainer.node_main`, which starts all ranks, or correct one of the two"
        )
    timeout = timedelta(seconds=longest_wait_s + _SLACK_S)
    if started == 1:
        set_defaults(card_environment(LOOPBACK, platform.network_variables))
        dist.init_process_group(platform.backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
    else:
        rank = int(os.environ["RANK"])
        rendezvous_timeout_s = config.rendezvous.timeout_s
        store = join_store(rendezvous_timeout_s)
        if claim is not None:
            Agreement(store, rank, started, rendezvous_timeout_s).reach_agreement(claim)
        dist.init_process_group(platform.backend, timeout=timeout, store=store, rank=rank, world_size=started)
    lay_out(config, seed)


def lay_out(config: TrainerConfig, seed: int) -> None:
    """Build the groups of ranks for each kind of parallelism."""
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        config.tensor_parallel,
        config.pipeline_parallel,
        context_parallel_size=config.context_parallel,
        expert_model_parallel_size=config.expert_parallel,
        expert_tensor_parallel_size=1,  # splitting an expert needs a collective that gloo does not have
        create_gloo_process_groups=True,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def stop_ranks() -> None:
    """Wait for all ranks, and leave the process groups."""
    dist.barrier()
    dist.destroy_process_group()


def is_rank_zero() -> bool:
    """True on rank 0, the only rank that talks to the buffer and writes the files of the run."""
    return dist.get_rank() == 0


def is_counting_rank() -> bool:
    """True if this rank adds its tokens to sums over ranks.

    Tensor- and context-parallel ranks compute the same log-probabilities, so only the first of them counts.
    """
    from megatron.core import parallel_state

    tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    context_rank = parallel_state.get_context_parallel_rank()
    return tensor_rank == 0 and context_rank == 0


def broadcast_bytes(payload: bytes | None) -> bytes:
    """Send rank 0's bytes to every rank (raw, never pickled)."""
    if dist.get_world_size() == 1:
        assert payload is not None
        return payload
    (size,) = broadcast_ints([len(payload)] if payload is not None else None, 1)
    if not size:  # torch.frombuffer rejects an empty buffer
        return b""
    if payload is not None:
        data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    else:
        data = torch.empty(size, dtype=torch.uint8)
    dist.broadcast(data, 0)
    return data.numpy().tobytes()


def broadcast_batch(batch: Batch | None) -> Batch | None:
    """Send rank 0's batch to every rank; None if it has none.

    Groups are sent one by one. A record may not exceed the size of a Redis value (512 MiB). A group was stored as one,
    so it fits; all groups of a step with long completions may not.
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
    """Return the integers of every rank, by rank. All ranks pass the same number of them."""
    gathered = [torch.empty(len(values), dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, torch.tensor(values, dtype=torch.int64))
    return [of_rank.tolist() for of_rank in gathered]


def sum_over_ranks(values: Tensor) -> Tensor:
    """Sum a host tensor element-wise over all ranks, in place and in its own dtype."""
    return _reduce(values, dist.ReduceOp.SUM)


def max_over_ranks(values: Tensor) -> Tensor:
    """Take the element-wise maximum of a host tensor over all ranks, in place."""
    return _reduce(values, dist.ReduceOp.MAX)


def _reduce(values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
    # Not all_reduce: MindSpeed replaces it with a function that loses float64 results.
    dist.reduce(values, 0, operation)
    dist.broadcast(values, 0)
    return values
