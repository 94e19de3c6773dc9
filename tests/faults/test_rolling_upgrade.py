"""Rollout servers of another release take the places of the present ones, one by one, while the run goes on."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from async_grpo.config import RunConfig, load
from async_grpo.config.buffer import RedisConfig
from async_grpo.errors import EXIT_CONFIG
from async_grpo.wire.board import PROTOCOL, ServerBeat
from buffer import connect_board
from tests.support.whole_run import COMMAND, CONFIG, check_books

STEPS = 260
TOKEN = "of-this-test"
ROOT = Path(__file__).parents[2]
PACKAGES = ("async_grpo", "buffer", "rollout_server", "trainer")

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]


def release(folder: Path, *, protocol: int) -> Path:
    """A copy of the packages whose heartbeats have a field more, as a later release may."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    board = folder / "async_grpo" / "wire" / "board.py"
    text = board.read_text().replace(f"PROTOCOL = {PROTOCOL}\n", f"PROTOCOL = {protocol}\n")
    board.write_text(text.replace('    http: str = ""\n', '    http: str = ""\n    release: str = "next"\n', 1))
    return folder


class Cluster:
    """A run whose roles are started one by one, as on several machines."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.file = folder / "run.yaml"
        name = f"upgrade-{uuid.uuid4().hex[:8]}"
        text = CONFIG.format(steps=STEPS, max_tokens=200).replace("name: small", f"name: {name}")
        self.file.write_text(text.replace("redis: {", f"redis: {{url: '{url}', "))
        self.config: RunConfig = load(self.file)
        self._begun: list[subprocess.Popen[bytes]] = []

    def begin(self, log: str, *words: str, release: Path = ROOT) -> subprocess.Popen[bytes]:
        own = {"PYTHONPATH": str(release), "ASYNC_GRPO_ADMIN_TOKEN": TOKEN, "ASYNC_GRPO_CACHE": str(self.folder / "c")}
        with (self.folder / log).open("ab") as printed:
            process = subprocess.Popen(
                [*COMMAND, *words], cwd=self.folder, stdout=printed, stderr=printed, env={**os.environ, **own}
            )
        self._begun.append(process)
        return process

    def server(self, name: str, *, release: Path = ROOT) -> subprocess.Popen[bytes]:
        return self.begin(f"{name}.log", "rollout", str(self.file), "--name", name, release=release)

    async def beat_of(self, name: str, *, timeout_s: float = 200.0) -> ServerBeat:
        """The heartbeat of a server that has begun to generate."""
        board = await connect_board(self.config.redis, self.config.name)
        try:
            async with asyncio.timeout(timeout_s):
                while not (
                    found := [each for each in await board.live_servers() if each.name == name and each.running]
                ):
                    await asyncio.sleep(0.2)
            return found[0]
        finally:
            await board.aclose()

    def close(self) -> None:
        for process in self._begun:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(40)
                except subprocess.TimeoutExpired:
                    process.kill()


@pytest.fixture
def cluster(tmp_path: Path, redis_config: RedisConfig) -> Iterator[Cluster]:
    assert redis_config.url is not None
    made = Cluster(tmp_path, redis_config.url)
    yield made
    made.close()


def drain(beat: ServerBeat) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with urllib.request.urlopen(urllib.request.Request(f"{beat.http}/admin/drain", b"", headers), timeout=60) as answer:
        assert answer.status == 202


def summary(cluster: Cluster) -> dict[str, Any]:
    assert cluster.begin("report.log", "runs", "report", str(cluster.file), "--wait").wait(120) == 0
    found: dict[str, Any] = json.loads((cluster.folder / cluster.config.run_dir / "summary.json").read_text())
    return found


def test_servers_of_another_release_replace_the_present_ones_and_nothing_is_lost(cluster: Cluster) -> None:
    new = release(cluster.folder / "next", protocol=PROTOCOL)
    trainer = cluster.begin("trainer.log", "trainer", str(cluster.file))
    old = [cluster.server(f"old-{index}") for index in range(2)]
    beats = [asyncio.run(cluster.beat_of(f"old-{index}")) for index in range(2)]
    joined = []
    for index in range(2):
        joined.append(cluster.server(f"new-{index}", release=new))
        asyncio.run(cluster.beat_of(f"new-{index}"))
        drain(beats[index])
        assert old[index].wait(120) == 0, (cluster.folder / f"old-{index}.log").read_text()[-3000:]
    assert trainer.poll() is None, "the run went on all the time"
    assert trainer.wait(300) == 0, (cluster.folder / "trainer.log").read_text()[-3000:]
    assert [server.wait(60) for server in joined] == [0, 0]
    found = summary(cluster)
    check_books(found, steps=STEPS)
    assert found["groups"]["trained"] == found["groups"]["admitted"], "no group was given up"
    samples = {path.stem for path in (cluster.folder / cluster.config.run_dir / "samples").glob("*.jsonl")}
    assert samples == {"old-0", "old-1", "new-0", "new-1"}


def test_a_server_of_a_release_with_another_protocol_does_not_join(cluster: Cluster) -> None:
    other = release(cluster.folder / "other", protocol=PROTOCOL + 1)
    cluster.begin("trainer.log", "trainer", str(cluster.file))
    cluster.server("old-0")
    asyncio.run(cluster.beat_of("old-0"))
    assert cluster.server("new-0", release=other).wait(120) == EXIT_CONFIG
    said = (cluster.folder / "new-0.log").read_text()
    assert re.search(rf"ConfigError: the trainer of this run speaks protocol {PROTOCOL}, this rollout server", said)
