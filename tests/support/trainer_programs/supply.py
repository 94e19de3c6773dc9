"""A run for a trainer as a process of its own: its configuration, and a scripted rollout server beside it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from async_grpo.config import RunConfig, dump, validate
from async_grpo.config.buffer import RedisConfig
from async_grpo.telemetry.jsonl import read_rows
from async_grpo.weights.shared_memory import remove_stores
from async_grpo.wire import Group, Task
from async_grpo.wire.board import Evaluation, Probe
from buffer import RedisBuffer, connect, connect_board
from buffer.base import RunBoard
from tests.support.trainer_programs.batches import make_sample, make_task

SAMPLES = 4
"""Samples of a group."""

PATIENCE_S = 400.0
"""Seconds that the trainer may take until it makes room for further groups: it may have to start first."""


def write_config(
    folder: Path, name: str, redis: RedisConfig, *, steps: int, groups: int, patience_s: float, **sections: Any
) -> Path:
    """The file of a configuration in its run folder. `groups`: of a step."""
    trainer = {"micro_batch_tokens": 128, "take_timeout_s": patience_s, "optimizer": {"lr": 1e-3}}
    raw: dict[str, Any] = {
        "name": f"{name}-{folder.name}-{os.getpid()}",
        "runs_dir": str(folder / "runs"),
        "steps": steps,
        "max_staleness": 1,
        "group_size": SAMPLES,
        "groups_per_step": groups,
        "sampling": {"max_tokens": 64},
        "rollout": {"vllm": {"max_model_len": 128}},
        "redis": redis.model_dump(mode="json"),
        "eval": {"timeout_s": patience_s},
        "telemetry": {"trackers": []},
        **sections,
        "trainer": trainer | sections["trainer"],
    }
    config = validate(raw, "test")
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "config.yaml").write_text(dump(config))
    return config.run_dir / "config.yaml"


@dataclass(frozen=True)
class Supply:
    """The buffer and the run board, as a rollout server has them."""

    config: RunConfig
    buffer: RedisBuffer
    board: RunBoard

    async def serve(self, steps: int) -> None:
        """Turn the tickets of so many further steps into random groups, at once; the trainer cannot go beyond them."""
        groups = steps * self.config.groups_per_step
        while groups:
            for ticket in await self.buffer.admit_groups(groups, holder="scripted", timeout_s=PATIENCE_S):
                group = make_group(ticket.task, seq=ticket.seq, attempt=ticket.attempt, version=ticket.version)
                await self.buffer.insert_group(ticket, group)
                groups -= 1

    @contextlib.asynccontextmanager
    async def serving(self, steps: int) -> AsyncIterator[None]:
        """`serve` during the block, which ends when all is served."""
        serving = asyncio.create_task(self.serve(steps))
        try:
            yield
            await serving
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    async def evaluate(self) -> None:
        """Put the final evaluation on the board."""
        found = Evaluation(version=self.config.steps, prompts=1, samples=1, sampled_accuracy=0.0)
        await self.board.put_evaluation(found)


@contextlib.asynccontextmanager
async def supply(config: RunConfig) -> AsyncIterator[Supply]:
    """With the tasks of every step, and the final probe on the board."""
    buffer = await connect(config.redis, config.name, policy=config.replay_policy, lease_s=60.0, max_attempts=3)
    board = await connect_board(config.redis, config.name)
    count = config.steps * config.groups_per_step
    tasks = [make_task(np.random.default_rng(index), index, 6) for index in range(count)]
    await buffer.put_tasks(tasks)
    probed = make_group(tasks[0], seq=0, attempt=1, version=config.steps)
    await board.put_probe(Probe(version=config.steps, groups=[probed]))
    try:
        yield Supply(config, buffer, board)
    finally:
        await buffer.aclose()
        await board.aclose()
        remove_stores(config.name_with_digest)  # of trainers that were killed


def make_group(task: Task, *, seq: int, attempt: int, version: int) -> Group:
    """What it holds depends on `seq` alone."""
    generator = np.random.default_rng(seq)
    samples = [make_sample(generator, version, mixed=False) for _ in range(SAMPLES)]
    return Group(seq=seq, attempt=attempt, task=task, samples=samples)


@contextlib.asynccontextmanager
async def command(log: Path, module: str, *arguments: object) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that has ended after the block."""
    with log.open("ab") as said:
        argv = [sys.executable, "-m", module, *map(str, arguments)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = await asyncio.create_subprocess_exec(*argv, stdout=said, stderr=said, env=environment)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


def trained(config: RunConfig) -> int:
    """The newest step in the metrics."""
    return max((row.get("step", 0) for row in read_rows(config.run_dir / "metrics.jsonl")), default=0)
