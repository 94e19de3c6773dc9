"""Two nodes of a trainer in one process, with small programs in place of their ranks: how each ends, and with what."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from async_grpo.config import validate
from async_grpo.errors import AsyncGrpoError, ConfigError, NodeLost, TrainingError
from tests.support.ports import two_free_ports
from trainer.nodes import ranks
from trainer.nodes.node import Node

PATIENCE_S = 120.0
ENDS_WELL = "pass"
DIES = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
LEADS = """
import pathlib, signal, sys, time
def stop(*_):
    pathlib.Path("stopped").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
pathlib.Path("ready-0").touch()
time.sleep(100)
"""
FOLLOWS = """
import os, pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(f"ready-{os.environ['RANK']}").touch()
while not pathlib.Path("stopped").exists():
    time.sleep(0.05)
"""
NEVER_STOPS = FOLLOWS.replace('"stopped"', '"never"')


@dataclass(slots=True)
class ScriptedNode(Node):
    """A node whose ranks run this program."""

    program: str = ENDS_WELL

    def _argv(self) -> list[str]:
        return [sys.executable, "-c", self.program]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ranks, "GRACE_S", 1.0)
    (tmp_path / "model").mkdir()
    return tmp_path


def nodes(folder: Path, *programs: str, stop_timeout_s: float = 60.0) -> list[ScriptedNode]:
    raw: dict[str, Any] = {
        "name": f"node-life-{os.getpid()}",
        "runs_dir": str(folder / "runs"),
        "model": {"random": {}},
        "trainer": {
            "nodes": len(programs),
            "processes": len(programs),
            "rendezvous": {"address": "127.0.0.2", "port": two_free_ports("127.0.0.2"), "timeout_s": PATIENCE_S},
        },
        "launch": {"stop_timeout_s": stop_timeout_s},
    }
    config = validate(raw, "test")
    model, file = folder / "model", folder / "unused.yaml"
    return [ScriptedNode(config, file, model, rank, program=program) for rank, program in enumerate(programs)]


async def lives(*started: Node) -> list[AsyncGrpoError | None]:
    """How each ended: None is well."""
    before = set(psutil.Process().children())
    async with asyncio.timeout(PATIENCE_S):
        found = await asyncio.gather(*(node.run() for node in started), return_exceptions=True)
    for error in found:
        if error is not None and not isinstance(error, AsyncGrpoError):
            raise error
    assert set(psutil.Process().children()) <= before, "a rank was left"
    return found  # type: ignore[return-value]


async def when(*files: Path) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not all(file.exists() for file in files):
            await asyncio.sleep(0.05)


async def test_nodes_whose_ranks_end_well_end_well(here: Path) -> None:
    assert await lives(*nodes(here, ENDS_WELL, ENDS_WELL)) == [None, None]


async def test_a_rank_that_is_killed_is_named_on_both_nodes(here: Path) -> None:
    first, second = await lives(*nodes(here, LEADS, DIES))
    assert isinstance(first, NodeLost)
    assert "node 1 (127.0.0.1) has ended: rank 1 was killed by SIGKILL" in str(first)
    assert isinstance(second, TrainingError)
    assert str(second).startswith("rank 1 was killed by SIGKILL")


async def test_what_is_told_to_the_others_does_not_come_back_as_their_reason(here: Path) -> None:
    first, second = await lives(*nodes(here, DIES, LEADS))
    assert str(first) == "rank 0 was killed by SIGKILL"
    assert str(second) == "node 0 (127.0.0.2) has ended: rank 0 was killed by SIGKILL"


@pytest.mark.parametrize("asked", [0, 1])
async def test_a_stop_that_any_node_is_asked_for_is_led_by_rank_0(here: Path, asked: int) -> None:
    both = nodes(here, LEADS, FOLLOWS)

    async def ask() -> None:
        await when(here / "ready-0", here / "ready-1")
        both[asked].stop_asked.set()

    asking = asyncio.create_task(ask())
    assert await lives(*both) == [None, None]
    await asking


async def test_ranks_that_do_not_stop_are_killed_and_it_is_said_which_patience_ended(here: Path) -> None:
    both = nodes(here, NEVER_STOPS, NEVER_STOPS, stop_timeout_s=1.0)

    async def ask() -> None:
        await when(here / "ready-0", here / "ready-1")
        both[0].stop_asked.set()

    asking = asyncio.create_task(ask())
    first, second = await lives(*both)
    await asking
    assert "launch.stop_timeout_s (1 s) after SIGTERM" in str(first)
    assert isinstance(second, NodeLost)


async def test_a_port_of_the_store_that_is_taken_is_said_before_anybody_is_waited_for(here: Path) -> None:
    first, _ = nodes(here, LEADS, FOLLOWS)
    port = first.config.trainer.rendezvous.port + 1
    with socket.create_server(("127.0.0.2", port)):
        (error,) = await lives(first)
    assert isinstance(error, ConfigError)
    assert f"cannot listen at 127.0.0.2:{port}" in str(error)
