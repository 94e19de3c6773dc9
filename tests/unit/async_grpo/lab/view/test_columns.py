"""Curves for a screen: few points, and none of the extremes lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from async_grpo.lab.view import followed
from async_grpo.lab.view.columns import MAX_POINTS, ROLLOUT_IDLE, StepColumns, downsample
from async_grpo.telemetry.jsonl import JsonLines


def test_a_long_curve_keeps_its_lowest_and_highest_points_in_order() -> None:
    y = np.sin(np.arange(100_000) / 1000)
    y[[12_345, 77_777]] = [50.0, -50.0]
    y[500] = np.nan
    x, values = downsample(np.arange(100_000.0), y)
    assert len(x) <= MAX_POINTS and (np.diff(x) > 0).all()
    assert values[x == 12_345] == 50.0 and values[x == 77_777] == -50.0 and not np.isnan(values).any()


def test_a_short_curve_only_loses_its_gaps() -> None:
    x, values = downsample(np.array([1.0, 2.0, 3.0]), np.array([5.0, np.nan, 7.0]))
    assert x.tolist() == [1.0, 3.0] and values.tolist() == [5.0, 7.0]


def test_the_idle_share_of_servers_follows_their_timelines(tmp_path: Path) -> None:
    with JsonLines(tmp_path / "metrics.jsonl") as file:
        for step, end in ((1, 110.0), (2, 120.0)):
            file.write({"kind": "step", "step": step, "time_s": end, "step_s": 10.0})
    with JsonLines(tmp_path / "timeline" / "rollout-0.jsonl") as file:
        file.write({"role": "rollout-0", "track": "generation", "name": "group 0", "start_s": 100.0, "end_s": 107.0})
        file.write({"role": "rollout-0", "track": "evaluation", "name": "v 1", "start_s": 111.0, "end_s": 120.0})
    columns = StepColumns(tmp_path)
    columns.read_new_rows()
    assert np.isnan(columns.column(ROLLOUT_IDLE)).all(), "timelines that are not read say nothing"
    assert columns.read_new_spans() == 1
    assert np.allclose(columns.column(ROLLOUT_IDLE), [0.3, 0.1])


def test_a_long_file_is_read_in_parts_and_may_end_with_a_partial_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed, "SLICE_BYTES", 200)
    with JsonLines(tmp_path / "metrics.jsonl") as file:
        for step in (1, 2, 3, 2):
            file.write({"kind": "step", "step": step, "reward_mean": step / 10, "ages": {"0": step}, "note": "x" * 60})
    with (tmp_path / "metrics.jsonl").open("a") as torn:
        torn.write('{"kind": "st')
    columns = StepColumns(tmp_path)
    shares = [columns.read_new_rows(budget_s=0) for _ in range(5)]
    assert shares == sorted(shares) and 0 < shares[0] < 1 and shares[-1] == 1
    assert columns.column("step").tolist() == [1, 2, 3] and columns.column("ages.0").tolist() == [1, 2, 3]
    assert sorted(columns.keys()) == ["ages.0", "reward_mean", "step"]
