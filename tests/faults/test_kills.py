"""kill -9 in the middle of a real run: it is named, it comes back, and the books balance."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from async_grpo.utils.files import try_lock
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
    run.find_role(module).kill()
    assert run.wait(400) == 0, run.printed[-3000:]
    assert f"{role} " in run.printed
    assert "restart 1 of" in run.printed
    assert run.summary()["restarts"][role] == 1
    check_books(run.summary(), steps=STEPS)


def test_the_groups_of_a_killed_server_go_on_at_once_however_long_their_leases_are(
    start: Callable[..., WholeRun],
) -> None:
    run = start("rollout.lease_s=3600", steps=STEPS, max_tokens=96)
    run.wait_for_step(3)
    run.find_role("rollout_server.main").kill()
    assert run.wait(400) == 0, run.printed[-3000:]
    assert run.summary()["restarts"]["rollout-0"] == 1
    check_books(run.summary(), steps=STEPS)


WEIGHTS = {
    "one slot": ["weights.receiver_slots=1"],
    "merged adapters": ["model.lora.rank=8"],
    "adapters": ["model.lora.rank=8", "model.lora.engine=adapters"],
}


@pytest.mark.parametrize("ways", WEIGHTS.values(), ids=WEIGHTS)
def test_weights_that_travel_another_way_find_a_killed_server_and_come_from_a_killed_trainer(
    start: Callable[..., WholeRun], ways: list[str]
) -> None:
    run = start(*ways, steps=STEPS, max_tokens=96)
    run.wait_for_step(3)
    run.find_role("rollout_server.main").kill()
    run.wait_for_step(5)
    run.find_role("trainer.main").kill()
    assert run.wait(400) == 0, run.printed[-3000:]
    assert run.summary()["restarts"] == {"trainer": 1, "rollout-0": 1}
    check_books(run.summary(), steps=STEPS)


def test_weights_through_a_folder_find_a_killed_server_and_come_from_a_killed_trainer(
    start: Callable[..., WholeRun], tmp_path: Path
) -> None:
    folder = tmp_path / "versions"
    folder.mkdir()
    ways = ["weights.transport=shared_filesystem", f"weights.location={folder}"]
    test_weights_that_travel_another_way_find_a_killed_server_and_come_from_a_killed_trainer(start, ways)
    assert not list(folder.rglob("*.dense"))


def test_a_trainer_killed_after_the_end_costs_a_restart_of_its_own_and_none_of_the_servers(run: WholeRun) -> None:
    run.wait_for_step(STEPS)
    trainer = run.find_role("trainer.main")
    server = run.find_role("rollout_server.main")
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
    trainer = run.find_role("trainer.main")
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
    [core] = [process for process in run.list_processes() if "EngineCore" in process.name()]
    core.kill()
    assert run.wait(400) == 0, run.printed[-3000:]
    assert "the engine died and is started again" in (run.run_dir / "logs" / "rollout-0.log").read_text()
    assert run.summary()["restarts"]["rollout-0"] == 0
    check_books(run.summary(), steps=STEPS)


def test_a_killed_server_comes_back_on_its_append_only_file(run: WholeRun) -> None:
    run.wait_for_step(3)
    [server] = [process for process in run.list_processes() if "valkey" in process.name() or "redis" in process.name()]
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
    family = run.list_processes()
    run.interrupt()
    assert run.wait(90) == 130, run.printed[-3000:]
    assert not [process for process in family if still_runs(process)]
    assert (run.run_dir / "report.md").exists()
    run.start()
    assert run.wait(400) == 0, run.printed[-3000:]
    check_books(run.summary(), steps=STEPS)


def test_killing_the_supervisor_leaves_no_orphan_and_the_run_resumes(run: WholeRun) -> None:
    run.wait_for_step(3)
    family = run.list_processes()
    run.close()
    _, left = psutil.wait_procs(family, timeout=15)
    assert not left
    run.start()
    assert run.wait(400) == 0, run.printed[-3000:]
    check_books(run.summary(), steps=STEPS)


def test_engines_wake_when_the_trainer_is_killed_in_its_step_on_the_device_that_they_share(
    start: Callable[..., WholeRun],
) -> None:
    both = sorted(os.sched_getaffinity(0))[:2]
    cores = f"launch.cores={{rollout: {both}, trainer: {both}}}"
    run = start("launch.share_devices=sleep", cores, steps=STEPS, max_tokens=96)
    run.wait_for_step(3, 400.0)
    trainer = run.find_role("trainer.main")
    stop_in_step(run, trainer)
    slept = len(sleeps(run))
    assert slept >= 3
    trainer.kill()
    run.until(lambda: len(sleeps(run)) > slept, "engine that wakes", 10.0)
    assert run.wait(400) == 0, run.printed[-3000:]
    assert run.summary()["restarts"] == {"trainer": 1, "rollout-0": 0}
    check_books(run.summary(), steps=STEPS)
    assert len(sleeps(run)) > STEPS


def stop_in_step(run: WholeRun, trainer: psutil.Process) -> None:
    """Stop the trainer while it has the device."""
    with (run.run_dir / ".device-use").open() as device:

        def stopped() -> bool:
            trainer.suspend()
            if not try_lock(device, shared=True):
                return True
            fcntl.flock(device, fcntl.LOCK_UN)
            trainer.resume()
            return False

        run.until(stopped, "step", 60.0)


def sleeps(run: WholeRun) -> list[str]:
    """The engine's sleeps that have ended, by its server's timeline."""
    rows = (run.run_dir / "timeline" / "rollout-0.jsonl").read_text().splitlines()
    return [row for row in rows if '"track":"sleep"' in row.replace(" ", "")]
