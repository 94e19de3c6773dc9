"""A trainer of two nodes, as two commands on this machine: the same losses, a node that dies, and all of it resumed."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
from asyncio.subprocess import Process
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from async_grpo.config import RunConfig, load
from async_grpo.config.buffer import RedisConfig
from async_grpo.telemetry.jsonl import read_rows
from async_grpo.weights.shared_memory import run_folder
from tests.support.ports import two_free_ports
from tests.support.trainer_programs.models import make_model
from tests.support.trainer_programs.supply import command, supply, trained, write_config
from tests.support.waiting import until

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
    left_after_the_kill: list[str]
    """Files of the trainer in shared memory."""
    codes_at_the_end: list[int]
    said_by_the_survivor: str


@pytest.fixture(scope="module", params=LAYOUTS)
def story(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, redis_config: RedisConfig) -> Story:
    folder = tmp_path_factory.mktemp("nodes")
    return asyncio.run(live_through(folder, redis_config, LAYOUTS[request.param]))


async def live_through(folder: Path, redis: RedisConfig, layout: dict[str, int]) -> Story:
    rendezvous = {"address": "127.0.0.2", "port": two_free_ports("127.0.0.2"), "timeout_s": 300}
    one = write(folder, "one-node", redis, layout)
    two = write(folder, "two-nodes", redis, {**layout, "nodes": 2, "rendezvous": rendezvous})
    async with supply(load(one)) as run, run.serving(STEPS), trainer(one) as alone:
        await run.evaluate()
        assert await ended(alone) == 0, (one.parent / "node-0.log").read_text()[-4000:]
    async with supply(load(two)) as run:
        await run.evaluate()
        async with run.serving(KILL_AT), trainer(two, 0) as first, trainer(two, 1) as second:
            await until(lambda: trained(load(two)) >= KILL_AT, PATIENCE_S)
            second.kill()
            codes_after_the_kill = [await ended(first), await ended(second)]
            left = [path.name for path in run_folder(load(two).name_with_digest).glob("*")]
        said = (two.parent / "node-0.log").read_text()
        async with run.serving(STEPS - KILL_AT), trainer(two, 0) as first, trainer(two, 1) as second:
            codes_at_the_end = [await ended(first), await ended(second)]
    return Story(losses(load(one)), losses(load(two)), codes_after_the_kill, left, codes_at_the_end, said)


def write(folder: Path, name: str, redis: RedisConfig, trainer: dict[str, Any]) -> Path:
    model = {"path": str(make_model(folder, "qwen2"))}
    trainer = {"processes": 2, "checkpoint": {"every_steps": 2}, **trainer}
    return write_config(folder, name, redis, steps=STEPS, groups=GROUPS, patience_s=90, model=model, trainer=trainer)


def trainer(
    config: Path, rank: int | None = None
) -> contextlib.AbstractAsyncContextManager[asyncio.subprocess.Process]:
    options = () if rank is None else ("--node-rank", rank)
    log = config.with_name(f"node-{rank or 0}.log")
    return command(log, "async_grpo.app.cli.main", "trainer", config, *options)


async def ended(process: Process) -> int:
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
    assert story.left_after_the_kill == []
    assert re.search(r"NodeLost: .*node 1 ", story.said_by_the_survivor)


def test_both_started_again_train_the_run_to_its_end(story: Story) -> None:
    assert story.codes_at_the_end == [0, 0]
    assert any(len(found) > 1 for found in story.two_nodes.values()), "nothing was trained again"
