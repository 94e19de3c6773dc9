"""Nothing listens beyond the loopback: the ranks' store, the ranks, and all that a run, a sweep and a bench start."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from tests.support.listening import ListenerWatch, can_be_exposed, in_exposed_machine
from tests.support.whole_run import CONFIG
from trainer.ranks.store import RankStore, listen

ROOT = Path(__file__).parents[2]
TCP_STORE = """
import sys
import psutil, torch.distributed as dist
from async_grpo.utils.network import keep_stores_at_their_address
keep_stores_at_their_address()
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[1]}", rank=0, world_size=1)
found = psutil.Process().net_connections("tcp")
print(*{c.laddr.ip for c in found if c.status == "LISTEN" and c.laddr.port == int(sys.argv[1])})
"""
COMMANDS = {
    "run": ["run", "small.yaml", "-o", "trainer.processes=2"],
    "sweep": ["sweep", "small.yaml", "--grid", "max_staleness=0,1", "--out", "out"],
    "bench of the loop": ["bench", "pipeline", "--quick"],
    "bench of rollout": ["bench", "rollout", "--quick"],
    "bench of weights": ["bench", "weights", "--quick"],
    "bench of the trainer": ["bench", "trainer", "--quick"],
}

exposed = pytest.mark.skipif(not can_be_exposed(), reason="needs a network card, and unshare")


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.3"])
async def test_the_ranks_store_listens_where_it_is_told_and_answers_who_came_early(address: str) -> None:
    before = listening_here()
    store = RankStore(listen(address, 0), 30.0)
    with socket.create_connection((address, store.port)):
        coming = asyncio.to_thread(TCPStore, address, store.port, is_master=False, timeout=timedelta(seconds=30))
        early = asyncio.create_task(coming)
        await asyncio.sleep(0)  # it is on its way
        await store.open()
        rank = await early
    rank.set("rank 1", "is here")
    assert rank.get("rank 1") == b"is here"
    assert listening_here() - before == {(address, store.port)}
    store.close()


def listening_here() -> set[tuple[str, int]]:
    found = psutil.Process().net_connections("tcp")
    return {(at.laddr.ip, at.laddr.port) for at in found if at.status == psutil.CONN_LISTEN}


def test_a_store_that_others_open_by_tcp_listens_at_its_address() -> None:
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    argv = [sys.executable, "-c", TCP_STORE, str(port)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "127.0.0.1", done.stderr[-2000:]


@exposed
def test_ranks_of_one_machine_listen_on_the_loopback_alone_wherever_its_name_leads(tmp_path: Path) -> None:
    looked_at = tmp_path / "looked-at"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    argv = in_exposed_machine([sys.executable, "-m", "tests.support.trainer_programs.gathered", str(looked_at)])
    node = subprocess.Popen(argv, env=environment)
    with ListenerWatch(node.pid) as watch:
        deadline = time.monotonic() + 60
        while len(watch.found) < 3 and node.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        looked_at.touch()
        assert node.wait(60) == 0
    assert len(watch.found) >= 3, "a store and two ranks"
    assert watch.beyond_loopback() == {}


@exposed
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_listens_beyond_the_loopback(command: str, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(CONFIG.format(steps=2, max_tokens=24))
    with tempfile.TemporaryDirectory() as temp:  # tmp_path is too long for a socket
        watch = watched(COMMANDS[command], tmp_path, temp)
    assert watch.found, "nobody was seen to listen"
    assert watch.beyond_loopback() == {}


def watched(words: Sequence[str], folder: Path, temp: str) -> ListenerWatch:
    """The command to its end."""
    environment = {**os.environ, "ASYNC_GRPO_CACHE": str(folder / "cache"), "TMPDIR": temp}
    argv = in_exposed_machine([sys.executable, "-m", "async_grpo.app.cli.main", *words])
    with (folder / "printed.log").open("wb") as printed:
        process = subprocess.Popen(argv, cwd=folder, env=environment, stdout=printed, stderr=printed)
    with ListenerWatch(process.pid) as watch:
        assert process.wait(1700) == 0, (folder / "printed.log").read_text()[-3000:]
    return watch
