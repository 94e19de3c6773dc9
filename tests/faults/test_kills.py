"""kill -9 in the middle of a real run: it is named, it comes back, and the books balance."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.whole_run import WholeRun, check_books

STEPS = 10

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[WholeRun]:
    whole = WholeRun(tmp_path, steps=STEPS, max_tokens=96)
    whole.start()
    yield whole
    whole.close()


def runs(process: psutil.Process) -> bool:
    """Not gone, and not merely waiting for init to take note of its end."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(("module", "role"), [("rollout_server.main", "rollout-0"), ("trainer.main", "trainer")])
def test_a_killed_role_is_named_and_restarted_and_the_run_finishes(run: WholeRun, module: str, role: str) -> None:
    run.wait_for_step(3)
    run.role(module).kill()
    assert run.wait(400) == 0, run.printed[-3000:]
    assert f"{role} " in run.printed
    assert "restart 1 of" in run.printed
    assert run.summary()["restarts"][role] == 1
    check_books(run.summary(), steps=STEPS)


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


def test_ctrl_c_ends_cleanly_and_the_same_command_resumes(run: WholeRun) -> None:
    run.wait_for_step(3)
    family = run.family()
    run.interrupt()
    assert run.wait(90) == 130, run.printed[-3000:]
    assert not [process for process in family if runs(process)]
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
