"""A live run is stopped from outside: its processes and no others, and only as fast as they end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from async_grpo.app.runs.run import Run, RunStatus
from async_grpo.app.runs.stop import stop_run
from async_grpo.errors import WaitTimeout

HOLDER = """
import signal, sys, time
from pathlib import Path
from async_grpo.app.launch.run_folder import RunFolder
wanted, asked = int(sys.argv[2]), []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
with RunFolder(Path(sys.argv[1])).locked():
    print("held", flush=True)
    while len(asked) < wanted:
        time.sleep(0.01)
"""
READER = "import sys, time\nwith open(sys.argv[1]):\n    print('reads', flush=True)\n    time.sleep(60)\n"
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def program(text: str, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-c", text, *arguments], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline()
        return process

    yield program
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text("steps: 4\n")
    return tmp_path


def stop(folder: Path, said: list[str] | None = None, **options: bool | float) -> RunStatus:
    given = {"now": False, "timeout_s": 20.0, **options}
    return stop_run(Run.open(folder), report_progress=(said if said is not None else []).append, **given)  # type: ignore[arg-type]


def test_the_process_that_holds_the_run_is_asked_to_end_and_who_looks_at_it_is_not(folder: Path, start: Start) -> None:
    holder = start(HOLDER, str(folder), "1")
    (lock,) = [path for path in Run.open(folder).folder.lock_files() if path.exists()]
    reader = start(READER, str(lock))
    said: list[str] = []
    assert stop(folder, said) is RunStatus.INTERRUPTED
    assert said == [f"asked process {holder.pid} to end; the trainer saves a checkpoint"]
    assert holder.wait(5) == 0
    assert reader.poll() is None


def test_a_process_that_goes_on_is_named_and_now_asks_twice(folder: Path, start: Start) -> None:
    holder = start(HOLDER, str(folder), "2")
    with pytest.raises(WaitTimeout, match=f"{holder.pid}.*--now"):
        stop(folder, timeout_s=0.5)
    assert stop(folder, now=True) is RunStatus.INTERRUPTED
    assert holder.wait(5) == 0


def test_a_run_that_is_not_live_stays_as_it_is(folder: Path) -> None:
    assert stop(folder) is RunStatus.INTERRUPTED
