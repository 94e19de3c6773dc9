"""What every tracker promises (`async_grpo.telemetry.trackers`), and what `Trackers` makes of one that fails.

A tracker is one entry of TRACKERS: how it is opened for a run, and how its points are read back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import structlog
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from async_grpo.config import validate
from async_grpo.telemetry.trackers import Tracker, Trackers, make_trackers
from async_grpo.telemetry.trackers.tensorboard import TensorBoardTracker
from async_grpo.wire.board import Estimate, EvalMetrics, Evaluation

Points = dict[str, list[tuple[int, float]]]


@dataclass
class Counting:
    """The in-memory twin; fails at every step of `fails_at`, and at close if there is any."""

    points: Points = field(default_factory=dict)
    fails_at: tuple[int, ...] = ()
    closed: int = 0

    def log(self, step: int, scalars: Mapping[str, float], at_s: float | None = None) -> None:
        if step in self.fails_at:
            raise OSError("the tracker's server is gone")
        for tag, value in scalars.items():
            if math.isfinite(value):
                self.points.setdefault(tag, []).append((step, value))

    def close(self) -> None:
        self.closed += 1
        if self.fails_at:
            raise OSError("the tracker's server is gone")


def of_tensorboard(tracker: Tracker, run_dir: Path) -> Points:
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def of_counting(tracker: Tracker, run_dir: Path) -> Points:
    assert isinstance(tracker, Counting)
    return tracker.points


TRACKERS: dict[str, tuple[Callable[[Path], Tracker], Callable[[Tracker, Path], Points]]] = {
    "tensorboard": (TensorBoardTracker, of_tensorboard),
    "counting": (lambda run_dir: Counting(), of_counting),
}


@pytest.fixture(params=TRACKERS)
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Tracker, Callable[[], Points]]]:
    """A tracker, and what reads it back."""
    make, read = TRACKERS[request.param]
    tracker = make(tmp_path)
    yield tracker, lambda: read(tracker, tmp_path)
    tracker.close()


def test_rows_and_evaluations_are_points_by_tag_and_what_is_not_finite_is_left_out(
    opened: tuple[Tracker, Callable[[], Points]],
) -> None:
    tracker, read = opened
    trackers = Trackers([tracker])
    trackers.step({"kind": "step", "step": 7, "time_s": 1.7e9, "loss": 0.25, "wait_s": 1.5, "lr": math.nan, "novel": 2})
    figures = EvalMetrics(prompts=4, completions=8, pass_at={"2": Estimate(0.75, 0.5, 1.0)})
    trackers.evaluation(Evaluation(version=8, prompts=4, samples=2, sampled_accuracy=0.5, figures=figures))
    trackers.close()
    assert read() == {
        "train/loss": [(7, 0.25)],
        "time/wait_s": [(7, 1.5)],
        "other/novel": [(7, 2)],
        "eval/sampled_accuracy": [(8, 0.5)],
        "eval/pass@2": [(8, 0.75)],
        "eval_low/pass@2": [(8, 0.5)],
        "eval_high/pass@2": [(8, 1.0)],
    }


def test_points_can_be_read_before_the_tracker_is_closed_and_it_may_be_closed_twice(
    opened: tuple[Tracker, Callable[[], Points]],
) -> None:
    tracker, read = opened
    for step in (1, 2):
        tracker.log(step, {"train/loss": 0.5})
    assert read() == {"train/loss": [(1, 0.5), (2, 0.5)]}
    tracker.close()
    tracker.close()


def test_a_tracker_that_fails_is_warned_about_once_and_the_others_go_on() -> None:
    failing, other = Counting(fails_at=(2, 3)), Counting()
    trackers = Trackers([failing, other])
    with structlog.testing.capture_logs() as lines:
        for step in (1, 2, 3):
            trackers.step({"step": step, "loss": 0.5})
        assert [line["log_level"] for line in lines] == ["warning"]
        trackers.close()
    assert failing.points == {"train/loss": [(1, 0.5)]}
    assert other.points == {"train/loss": [(step, 0.5) for step in (1, 2, 3)]}
    assert (failing.closed, other.closed) == (1, 1)


def test_trackers_that_are_off_write_nothing(tmp_path: Path) -> None:
    raw = {"name": "off", "runs_dir": str(tmp_path), "model": {"random": {}}, "telemetry": {"tensorboard": False}}
    trackers = make_trackers(validate(raw, "test"))
    trackers.step({"step": 1, "loss": 0.5})
    trackers.close()
    assert list(tmp_path.iterdir()) == []
