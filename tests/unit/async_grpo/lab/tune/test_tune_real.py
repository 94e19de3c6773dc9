"""`--real N`: short runs of the best points, and a verdict by their measurements. Only the runs' files are faked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from async_grpo.config import dump, load
from async_grpo.errors import DataError
from async_grpo.lab.simulate.prediction import TimingsOptions
from async_grpo.lab.sweep.folder import SweepFolder
from async_grpo.lab.sweep.plan import SweepPlan
from async_grpo.lab.tune import tune as tuned
from async_grpo.lab.tune.advice import list_changes
from tests.support.recorded_runs import PLAIN
from tests.support.sweep_fakes import leave_run

TIMINGS = "{lengths: {mean: 30}, engine: {step_s: 0.005}, trainer: {base_s: 0.2, token_s: 1.0e-4}}"


@pytest.fixture
def options(tmp_path: Path) -> tuned.TuneOptions:
    file, timings = tmp_path / "run.yaml", tmp_path / "timings.yaml"
    small = {"group_size": 2, "groups_per_step": 4, "rollout": {"max_concurrency": 8}, "max_staleness": 0}
    file.write_text(yaml.safe_dump({**PLAIN, **small, "name": "run"}))
    timings.write_text(TIMINGS)
    return tuned.TuneOptions(
        config=file,
        timings=TimingsOptions([], None, timings),
        vary=["max_staleness=0,1,2"],
        fix=["rollout.max_concurrency", "buffer.selector"],
        real=2,
        out=tmp_path / "out",
    )


def fake_runs(monkeypatch: pytest.MonkeyPatch, step_s: dict[str, float]) -> list[SweepPlan]:
    """Replace the runs: each writes steps of `step_s[S]` seconds. A run without an entry fails."""
    plans = []

    async def leave(folder: SweepFolder, plan: SweepPlan, *_: Any, **__: Any) -> int:
        plans.append(plan)
        for point in plan.points:
            spent_s = step_s.get(str(point.config.max_staleness))
            if spent_s:
                leave_run(point, accuracy=0.5, step_s=spent_s, steps=point.config.steps)
                (point.config.run_dir / "config.yaml").write_text(dump(point.config))
        return 0

    monkeypatch.setattr(tuned, "run_sweep", leave)
    return plans


def test_the_verdict_follows_the_measurements(options: tuned.TuneOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = fake_runs(monkeypatch, {"0": 2.0, "1": 1.5, "2": 1.0})
    folder, advice = tuned.tune(options, print)
    assert list_changes(advice.chosen, advice.present) == {"max_staleness": "2"}  # simulated, S = 1 is as fast
    assert "measured in 3 short runs" in advice.verdict and "1,000 tokens/s" in advice.verdict
    assert load(folder / "recommended.yaml").max_staleness == 2
    (plan,) = plans
    by_staleness = {point.config.max_staleness: point.config for point in plan.points}
    assert {config.runs_dir for config in by_staleness.values()} == {folder / "runs"}
    assert by_staleness[2].steps == 16 + 7  # S + 3 in which the window fills, S in which it empties
    assert by_staleness[0].eval.prompts == 1


def test_a_run_that_failed_does_not_count(options: tuned.TuneOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_runs(monkeypatch, {"0": 2.0, "1": 1.5})
    _, advice = tuned.tune(options, print)
    assert list_changes(advice.chosen, advice.present) == {"max_staleness": "1"}
    assert any("run-max_staleness.2-seed.1 does not count" in note for note in advice.notes)
    fake_runs(monkeypatch, {})
    with pytest.raises(DataError, match="no short run has ended"):
        tuned.tune(replace(options, out=options.config.with_name("other")), print)
