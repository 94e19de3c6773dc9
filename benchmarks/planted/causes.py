"""Ten causes of a slow run, and how each is planted in a real run: by configuration, or by disturbing the machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from async_grpo.errors import ConfigError
from async_grpo.telemetry.bottleneck import Cause
from benchmarks.slowdown import PERIOD_S, RUNNING_FRACTION, find_processes, send_signal

GROUPS = 4
SIZE = 4
PROMPT = 32
CONSTANT = 40
SHORT = 8
LONG = 400
"""Completion length in tokens, as CONSTANT and SHORT."""
LINK = "60mbit"
FSYNC_S = 0.4
BUSY_PROCESSES = 2
"""Busy processes per processor."""
SLOW_FSYNC_SOURCE = r"""
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <sys/syscall.h>
static int slow(int descriptor, int call) {
    char name[64], path[4096];
    snprintf(name, sizeof name, "/proc/self/fd/%d", descriptor);
    ssize_t size = readlink(name, path, sizeof path - 1);
    if (size > 0 && (path[size] = 0, strstr(path, "/checkpoints/"))) usleep(DELAY_US);
    return syscall(call, descriptor);
}
int fsync(int descriptor) { return slow(descriptor, SYS_fsync); }
int fdatasync(int descriptor) { return slow(descriptor, SYS_fdatasync); }
"""


@dataclass(frozen=True, slots=True)
class PlantedRun:
    """A run with a planted cause."""

    cause: Cause
    method: str
    """How the cause was planted, in a few words."""
    overrides: Sequence[str] = ()
    steps: int = 10
    lengths: tuple[int, ...] = (CONSTANT,) * GROUPS * SIZE
    """Completion tokens of the samples of every step."""
    wrap_command: Callable[[list[str], Path], tuple[list[str], dict[str, str]]] = lambda command, _: (command, {})
    """Takes the run's command line and a folder for files. Returns the command line that plants the cause, and
    additional environment variables."""
    disturb: Callable[[Path], AbstractContextManager[None]] = lambda _: nullcontext()
    """Takes the run's folder. The context manager disturbs the run from its first step on."""


def slow_disk(command: list[str], folder: Path) -> tuple[list[str], dict[str, str]]:
    """Delay every fsync of a file in a checkpoint folder by FSYNC_S. Needs a C compiler."""
    source = folder / "slow_fsync.c"
    library = folder / "slow_fsync.so"
    source.write_text(SLOW_FSYNC_SOURCE.replace("DELAY_US", str(round(FSYNC_S * 1e6))))
    compiler = subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], capture_output=True, text=True)
    if compiler.returncode:
        raise ConfigError(f"the slow disk needs a C compiler (cc): {compiler.stderr.strip()}")
    return command, {"LD_PRELOAD": str(library)}


def slow_link(command: list[str], folder: Path) -> tuple[list[str], dict[str, str]]:
    """Give the run its own loopback interface with little bandwidth. Needs root and the package iproute2."""
    del folder
    shaping = f"tc qdisc add dev lo root tbf rate {LINK} burst 256kb latency 400ms"
    script = f'ip link set lo up && ip link set lo mtu 16384 && {shaping} && exec "$@"'
    return ["unshare", "--net", "sh", "-ec", script, "sh", *command], {}


@contextmanager
def slow_server(run: Path) -> Iterator[None]:
    """Stop the second server's processes for most of the time."""
    ended = threading.Event()

    def stop_and_continue() -> None:
        while not ended.is_set():
            pids = find_processes("server", run, "rollout-1")
            send_signal(pids, signal.SIGSTOP)
            ended.wait(PERIOD_S * (1 - RUNNING_FRACTION))
            send_signal(pids, signal.SIGCONT)
            ended.wait(PERIOD_S * RUNNING_FRACTION)

    thread = threading.Thread(target=stop_and_continue)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def run_busy_processes(run: Path) -> Iterator[None]:
    """Run busy processes in parallel with the run.

    Each is in its own session, because the kernel shares processors by session: in one session, all of them together
    would get no more time than the run.
    """
    del run
    command = [sys.executable, "-c", "while True: pass"]
    count = BUSY_PROCESSES * len(os.sched_getaffinity(0))
    processes = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


_TAIL = (LONG,) + (SHORT,) * (SIZE - 1) + (SHORT,) * (SIZE * (GROUPS - 1))
_REWARD = "rewards.functions=[{name: 'benchmarks.planted.plugins:slow_reward'}]"
PLANTED: dict[str, PlantedRun] = {
    "slow verifier": PlantedRun(
        Cause.VERIFIERS,
        "a reward takes 0.15 s",
        overrides=(_REWARD, "rewards.workers=1"),
    ),
    "slow disk": PlantedRun(
        Cause.CHECKPOINTS,
        "an fsync takes 0.4 s",
        overrides=("trainer.checkpoint.every_steps=1",),
        wrap_command=slow_disk,
    ),
    "few slots": PlantedRun(
        Cause.SLOTS,
        "max_concurrency 1",
        overrides=("rollout.max_concurrency=1",),
    ),
    "small window": PlantedRun(
        Cause.WINDOW,
        "S = 0",
        overrides=("max_staleness=0", "rollout.max_concurrency=64"),
    ),
    "tail": PlantedRun(
        Cause.TAIL,
        "one completion of 400 tokens among 15 of 8",
        lengths=_TAIL,
    ),
    "slow sync": PlantedRun(
        Cause.WEIGHTS,
        f"a link of {LINK}",
        wrap_command=slow_link,
    ),
    "slow server": PlantedRun(
        Cause.SLOW_SERVER,
        "one of two stopped for 80% of the time",
        overrides=("rollout.servers=2",),
        disturb=slow_server,
    ),
    "starved tasks": PlantedRun(
        Cause.TASKS,
        "a row takes 0.5 s",
        overrides=("rollout.workflow=benchmarks.planted.plugins:SlowRows",),
    ),
    "evaluation": PlantedRun(
        Cause.EVALUATION,
        "48 prompts after every step",
        overrides=("eval.every_steps=1", "eval.prompts=48", "eval.samples=1"),
    ),
    "CPU contention": PlantedRun(
        Cause.CPU,
        f"{BUSY_PROCESSES} busy processes per processor",
        disturb=run_busy_processes,
        steps=40,
    ),
}
