"""The ten causes, and how each of them is planted in a real run: by its configuration, by the machine, or beside it."""

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
from benchmarks.slowdown import PERIOD_S, SHARE, processes, send

GROUPS, SIZE, PROMPT = 4, 4, 32
CONSTANT, SHORT, LONG = 40, 8, 400
LINK = "60mbit"
FSYNC_S = 0.4
HOGS = 2
"""Busy processes for each processor."""
SHIM = r"""
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
    """A cause, and a run that has it."""

    cause: Cause
    how: str
    """What was done, in a few words."""
    overrides: Sequence[str] = ()
    steps: int = 10
    lengths: tuple[int, ...] = (CONSTANT,) * GROUPS * SIZE
    """Completion tokens of the samples of every step."""
    wrap: Callable[[list[str], Path], tuple[list[str], dict[str, str]]] = lambda command, _: (command, {})
    """Command line of the run and a folder for files -> that on the planted machine, and further environment."""
    beside: Callable[[Path], AbstractContextManager[None]] = lambda _: nullcontext()
    """Folder of the run -> what happens beside it from its first step on."""


def slow_disk(command: list[str], folder: Path) -> tuple[list[str], dict[str, str]]:
    """Every fsync of a file in a checkpoint folder takes FSYNC_S longer. Needs a C compiler."""
    source, library = folder / "slow_fsync.c", folder / "slow_fsync.so"
    source.write_text(SHIM.replace("DELAY_US", str(round(FSYNC_S * 1e6))))
    compiled = subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], capture_output=True, text=True)
    if compiled.returncode:
        raise ConfigError(f"the slow disk needs a C compiler (cc): {compiled.stderr.strip()}")
    return command, {"LD_PRELOAD": str(library)}


def slow_link(command: list[str], folder: Path) -> tuple[list[str], dict[str, str]]:
    """The run has a loopback of its own, with so little bandwidth. Needs root and the package iproute2."""
    del folder
    shaping = f"tc qdisc add dev lo root tbf rate {LINK} burst 256kb latency 400ms"
    script = f'ip link set lo up && ip link set lo mtu 16384 && {shaping} && exec "$@"'
    return ["unshare", "--net", "sh", "-ec", script, "sh", *command], {}


@contextmanager
def slow_server(run: Path) -> Iterator[None]:
    """The second server's processes are stopped for most of the time."""
    ended = threading.Event()

    def stop_and_go() -> None:
        while not ended.is_set():
            slowed = processes("server", run, "rollout-1")
            send(slowed, signal.SIGSTOP)
            ended.wait(PERIOD_S * (1 - SHARE))
            send(slowed, signal.SIGCONT)
            ended.wait(PERIOD_S * SHARE)

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def hogs(run: Path) -> Iterator[None]:
    """Processes that compute beside the run, each a session of its own, as the kernel shares processors by session."""
    del run
    command, count = [sys.executable, "-c", "while True: pass"], HOGS * len(os.sched_getaffinity(0))
    beside = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for one in beside:
            one.kill()
            one.wait()


_TAIL = ((LONG,) + (SHORT,) * (SIZE - 1)) + (SHORT,) * (SIZE * (GROUPS - 1))
_REWARD = "rewards.functions=[{name: 'benchmarks.planted.plugins:slow_reward'}]"
_EVAL = ("eval.every_steps=1", "eval.prompts=48", "eval.samples=1")
PLANTED: dict[str, PlantedRun] = {
    "slow verifier": PlantedRun(Cause.VERIFIERS, "a reward takes 0.15 s", (_REWARD, "rewards.workers=1")),
    "slow disk": PlantedRun(
        *(Cause.CHECKPOINTS, "an fsync takes 0.4 s", ("trainer.checkpoint.every_steps=1",)), wrap=slow_disk
    ),
    "few slots": PlantedRun(Cause.SLOTS, "max_concurrency 1", ("rollout.max_concurrency=1",)),
    "small window": PlantedRun(Cause.WINDOW, "S = 0", ("max_staleness=0", "rollout.max_concurrency=64")),
    "tail": PlantedRun(Cause.TAIL, "one completion of 400 tokens among 15 of 8", lengths=_TAIL),
    "slow sync": PlantedRun(Cause.WEIGHTS, f"a link of {LINK}", wrap=slow_link),
    "slow server": PlantedRun(
        *(Cause.SLOW_SERVER, "one of two stopped for 80% of the time", ("rollout.servers=2",)), beside=slow_server
    ),
    "starved tasks": PlantedRun(
        *(Cause.TASKS, "a row takes 0.5 s", ("rollout.workflow=benchmarks.planted.plugins:SlowRows",))
    ),
    "evaluation": PlantedRun(Cause.EVALUATION, "48 prompts after every step", _EVAL),
    "CPU contention": PlantedRun(Cause.CPU, f"{HOGS} busy processes a processor", beside=hogs, steps=40),
}
