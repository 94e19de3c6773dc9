"""A sweep of two tiny real runs, one of which is killed on the way."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.whole_run import CONFIG, CommandInFolder, still_runs

STEPS = 4
KILLED, KEPT = "small-max_staleness.0-seed.1", "small-max_staleness.2-seed.1"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


class SweepCommand(CommandInFolder):
    """`async-grpo sweep` as a user starts it; start it again to resume."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.out = folder / "out"
        (folder / "small.yaml").write_text(CONFIG.format(steps=STEPS, max_tokens=48))

    def start(self, *words: str) -> None:
        self._printed.unlink(missing_ok=True)
        self.begin("sweep", *(words or ("small.yaml", "--grid", "max_staleness=0,2", "--out", "out")))

    def run_of(self, name: str) -> psutil.Process:
        """The `async-grpo run` of a point, once it has trained a step."""
        deadline, metrics = time.monotonic() + 300, self.out / "runs" / name / "metrics.jsonl"
        while not (metrics.exists() and '"kind":"step"' in metrics.read_text()):
            assert self.process.poll() is None and time.monotonic() < deadline, self.printed[-3000:]
            time.sleep(0.02)
        children = psutil.Process(self.process.pid).children()
        return next(child for child in children if any(name in word for word in child.cmdline()))

    def facts(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.out / "sweep.json").read_text())
        return found


@pytest.fixture
def sweep(tmp_path: Path) -> Iterator[SweepCommand]:
    command = SweepCommand(tmp_path)
    yield command
    command.close()


def states(facts: dict[str, Any]) -> dict[str, str]:
    return {point["name"]: point["state"] for point in facts["points"]}


def test_the_same_command_finishes_a_sweep_with_a_killed_run(sweep: SweepCommand) -> None:
    sweep.start()
    killed = sweep.run_of(KILLED)
    family = killed.children(recursive=True)
    killed.kill()
    assert sweep.wait(700) == 1, sweep.printed[-3000:]
    assert f"failed: {KILLED}" in sweep.printed and "SIGKILL" in sweep.printed
    assert not [process for process in family if still_runs(process)]
    facts = sweep.facts()
    assert states(facts) == {KILLED: "failed", KEPT: "finished"}
    assert facts["choice"]["label"] == "max_staleness=2"
    kept = (sweep.out / "runs" / KEPT / "run.json").read_text()

    sweep.start()
    assert sweep.wait(700) == 0, sweep.printed[-3000:]
    assert "2 points in out, 1 to run" in sweep.printed
    assert (sweep.out / "runs" / KEPT / "run.json").read_text() == kept
    facts = sweep.facts()
    assert states(facts) == {KILLED: "finished", KEPT: "finished"}
    for point in facts["points"]:
        assert (point["steps_done"], point["balanced"], point["error"]) == (STEPS, True, "")
        assert point["age_max"] <= point["age_bound"] == int(point["values"]["max_staleness"])
        for figure in ("accuracy_after", "samples_per_s", "trainer_idle", "rollout_idle", "ess", "logprob_gap_mean"):
            assert point[figure] is not None, figure
    assert facts["choice"]["reason"] and not facts["choice"]["excluded"]
    report = (sweep.out / "report.md").read_text()
    for name in ("tradeoff", "reward_by_step", "reward_by_time", "figures"):
        assert f"plots/{name}.png" in report and (sweep.out / "plots" / f"{name}.png").stat().st_size > 0

    (sweep.out / "report.md").unlink()
    sweep.start("--report", "out")
    assert sweep.wait(700) == 0, sweep.printed[-3000:]
    assert (sweep.out / "report.md").read_text() == report
