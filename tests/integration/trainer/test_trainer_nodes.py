"""A trainer of two nodes, as two commands on this machine: the same losses, a node that dies, and all of it resumed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from async_grpo.config import RunConfig, load
from async_grpo.config.buffer import RedisConfig
from async_grpo.telemetry.jsonl import read_rows
from async_grpo.weights.shared_memory import remove_stores
from async_grpo.wire.board import Evaluation, Probe
from buffer import RedisBuffer, connect, connect_board
from tests.support.ports import two_free_ports
from tests.support.trainer_programs.batches import make_task
from tests.support.trainer_programs.models import make_model
from tests.support.trainer_programs.supply import SAMPLES, make_group, serve, trained, until

STEPS, GROUPS, KILL_AT = 5, 2, 3
PATIENCE_S = 400.0
LAYOUTS = {"data-parallel": {}, "tensor-parallel": {"tensor_parallel": 2}}

Losses = dict[int, list[float]]
"""By step; more than one where it was trained again."""

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(1800)]


@dataclass(frozen=True)
class Story:
    """What is left when all is over."""

    one_node: Losses
    two_nodes: Losses
    codes_after_the_kill: list[int]
    codes_at_the_end: list[int]
    said_by_the_survivor: str


@pytest.fixture(scope="module", params=LAYOUTS)
def story(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, redis_config: RedisConfig) -> Story:
    folder = tmp_path_factory.mktemp("nodes")
    return asyncio.run(live_through(folder, redis_config, LAYOUTS[request.param]))


async def live_through(folder: Path, redis: RedisConfig, layout: dict[str, int]) -> Story:
    model = make_model(folder, "qwen2")
    one = write_config(folder, "one-node", redis, model, layout)
    rendezvous = {"address": "127.0.0.2", "port": two_free_ports("127.0.0.2"), "timeout_s": 300}
    two = write_config(folder, "two-nodes", redis, model, {**layout, "nodes": 2, "rendezvous": rendezvous})
    async with supply(load(one)) as buffer, delivered(buffer, STEPS), command(one, "trainer.log") as alone:
        assert await ended(alone) == 0, (folder / "trainer.log").read_text()[-4000:]
    async with supply(load(two)) as buffer:
        async with delivered(buffer, KILL_AT), node(two, 0) as first, node(two, 1) as second:
            await until(lambda: trained(load(two)) >= KILL_AT, PATIENCE_S)
            second.kill()
            codes_after_the_kill = [await ended(first), await ended(second)]
        said = (folder / "node-0.log").read_text()
        async with delivered(buffer, STEPS - KILL_AT), node(two, 0) as first, node(two, 1) as second:
            codes_at_the_end = [await ended(first), await ended(second)]
    return Story(losses(load(one)), losses(load(two)), codes_after_the_kill, codes_at_the_end, said)


def write_config(folder: Path, name: str, redis: RedisConfig, model: Path, trainer: dict[str, Any]) -> Path:
    raw: dict[str, Any] = {
        "name": f"{name}-{folder.name}-{os.getpid()}",
        "runs_dir": str(folder / "runs"),
        "steps": STEPS,
        "max_staleness": 1,
        "group_size": SAMPLES,
        "groups_per_step": GROUPS,
        "model": {"path": str(model)},
        "sampling": {"max_tokens": 64},
        "rollout": {"vllm": {"max_model_len": 128}},
        "redis": redis.model_dump(mode="json"),
        "trainer": {
            "processes": 2,
            "micro_batch_tokens": 128,
            "take_timeout_s": 90,
            "optimizer": {"lr": 1e-3},
            "checkpoint": {"every_steps": 2},
            **trainer,
        },
        "eval": {"timeout_s": 90},
        "telemetry": {"tensorboard": False},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


@contextlib.asynccontextmanager
async def supply(config: RunConfig) -> AsyncIterator[RedisBuffer]:
    """With the tasks of every step, and with what the trainer waits for in the end."""
    buffer = await connect(config.redis, config.name, policy=config.replay_policy, lease_s=60.0, max_attempts=3)
    board = await connect_board(config.redis, config.name)
    tasks = [make_task(np.random.default_rng(index), index, 6) for index in range(STEPS * GROUPS)]
    await buffer.put_tasks(tasks)
    await board.put_probe(Probe(version=STEPS, groups=[make_group(tasks[0], seq=0, attempt=1, version=STEPS)]))
    await board.put_evaluation(Evaluation(version=STEPS, prompts=1, samples=1, sampled_accuracy=0.0))
    try:
        yield buffer
    finally:
        await buffer.aclose()
        await board.aclose()
        remove_stores(config.local_name)


@contextlib.asynccontextmanager
async def delivered(buffer: RedisBuffer, steps: int) -> AsyncIterator[None]:
    """Groups for so many further steps, so that the trainer cannot be beyond them."""
    serving = asyncio.create_task(serve(buffer, steps * GROUPS, PATIENCE_S))
    try:
        yield
        await serving
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


def node(config: Path, rank: int) -> contextlib.AbstractAsyncContextManager[asyncio.subprocess.Process]:
    return command(config, f"node-{rank}.log", "--node-rank", str(rank))


@contextlib.asynccontextmanager
async def command(config: Path, log: str, *options: str) -> AsyncIterator[asyncio.subprocess.Process]:
    with (config.parent / log).open("ab") as said:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "async_grpo.app.cli.main", "trainer", str(config), *options),
            stdout=said,
            stderr=said,
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


async def ended(process: asyncio.subprocess.Process) -> int:
    async with asyncio.timeout(PATIENCE_S):
        return await process.wait()


def losses(config: RunConfig) -> Losses:
    found: Losses = {}
    for row in read_rows(config.run_dir / "metrics.jsonl"):
        if row["kind"] == "step":
            found.setdefault(row["step"], []).append(row["loss"])
    return found


def test_two_nodes_of_one_rank_learn_what_one_node_of_two_ranks_does(story: Story) -> None:
    assert set(story.two_nodes) == set(story.one_node) == set(range(1, STEPS + 1))
    for step, found in story.two_nodes.items():
        assert found == pytest.approx(story.one_node[step] * len(found), rel=1e-6, abs=1e-9)


def test_the_death_of_a_node_ends_the_other_with_its_name(story: Story) -> None:
    assert story.codes_after_the_kill == [1, -signal.SIGKILL]
    assert "NodeLost: " in story.said_by_the_survivor
    assert "node 1 (127.0.0.1) is gone" in story.said_by_the_survivor


def test_both_started_again_train_the_run_to_its_end(story: Story) -> None:
    assert story.codes_at_the_end == [0, 0]
    assert any(len(found) > 1 for found in story.two_nodes.values()), "nothing was trained again"
