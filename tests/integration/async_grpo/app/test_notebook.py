"""The notebook of examples/, executed as a notebook does: cell by cell, in a process with a running event loop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from async_grpo import load_run
from async_grpo.app.runs.run import RunStatus
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[4]
NOTEBOOK = ROOT / "examples" / "first_run.ipynb"
EXECUTE = """
import asyncio, json, sys

async def main():
    names = {}
    for cell in json.load(open(sys.argv[1]))["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    print("longer:", len(names["longer"].steps()))

asyncio.run(main())
"""


def execute(folder: Path) -> subprocess.Popen[str]:
    kernels = {"FORCE_COLOR": "1", "CLICOLOR_FORCE": "1"}  # set by ipykernel
    environment = {**os.environ, **kernels, "PYTHONPATH": str(ROOT), "ASYNC_GRPO_CACHE": str(folder / "cache")}
    words = [sys.executable, "-c", EXECUTE, str(NOTEBOOK)]
    return subprocess.Popen(
        words, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    printed, _ = (process := execute(tmp_path)).communicate(timeout=500)
    assert process.returncode == 0, printed[-3000:]
    assert "step 4/4" in printed
    assert "\x1b" not in printed
    assert printed.endswith("longer: 6\n")
    run = load_run(tmp_path / "runs" / "notebook")
    assert run.status() is RunStatus.FINISHED
    assert (run.summary()["steps"], run.summary()["balanced"]) == (6, True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_interrupt_stops_the_run_in_order_and_leaves_no_process(tmp_path: Path) -> None:
    process = execute(tmp_path)
    run = tmp_path / "runs" / "notebook"
    wait_until(lambda: (run / "roles.yaml").exists(), "the roles to start", 120.0)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=120)
    assert "KeyboardInterrupt" in printed
    assert load_run(run).status() is RunStatus.INTERRUPTED
    assert not any(child.is_running() for child in children)
