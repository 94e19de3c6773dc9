"""Starts `async-grpo run` as users do, with access to its output, its folder and its roles."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import redis

from async_grpo.config import RunConfig, load
from buffer.redis.scripts import RunKeys

CONFIG = """\
name: small
steps: {steps}
max_staleness: 1
group_size: 4
groups_per_step: 4
model: {{random: {{hidden_size: 64, layers: 2, heads: 2, kv_heads: 1, intermediate_size: 128, vocab_size: 300}}}}
data: {{kind: arithmetic}}
sampling: {{max_tokens: {max_tokens}}}
redis: {{timeout_s: 10}}
rollout: {{max_concurrency: 16, lease_s: 10, vllm: {{max_model_len: 256, kv_cache_bytes: 67108864}}}}
trainer: {{optimizer: {{lr: 1.0e-3}}, checkpoint: {{every_steps: 2}}}}
eval: {{prompts: 16, samples: 1}}
"""
COMMAND = [sys.executable, "-m", "async_grpo.app.cli.main"]


class CommandInFolder:
    """An `async-grpo` command in its own folder, with its output in a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._printed = folder / "printed.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def printed(self) -> str:
        return self._printed.read_text()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "ASYNC_GRPO_CACHE": str(self.folder / "cache"), "COLUMNS": "200"}

    def begin(self, *words: str) -> None:
        self._process = self.beside(self._printed, *words)

    def beside(self, log: Path, *words: str) -> subprocess.Popen[bytes]:
        """Start another command in the same folder."""
        with log.open("ab") as printed:
            return subprocess.Popen(
                [*COMMAND, *words],
                cwd=self.folder,
                stdout=printed,
                stderr=printed,
                env=self.environment,
                start_new_session=True,
            )

    def wait(self, timeout_s: float = 240.0) -> int:
        return self.process.wait(timeout_s)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


class WholeRun(CommandInFolder):
    """One `async-grpo run` in `folder`. Starting it again resumes it."""

    def __init__(self, folder: Path, *, steps: int, max_tokens: int = 24, overrides: tuple[str, ...] = ()) -> None:
        super().__init__(folder)
        self._config = folder / "small.yaml"
        self._config.write_text(CONFIG.format(steps=steps, max_tokens=max_tokens))
        self._overrides = [argument for override in ("name=small", *overrides) for argument in ("-o", override)]

    @property
    def run_dir(self) -> Path:
        return self.folder / "runs" / "small"

    def start(self) -> None:
        self.begin("run", str(self._config), *self._overrides)

    def interrupt(self) -> None:
        """Send SIGINT, as Ctrl-C does."""
        self.process.send_signal(signal.SIGINT)

    def wait_for_step(self, step: int, timeout_s: float = 180.0) -> None:
        self.until(lambda: max([row["step"] for row in self.steps()], default=0) >= step, f"step {step}", timeout_s)

    def wait_for_end(self, *, measured: bool, timeout_s: float = 240.0) -> None:
        """Wait until the trainer has reported the end; with `measured` also for the final evaluation."""
        client = redis.Redis.from_url(self.roles_config().redis.url or "")
        keys = RunKeys("small")
        steps = self.roles_config().steps

        def has_ended() -> bool:
            ended = client.hget(keys.key("meta"), "ended") == b"1"
            return ended and (not measured or bool(client.hexists(keys.key("board:evaluations"), str(steps))))

        self.until(has_ended, "the end", timeout_s)

    def steps(self) -> list[dict[str, Any]]:
        path = self.run_dir / "metrics.jsonl"
        if not path.exists():
            return []
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        return [row for row in rows if row["kind"] == "step"]

    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        return summary

    def roles_config(self) -> RunConfig:
        """Return the roles' configuration, with the server's address."""
        return load(self.run_dir / "roles.yaml")

    def start_server(self, name: str) -> subprocess.Popen[bytes]:
        """Start another rollout server."""
        return self.beside(self.folder / f"{name}.log", "rollout", "--run-dir", str(self.run_dir), "--name", name)

    def run_command(self, name: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command on this run and wait for its end."""
        argv = [*COMMAND, name, "--run-dir", str(self.run_dir), *words]
        return subprocess.run(argv, cwd=self.folder, capture_output=True, text=True, timeout=300, env=self.environment)

    def find_role(self, module: str) -> psutil.Process:
        """Return the newest process that runs `-m module`."""
        processes = [process for process in self.list_processes() if _runs_module(process, module)]
        assert processes, f"no process runs {module}"
        return processes[-1]

    def list_processes(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def until(self, condition: Callable[[], bool], event: str, timeout_s: float) -> None:
        """Wait for the condition; fails if the run ends before."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            code = self.process.poll()
            assert code is None, f"the run ended with {code} before {event}:\n{self.printed[-3000:]}"
            assert time.monotonic() < deadline, f"no {event} within {timeout_s} s:\n{self.printed[-3000:]}"
            time.sleep(0.1)


def _runs_module(process: psutil.Process, module: str) -> bool:
    try:
        arguments = process.cmdline()
    except psutil.NoSuchProcess:
        return False
    return any(option == "-m" and value == module for option, value in itertools.pairwise(arguments))


def still_runs(process: psutil.Process) -> bool:
    """True if the process has not ended. One that has ended but is not reaped yet does not count."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def check_books(summary: dict[str, Any], *, steps: int, groups_per_step: int = 4) -> None:
    """Check that every admitted group is accounted for, and that none was trained twice or too late."""
    groups = dict(summary["groups"])
    admitted = groups.pop("admitted")
    assert admitted == sum(groups.values())
    assert summary["balanced"]
    assert groups["trained"] == steps * groups_per_step
    assert groups["active"] == 0
    assert summary["steps"] == steps
    assert summary["max_age"] <= summary["max_staleness"]
