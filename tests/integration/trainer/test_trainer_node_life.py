"""Nodes of a trainer in one process, with small programs in place of their ranks: how each ends, and with what."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from async_grpo.config import validate
from async_grpo.errors import AsyncGrpoError, ConfigError, NodeLost, TrainingError
from async_grpo.weights.shared_memory import remove_stores, run_folder
from tests.support.ports import two_free_ports
from trainer.node_main import Node
from trainer.ranks import local_ranks
from trainer.ranks.local_ranks import RankFailed

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
NOT_JOINED = """
import os, pathlib, time
pathlib.Path("draft").write_text(str(os.getpid()))
pathlib.Path("draft").replace("ready-0")
time.sleep(100)
"""
FAILS_WITHOUT_RANK_0 = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while not pathlib.Path("ready-0").exists():
    time.sleep(0.01)
pathlib.Path("ready-1").touch()
while pathlib.Path("/proc", pathlib.Path("ready-0").read_text()).exists():
    time.sleep(0.01)
sys.exit(1)
"""
LEAVES = "import pathlib; pathlib.Path('left').touch()"
AFTER_IT = """
import os, pathlib, signal, socket, time
while not pathlib.Path("left").exists():
    time.sleep(0.05)
"""
DIES_AFTER_IT = f"""{AFTER_IT}
time.sleep(0.5)
os.kill(os.getpid(), signal.SIGKILL)
"""
NEEDS_THE_STORE_AFTER_THAT = f"""{AFTER_IT}
time.sleep(1.5)
socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=10)
"""
TELLS_ITS_CARD = """
import os, pathlib
pathlib.Path("card-" + os.environ["RANK"]).write_text(os.environ.get("GLOO_SOCKET_IFNAME", "none"))
"""
LEAVES_ITS_STORE = """
import os, signal, sys
from async_grpo.weights.manifest import make_layout
from async_grpo.weights.shared_memory import store_path
from async_grpo.weights.store import WeightStore
layout = make_layout([("weight", "float32", [4])])
store = WeightStore.create(store_path(sys.argv[1], "trainer"), layout)
store.path.with_name("ctl-123").touch()
store.path.with_name("r-0123456789").touch()
WeightStore.create(store_path(sys.argv[1], "node"), layout)
os.kill(os.getpid(), signal.SIGKILL)
"""
RANK_1_FAILS = f"""
import os, sys
if os.environ["RANK"] == "0":
    exec({LEADS!r})
    sys.exit()
print("[rank1]: Traceback (most recent call last):", file=sys.stderr)
print("[rank1]:   File rank.py, line 1", file=sys.stderr)
print("[rank1]: pkg.OwnError: no such chunk in redis://user:pw@host", file=sys.stderr)
print("a warning at exit", file=sys.stderr)
sys.exit(3)
"""


@dataclass(slots=True)
class ScriptedNode(Node):
    """A node whose ranks run this program."""

    program: str = ENDS_WELL

    def _argv(self) -> list[str]:
        return [sys.executable, "-c", self.program, self.config.name_with_digest]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local_ranks, "GRACE_S", 1.0)
    (tmp_path / "model").mkdir()
    return tmp_path


def nodes(folder: Path, *programs: str, stop_timeout_s: float = 60.0, address: str = "127.0.0.2") -> list[ScriptedNode]:
    raw: dict[str, Any] = {
        "name": f"node-life-{os.getpid()}",
        "runs_dir": str(folder / "runs"),
        "model": {"random": {}},
        "trainer": {
            "nodes": len(programs),
            "processes": len(programs),
            "rendezvous": {"address": address, "port": two_free_ports(address), "timeout_s": PATIENCE_S},
        },
        "launch": {"stop_timeout_s": stop_timeout_s},
    }
    config = validate(raw, "test")
    model, file = folder / "model", folder / "unused.yaml"
    return [ScriptedNode(config, file, model, rank, program=program) for rank, program in enumerate(programs)]


def alone(folder: Path, program: str, ranks: int) -> ScriptedNode:
    raw = {"name": "alone", "runs_dir": str(folder), "model": {"random": {}}, "trainer": {"processes": ranks}}
    return ScriptedNode(validate(raw, "test"), folder / "unused.yaml", folder / "model", 0, program=program)


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


async def lives_until_asked(here: Path, both: Sequence[Node], asked: int) -> list[AsyncGrpoError | None]:
    """As `lives`; one of the two is asked to stop as soon as the ranks of both are ready."""

    async def ask() -> None:
        await when(here / "ready-0", here / "ready-1")
        both[asked].stop_asked.set()

    asking = asyncio.create_task(ask())
    found = await lives(*both)
    await asking
    return found


@pytest.mark.parametrize("ranks", [1, 3])
async def test_a_node_that_is_alone_ends_well_with_its_ranks(here: Path, ranks: int) -> None:
    assert await lives(alone(here, ENDS_WELL, ranks)) == [None]


async def test_the_last_error_of_a_rank_is_the_reason_of_a_node_that_is_alone(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (error,) = await lives(alone(here, RANK_1_FAILS, 2))
    assert str(error).endswith(": pkg.OwnError: no such chunk in redis://user:***@host")
    assert isinstance(error, RankFailed) and error.code == 3
    assert capfd.readouterr().err.splitlines()[-1] == "a warning at exit", "what ranks say stands in the log"
    assert (here / "stopped").exists() or not (here / "ready-0").exists(), "the other rank was not asked to stop"


@pytest.mark.parametrize(("program", "asked"), [(LEADS, True), (NOT_JOINED, True), (NOT_JOINED, False)])
async def test_a_node_that_is_alone_passes_a_stop_to_its_rank(here: Path, program: str, asked: bool) -> None:
    node = alone(here, program, 1)
    living = asyncio.create_task(lives(node))
    await when(here / "ready-0")
    if asked:
        node.stop_asked.set()
    else:
        os.kill(int((here / "ready-0").read_text()), signal.SIGKILL)
    (error,) = await living
    assert str(error) == ("None" if asked else "rank 0 was killed by SIGKILL")


async def test_what_a_killed_rank_left_in_shared_memory_is_removed_and_the_servers_store_kept(here: Path) -> None:
    node = alone(here, LEAVES_ITS_STORE, 1)
    try:
        (error,) = await lives(node)
        assert str(error) == "rank 0 was killed by SIGKILL"
        assert [path.name for path in run_folder(node.config.name_with_digest).iterdir()] == ["node.weights"]
    finally:
        remove_stores(node.config.name_with_digest)


async def test_a_rank_that_is_killed_is_named_on_both_nodes(here: Path) -> None:
    first, second = await lives(*nodes(here, LEADS, DIES))
    assert isinstance(first, NodeLost)
    assert re.search(r"node 1 .*rank 1 .*SIGKILL", str(first))
    assert isinstance(second, TrainingError)
    assert str(second).startswith("rank 1 was killed by SIGKILL")


async def test_what_is_told_to_the_others_does_not_come_back_as_their_reason(here: Path) -> None:
    first, second = await lives(*nodes(here, DIES, LEADS))
    assert str(first) == "rank 0 was killed by SIGKILL"
    assert re.search(r"node 0 .*rank 0 .*SIGKILL", str(second))


@pytest.mark.parametrize("asked", [0, 1])
async def test_a_stop_that_any_node_is_asked_for_is_led_by_rank_0(here: Path, asked: int) -> None:
    assert await lives_until_asked(here, nodes(here, LEADS, FOLLOWS), asked) == [None, None]


@pytest.mark.parametrize(("asked", "follows"), [(0, NEVER_STOPS), (1, FAILS_WITHOUT_RANK_0)])
async def test_a_stop_before_rank_0_has_joined_the_run_is_a_good_end_of_all_nodes(
    here: Path, asked: int, follows: str
) -> None:
    assert await lives_until_asked(here, nodes(here, NOT_JOINED, follows), asked) == [None, None]


async def test_a_rank_that_is_killed_by_a_sigterm_that_nobody_asked_for_has_failed(here: Path) -> None:
    first, second = await lives(*nodes(here, DIES.replace("SIGKILL", "SIGTERM"), LEADS))
    assert str(first) == "rank 0 was killed by SIGTERM"
    assert isinstance(second, NodeLost)


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_node_that_is_stopped_before_the_others_are_there_ends_well(here: Path, rank: int) -> None:
    waiting = nodes(here, LEADS, FOLLOWS)[rank]
    living = asyncio.create_task(lives(waiting))
    await asyncio.sleep(0.2)
    waiting.stop_asked.set()
    assert await living == [None]


async def test_a_fault_of_the_configuration_is_one_on_all_nodes(here: Path) -> None:
    first, second = await lives(*nodes(here, LEADS, "import sys; sys.exit(78)"))
    assert isinstance(first, ConfigError)
    assert re.search(r"node 1 .*rank 1 .*code 78", str(first))
    assert isinstance(second, RankFailed) and second.code == 78


async def test_the_store_is_kept_for_a_node_that_still_works_though_another_is_lost(here: Path) -> None:
    first, second, third = await lives(*nodes(here, LEAVES, DIES_AFTER_IT, NEEDS_THE_STORE_AFTER_THAT))
    assert (first, third) == (None, None)
    assert str(second) == "rank 1 was killed by SIGKILL"


async def test_every_node_finds_its_card_where_node_0_is_given_by_name(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert await lives(*nodes(here, TELLS_ITS_CARD, TELLS_ITS_CARD, address="localhost")) == [None, None]
    assert [(here / f"card-{rank}").read_text() for rank in (0, 1)] == ["lo", "lo"]


async def test_ranks_that_do_not_stop_are_killed_and_it_is_said_which_patience_ended(here: Path) -> None:
    first, second = await lives_until_asked(here, nodes(here, NEVER_STOPS, NEVER_STOPS, stop_timeout_s=1.0), 0)
    assert "launch.stop_timeout_s (1 s)" in str(first)
    assert isinstance(second, NodeLost)


async def test_a_port_of_the_store_that_is_taken_is_said_before_anybody_is_waited_for(here: Path) -> None:
    first, _ = nodes(here, LEADS, FOLLOWS)
    port = first.config.trainer.rendezvous.port + 1
    with socket.create_server(("127.0.0.2", port)):
        (error,) = await lives(first)
    assert isinstance(error, ConfigError)
    assert f"127.0.0.2:{port}" in str(error)
