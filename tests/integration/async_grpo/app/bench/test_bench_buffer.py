"""`async-grpo bench buffer`, as a smoke run: real processes, a real server, no claim about speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from async_grpo.config.buffer import RedisConfig
from buffer.redis.client import make_client
from buffer.redis.retrying import RetryingClient

COMMAND = [sys.executable, "-m", "async_grpo.app.cli.main", "bench", "buffer", "--quick"]
TRANSITIONS = ("put_tasks", "admit", "heartbeat", "progress", "insert", "take", "release", "discard", "stats")


def test_a_quick_bench_measures_every_figure_and_leaves_nothing_behind(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    with tempfile.TemporaryDirectory() as temp:  # tmp_path is too long for a socket
        environment = {**os.environ, "TMPDIR": temp, "COLUMNS": "200"}
        command = [*COMMAND, "--json", str(file)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        assert not list(Path(temp).iterdir())
    content = json.loads(file.read_text())
    names = [figure["name"] for figure in content["figures"]]
    for start in ("throughput, 1 producer", "throughput, 8 producers", "insert to take", *TRANSITIONS):
        assert any(name.startswith(start) for name in names), start
    for figure in content["figures"]:
        assert figure["value"] > 0 and figure["baseline"] > 0 and figure["ratio"] > 0
        assert figure["name"] in done.stdout


async def test_a_bench_on_a_given_server_leaves_no_key_on_it(redis_config: RedisConfig, tmp_path: Path) -> None:
    assert redis_config.url is not None
    command = [*COMMAND, "--url", redis_config.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)  # noqa: ASYNC221
    assert done.returncode == 0, done.stderr
    link = RetryingClient(make_client(redis_config), 5.0)
    assert not [name async for name in link.client.scan_iter(match="agrpo:{bench-*")]
    await link.aclose()


def test_a_server_that_is_not_there_is_named() -> None:
    command = [*COMMAND, "--url", "unix:///nowhere/server.sock"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    assert "ServerLost" in done.stderr and "Traceback" not in done.stderr
