"""Parallel runs of a sweep, with scripted processes instead of `async-grpo run`."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from async_grpo.errors import ConfigError
from async_grpo.lab.sweep import runner as runner_module
from async_grpo.lab.sweep.folder import SweepFolder
from async_grpo.lab.sweep.plan import Point
from async_grpo.lab.sweep.progress import RunningPoint, SweepState, SweepView, eta_s, format_line, progress_table
from async_grpo.lab.sweep.runner import (
    AttemptOutcome,
    AttemptResult,
    SweepRunner,
    classify_outcome,
    make_device_pool,
    required_devices,
)
from tests.support.sweep_fakes import STEPS, point

MakeRunner = Callable[..., SweepRunner]

SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path

folder, how, events = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
folder.mkdir(parents=True, exist_ok=True)

def note(word):
    with open(events, "ab", buffering=0) as file:
        file.write(f"{word} {folder.name} {os.environ.get('CUDA_VISIBLE_DEVICES', '-')}\\n".encode())

def leave(code):
    note("end")
    sys.exit(code)

if how == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: leave(130))
note("start")
if how == "fail":
    print("RoleFailed: the trainer died")
    leave(1)
with open(folder / "metrics.jsonl", "a") as metrics:
    metrics.write(json.dumps({"kind": "step", "step": 1, "reward_mean": 0.5}) + "\\n")
if how == "together":
    for _ in range(1200):
        if Path(events).read_text().count("start") >= 2:
            break
        time.sleep(0.05)
    else:
        leave(1)
if how in ("hang", "stubborn"):
    time.sleep(120)
(folder / "run.json").write_text(json.dumps({"finished_steps": STEPS}))
leave(0)
""".replace("STEPS", str(STEPS))


@pytest.fixture
def make_runner(tmp_path: Path) -> MakeRunner:
    """A runner whose runs follow a script and log to `tmp_path / "events"`."""
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    folder = SweepFolder(tmp_path / "s")

    def made(
        how: dict[str, str],
        at_once: int = 1,
        show: Callable[[SweepState], None] = lambda state: None,
        **changes: object,
    ) -> SweepRunner:
        points = [point(folder.runs_dir, name, **{"launch": {"stop_timeout_s": 0.5}, **changes}) for name in how]

        def argv(one: Point) -> list[str]:
            words = (script, one.config.run_dir, how[one.name], tmp_path / "events")
            return [sys.executable, "-S", *map(str, words)]

        pool = make_device_pool([one.config for one in points], at_once, {"CUDA_VISIBLE_DEVICES": "4,5,6"})
        shares = {"total": len(points), "at_once": at_once, "pool": pool}
        return SweepRunner(points, folder, argv=argv, **shares, show=show, on_end=lambda result: None)

    return made


def outcomes(results: list[AttemptResult]) -> dict[str, AttemptOutcome]:
    return {result.point.name: result.outcome for result in results}


def events(tmp_path: Path) -> list[list[str]]:
    return [row.split() for row in (tmp_path / "events").read_text().splitlines()]


def running(word: str) -> list[psutil.Process]:
    """Child processes whose command has that word. What has ended has no command, whether it was waited for or not."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # and ZombieProcess, which is one
            if word in child.cmdline():
                found.append(child)
    return found


async def test_a_failed_run_is_reported_and_the_others_continue(make_runner: MakeRunner) -> None:
    results = await make_runner({"a": "finish", "b": "fail", "c": "finish"}).run_points()
    assert outcomes(results) == {"a": AttemptOutcome.FINISHED, "b": AttemptOutcome.FAILED, "c": AttemptOutcome.FINISHED}
    [failed] = [result for result in results if result.error]
    assert "exit code 1: RoleFailed: the trainer died" in failed.error


async def test_one_run_at_a_time_by_default(make_runner: MakeRunner, tmp_path: Path) -> None:
    await make_runner({"a": "finish", "b": "finish"}).run_points()
    assert [row[:2] for row in events(tmp_path)] == [["start", "a"], ["end", "a"], ["start", "b"], ["end", "b"]]


async def test_parallel_runs_never_exceed_the_requested_number(make_runner: MakeRunner, tmp_path: Path) -> None:
    results = await make_runner(dict.fromkeys("abcd", "together"), at_once=2).run_points()
    assert set(outcomes(results).values()) == {AttemptOutcome.FINISHED}
    running = most = 0
    for word, *_ in events(tmp_path):
        running += 1 if word == "start" else -1
        most = max(most, running)
    assert most == 2


async def test_ctrl_c_stops_all_runs_and_starts_no_more(make_runner: MakeRunner, tmp_path: Path) -> None:
    runner = make_runner(
        dict.fromkeys("abc", "hang"),
        at_once=2,
        show=lambda state: _when_all_run(state, lambda: os.kill(os.getpid(), signal.SIGINT)),
    )
    results = await runner.run_points()
    assert runner.stopping
    assert outcomes(results) == {"a": AttemptOutcome.STOPPED, "b": AttemptOutcome.STOPPED}
    assert [result.error for result in results] == ["", ""]
    assert Counter(word for word, *_ in events(tmp_path)) == {"start": 2, "end": 2}


async def test_a_run_that_does_not_stop_is_killed_at_the_deadline(
    make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "REPORT_TIMEOUT_S", 0.5)
    runner = make_runner({"a": "stubborn"}, show=lambda state: _when_all_run(state, lambda: runner.stop()))
    assert outcomes(await runner.run_points()) == {"a": AttemptOutcome.STOPPED}
    assert not running("stubborn")


async def test_an_error_of_the_sweep_leaves_no_run_behind(make_runner: MakeRunner) -> None:
    def fail(state: SweepState) -> None:
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        await make_runner({"a": "hang"}, show=fail).run_points()
    assert not running("hang")


async def test_parallel_runs_never_share_a_device(make_runner: MakeRunner, tmp_path: Path) -> None:
    runner = make_runner(dict.fromkeys("abc", "finish"), at_once=3, **on_cuda(1))
    assert set(outcomes(await runner.run_points()).values()) == {AttemptOutcome.FINISHED}
    held: set[str] = set()
    for word, _, devices in events(tmp_path):
        own = set(devices.split(","))
        assert len(own) == 2 and own <= {"4", "5", "6"}
        if word == "start":
            assert not held & own
        held = held | own if word == "start" else held - own


def on_cuda(processes: int) -> dict[str, object]:
    return {"trainer": {"platform": "cuda", "processes": processes}, "rollout": {"vllm": {"platform": "cuda"}}}


def test_devices_of_an_ended_run_go_to_the_next(tmp_path: Path) -> None:
    config = point(tmp_path, **on_cuda(2)).config
    assert required_devices(config) == ("cuda", 3)
    pool = make_device_pool([config], 2, {"CUDA_VISIBLE_DEVICES": "4,5,6"})
    assert pool is not None
    assert pool.take("a", 3) == {"CUDA_VISIBLE_DEVICES": "4,5,6"}
    assert pool.take("b", 3) is None
    pool.give_back("a")
    assert pool.take("b", 3) == {"CUDA_VISIBLE_DEVICES": "4,5,6"}
    with pytest.raises(ConfigError, match=r"3 devices.* 2: 0, 1"):
        make_device_pool([config], 2, {"CUDA_VISIBLE_DEVICES": "0,1"})


def test_no_pool_for_single_runs_or_the_cpu(tmp_path: Path) -> None:
    assert required_devices(point(tmp_path).config) == ("", 0)
    assert make_device_pool([point(tmp_path, **on_cuda(2)).config], 1, {}) is None
    assert make_device_pool([point(tmp_path).config], 4, {}) is None


@pytest.mark.parametrize(
    ("finished", "stopping", "outcome"),
    [
        (True, False, AttemptOutcome.FINISHED),
        (True, True, AttemptOutcome.FINISHED),
        (False, True, AttemptOutcome.STOPPED),
        (False, False, AttemptOutcome.FAILED),
    ],
)
def test_an_attempt_is_classified_by_its_run_not_by_its_exit_code(
    finished: bool, stopping: bool, outcome: AttemptOutcome
) -> None:
    assert classify_outcome(finished=finished, stopping=stopping) is outcome


def test_the_remaining_time_follows_from_the_pace_so_far() -> None:
    running = RunningPoint(label="s=2", step=6, steps=10, start_step=4, elapsed_s=20.0, reward=0.25)
    state = SweepState(5, 2, 1, [running], steps_left=14, at_once=2, ended_steps=10, ended_s=40.0, elapsed_s=60.0)
    assert eta_s(state) == 14 * 60 / 12 / 2
    assert format_line(state) == "[1:00] 2 of 5 points finished, 1 failed, 0:35 left | s=2 at step 6/10"
    starting = RunningPoint(label="s=4", step=0, steps=10, start_step=0, elapsed_s=99.0)
    assert eta_s(replace(state, running=[running, starting])) == eta_s(state)
    assert eta_s(replace(state, steps_left=0)) is None
    assert "stopping" in format_line(replace(state, stopping=True)) and "left" not in format_line(
        replace(state, stopping=True)
    )
    begun = SweepState(5, 0, 0, [], steps_left=50, at_once=1)
    assert eta_s(begun) is None and "left" not in format_line(begun)


def test_a_terminal_shows_a_row_per_run_and_a_log_an_occasional_line() -> None:
    running = [
        RunningPoint(label="s=2", step=6, steps=10, start_step=0, elapsed_s=20.0, reward=0.25),
        RunningPoint(label="s=4", step=0, steps=10, start_step=0, elapsed_s=5.0),
    ]
    state = SweepState(5, 2, 0, running, steps_left=14, at_once=2)
    console = Console(file=io.StringIO(), width=120, record=True)
    console.print(progress_table(state))
    rows = console.export_text().splitlines()
    assert "2 of 5 points finished" in rows[0]
    assert "s=2" in rows[1] and "step 6 of 10, reward 0.250, 0:20" in rows[1]
    assert "s=4" in rows[2] and "starting" in rows[2]
    log = io.StringIO()
    with SweepView(Console(file=log, width=120), every_s=30.0) as view:
        for elapsed_s in (1.0, 31.0, 32.0, 62.0):
            view.update(replace(state, elapsed_s=elapsed_s))
    assert [row.split("]")[0] for row in log.getvalue().splitlines()] == ["[0:31", "[1:02"]


def _when_all_run(state: SweepState, act: Callable[[], None]) -> None:
    """Once every run has made a step, and so heeds SIGTERM."""
    if state.running and all(run.step for run in state.running) and len(state.running) == state.at_once:
        act()
