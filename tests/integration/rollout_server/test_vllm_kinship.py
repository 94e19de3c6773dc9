"""A rollout server that is killed leaves no engine behind."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from async_grpo.utils.processes import OWNER
from tests.support.waiting import wait_until

OWNER_PROGRAM = """
import os, subprocess, sys
from async_grpo.utils.processes import become_owner
become_owner()
engine = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
print(engine.pid, flush=True)
engine.wait()
"""
MERGED = "from async_grpo.utils.processes import exit_with_owner; import time; exit_with_owner(); time.sleep(60)"
WITH_WORKER = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {MERGED!r}])"
JUST_SPAWNED = "import runpy, time; runpy.run_module('rollout_server.main', run_name='__mp_main__'); time.sleep(60)"
"""A process at the start of multiprocessing, before vLLM's own code and any worker."""


@pytest.mark.parametrize(
    "engine_program", [MERGED, WITH_WORKER, JUST_SPAWNED], ids=["merged", "with-worker", "just-spawned"]
)
def test_the_engine_ends_with_its_killed_owner(engine_program: str) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER_PROGRAM, engine_program], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    engine = psutil.Process(int(owner.stdout.readline()))
    wait_until(
        lambda: any(watches(process) for process in [engine, *engine.children()]),
        f"the engine or its worker watches the owner ({OWNER})",
    )
    owner.kill()
    owner.wait()
    assert psutil.wait_procs([engine], timeout=10)[1] == []


@pytest.mark.parametrize("wrapped", [False, True], ids=["merged", "with-worker"])
def test_a_starting_engine_ends_with_its_killed_owner(wrapped: bool) -> None:
    late = MERGED.replace("exit_with_owner();", "time.sleep(1.5); exit_with_owner();")
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {late!r}])" if wrapped else late
    owner = subprocess.Popen([sys.executable, "-c", OWNER_PROGRAM, program], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    engine = psutil.Process(int(owner.stdout.readline()))
    if wrapped:
        wait_until(engine.children, "the engine has a worker")
    family = [engine, *engine.children()]
    owner.kill()
    owner.wait()
    assert psutil.wait_procs(family, timeout=15)[1] == []


def watches(process: psutil.Process) -> bool:
    """True if the process has a pidfd. A starting process opens and closes files while we look."""
    for link in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if str(link.readlink()) == "anon_inode:[pidfd]":
                return True
    return False
