"""Trackers: where the scalars of a run go, one module each.

    row of a step, evaluation --> Trackers --Tracker.log--> TensorBoard (and others of `make_trackers`)

A tracker that fails is logged and left out from then on; it never ends a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import structlog

from async_grpo.config import RunConfig
from async_grpo.evaluation.summary import rows_of
from async_grpo.telemetry.metrics import METRICS
from async_grpo.wire.board import Evaluation

TAGS = {metric.key: metric.tag for metric in METRICS if metric.tag}
"""Key of a step's row -> tag. Numeric keys without a tag are written as `other/<key>`."""

_COORDINATES = ("step", "time_s")

log = structlog.get_logger()


class Tracker(Protocol):
    """One place where scalars go."""

    def log(self, step: int, scalars: Mapping[str, float], at_s: float | None = None) -> None:
        """Record the value of each tag at `step`, at Unix time `at_s` (default: now). May raise anything."""
        ...

    def close(self) -> None:
        """Write what is still buffered. Safe to call twice."""
        ...


def make_trackers(config: RunConfig) -> Trackers:
    """The trackers that `telemetry` asks for. Raises DependencyError where a package is missing."""
    trackers: list[Tracker] = []
    if config.telemetry.tensorboard:
        from async_grpo.telemetry.trackers.tensorboard import TensorBoardTracker

        trackers.append(TensorBoardTracker(config.run_dir))
    return Trackers(trackers)


class Trackers:
    """All trackers of a run."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._opened = tuple(trackers)
        self._trackers = list(trackers)
        """Trackers that have not failed."""

    def step(self, row: Mapping[str, Any]) -> None:
        """Log the numeric fields of a step's row (`metrics.METRICS`) at its step."""
        scalars = {
            TAGS.get(key, f"other/{key}"): float(value)
            for key, value in row.items()
            if key not in _COORDINATES and isinstance(value, (bool, int, float))
        }
        self._log(int(row["step"]), scalars, row.get("time_s"))

    def evaluation(self, evaluation: Evaluation) -> None:
        """Log held-out accuracy and every other estimate, with the ends of its interval, at its policy version."""
        scalars = {"eval/sampled_accuracy": evaluation.sampled_accuracy}
        if evaluation.greedy_accuracy is not None:
            scalars["eval/greedy_accuracy"] = evaluation.greedy_accuracy
        for name, estimate in rows_of(evaluation.figures, evaluation.samples).items() if evaluation.figures else ():
            scalars |= {f"eval/{name}": estimate.value, f"eval_low/{name}": estimate.low}
            scalars[f"eval_high/{name}"] = estimate.high
        self._log(evaluation.version, scalars, None)

    def close(self) -> None:
        """Close all of them, those that have failed as well."""
        for tracker in self._opened:
            self._unless_it_fails(tracker, tracker.close)

    def _log(self, step: int, scalars: Mapping[str, float], at_s: float | None) -> None:
        for tracker in list(self._trackers):
            self._unless_it_fails(tracker, partial(tracker.log, step, scalars, at_s))

    def _unless_it_fails(self, tracker: Tracker, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # third-party packages: a missing curve is no reason to stop training
            log.warning("a tracker failed and is left out", tracker=type(tracker).__name__, error=str(error))
            if tracker in self._trackers:
                self._trackers.remove(tracker)
