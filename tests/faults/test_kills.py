"""kill -9 in the middle of a real run: it is named, it comes back, and the books balance."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.small_disk import leave_free, small_disk
from tests.support.whole_run import WholeRun, check_books, still_runs

STEPS = 10

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]


@pytest.fixture
def run(start: Callable[..., WholeRun]) -> WholeRun:
    return start(steps=STEPS, max_tokens=96)


@pytest.mark.parametrize(("module", "role"), [("rollout_server.main", "rollout-0"), ("trainer.main", "trainer")])
def test_a_killed_role_is_named_and_restarted_and_the_run_finishes(run: WholeRun, module: str, role: str) -> None:
    run.wait_for_step(3)
    run.role(module).kill()
    assert run.wait(400) == 0, run.printed[-3000:]
    assert f"{role} " in run.printed
    assert "restart 1 of" in run.printed
    assert run.summary()["restarts"][role] == 1
    check_books(run.summary(), steps=STEPS)


def test_a_trainer_killed_after_the_end_costs_a_restart_of_its_own_and_none_of_the_servers(run: WholeRun) -> None:
    run.wait_for_step(STEPS)
    trainer, server = run.role("trainer.main"), run.role("rollout_server.main")
    run.wait_for_end(measured=False)
    trainer.suspend()
    run.wait_for_end(measured=True)
    server.wait(60)
    trainer.kill()
    assert run.wait(400) == 0, run.printed[-3000:]
    check_end(run, {"trainer": 1, "rollout-0": 0})


@pytest.mark.parametrize("measured", [False, True])
def test_a_run_killed_after_the_end_is_finished_by_the_same_command(run: WholeRun, measured: bool) -> None:
    run.wait_for_step(STEPS)
    trainer = run.role("trainer.main")
    run.wait_for_end(measured=False)
    trainer.suspend()
    if measured:
        run.wait_for_end(measured=True)
    run.close()
    run.start()
    assert run.wait(400) == 0, run.printed[-3000:]
    check_end(run, {"trainer": 0} if measured else {"trainer": 0, "rollout-0": 0})


def check_end(run: WholeRun, restarts: dict[str, int]) -> None:
    """Everything that a run ends with is there."""
    summary = run.summary()
    check_books(summary, steps=STEPS)
    assert summary["restarts"] == restarts
    assert summary["evaluations"][-1]["version"] == STEPS
    rows = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert "probe" in {row["kind"] for row in rows}
    assert list((run.run_dir / "checkpoints" / "hf").glob("*.safetensors"))


def test_a_killed_engine_core_is_started_again_by_its_server(run: WholeRun) -> None:
    run.wait_for_step(3)
    [core] = [process for process in run.family() if "EngineCore" in process.name()]
    core.kill()
    assert run.wait(400) == 0, run.printed[-3000:]
    assert "the engine died and is started again" in (run.run_dir / "logs" / "rollout-0.log").read_text()
    assert run.summary()["restarts"]["rollout-0"] == 0
    check_books(run.summary(), steps=STEPS)


def test_a_killed_server_comes_back_on_its_append_only_file(run: WholeRun) -> None:
    run.wait_for_step(3)
    [server] = [process for process in run.family() if "valkey" in process.name() or "redis" in process.name()]
    server.kill()
    assert run.wait(400) == 0, run.printed[-3000:]
    assert "embedded server died" in run.printed
    assert run.summary()["balanced"]


def test_a_full_disk_below_the_server_stops_the_run_by_name_and_it_resumes(tmp_path: Path) -> None:
    whole = WholeRun(tmp_path, steps=STEPS, max_tokens=96)
    with small_disk(whole.run_dir / "server", 48) as disk:
        try:
            whole.start()
            whole.wait_for_step(3)
            filler = leave_free(disk, 0)
            assert whole.wait(200) == 1, whole.printed[-3000:]
            assert " MB free; the run waits 10 s for space" in whole.printed
            assert "ServerLost: disk full at " in whole.printed
            filler.unlink()
            whole.start()
            assert whole.wait(400) == 0, whole.printed[-3000:]
            check_books(whole.summary(), steps=STEPS)
        finally:
            whole.close()


def test_ctrl_c_ends_cleanly_and_the_same_command_resumes(run: WholeRun) -> None:
    run.wait_for_step(3)
    family = run.family()
    run.interrupt()
    assert run.wait(90) == 130, run.printed[-3000:]
    assert not [process for process in family if still_runs(process)]
    assert (run.run_dir / "report.md").exists()
    run.start()
    assert run.wait(400) == 0, run.printed[-3000:]
    check_books(run.summary(), steps=STEPS)


def test_killing_the_supervisor_leaves_no_orphan_and_the_run_resumes(run: WholeRun) -> None:
    run.wait_for_step(3)
    family = run.family()
    run.close()
    _, left = psutil.wait_procs(family, timeout=15)
    assert not left
    run.start()
    assert run.wait(400) == 0, run.printed[-3000:]
    check_books(run.summary(), steps=STEPS)
