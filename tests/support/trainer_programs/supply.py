"""A scripted rollout server for a trainer that runs, and what to wait for of that trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from async_grpo.config import RunConfig
from async_grpo.telemetry.jsonl import read_rows
from async_grpo.wire import Group, Task
from buffer import RedisBuffer
from tests.support.trainer_programs.batches import make_sample

SAMPLES = 4
"""Samples of a group."""


async def serve(buffer: RedisBuffer, groups: int, patience_s: float = 90.0) -> None:
    """A rollout server that turns so many tickets into random groups, at once; the trainer may be as late as that."""
    while groups:
        for ticket in await buffer.admit(groups, holder="scripted", timeout_s=patience_s):
            group = make_group(ticket.task, seq=ticket.seq, attempt=ticket.attempt, version=ticket.version)
            await buffer.insert(ticket, group)
            groups -= 1


def make_group(task: Task, *, seq: int, attempt: int, version: int) -> Group:
    """What it holds depends on `seq` alone."""
    generator = np.random.default_rng(seq)
    samples = [make_sample(generator, version, mixed=False) for _ in range(SAMPLES)]
    return Group(seq=seq, attempt=attempt, task=task, samples=samples)


def trained(config: RunConfig) -> int:
    """The newest step in the metrics."""
    return max((row.get("step", 0) for row in read_rows(config.run_dir / "metrics.jsonl")), default=0)


async def until(done: Callable[[], bool], patience_s: float = 180.0) -> None:
    """Look until it is true."""
    async with asyncio.timeout(patience_s):
        while not done():
            await asyncio.sleep(0.02)
