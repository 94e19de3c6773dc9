"""Trackers: where the scalars of a run go, one module each.

    row of a step, evaluation, report --> Trackers --thread of each--> TensorBoard, wandb, mlflow, swanlab, trackio

A tracker works on a thread of its own. One that fails or does not keep up is warned about and left out from then on; it
never ends a run, and never holds up a step.
"""

from __future__ import annotations

import importlib.util
import math
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from operator import methodcaller
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import structlog

from async_grpo.config import RunConfig
from async_grpo.errors import DependencyError
from async_grpo.evaluation.summary import estimates_by_name
from async_grpo.telemetry.charts import FAMILIES, HELD_OUT
from async_grpo.telemetry.metrics import METRICS
from async_grpo.utils.files import write_atomic
from async_grpo.wire.board import Evaluation

TAGS = {metric.key: metric.tag for metric in METRICS if metric.tag}
"""Key of a step's row -> tag. Numeric keys without a tag are written as `other/<key>`, the entries of a family of
`telemetry.charts` as `<key>/<name>`."""

MODULES = {
    "tensorboard": "TensorBoardTracker",
    "wandb": "WandbTracker",
    "mlflow": "MlflowTracker",
    "swanlab": "SwanlabTracker",
    "trackio": "TrackioTracker",
}
"""Name of a tracker, of its package and of its module here -> class."""

_COORDINATES = ("step", "time_s")
_MOST_WAITING = 1000
"""Calls that may wait for a slow tracker before it is left out."""
_CLOSE_TIMEOUT_S = 60.0
"""How long `Trackers.close` waits for a tracker to upload what is left."""

log = structlog.get_logger()


class Tracker(Protocol):
    """One place where scalars go. It is used by one thread."""

    def log(self, step: int, scalars: Mapping[str, float], at_s: float) -> None:
        """Record the value of each tag, all finite, at `step`, at Unix time `at_s`. May raise anything."""
        ...

    def attach(self, file: Path) -> None:
        """Keep a text file with the run, under its name. May raise anything."""
        ...

    def close(self) -> None:
        """Write what is still buffered. Safe to call twice."""
        ...


class TrackedRun(NamedTuple):
    """What a tracker is opened for."""

    config: RunConfig
    id: str
    """Names the run in every tracker. A resumed run has the same, one made anew with --fresh another."""

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration as plain values; it never contains secrets."""
        return self.config.model_dump(mode="json")


def check_trackers(config: RunConfig) -> None:
    """Raise DependencyError for a tracker of `telemetry.trackers` whose package is not installed."""
    for name in config.telemetry.trackers:
        if importlib.util.find_spec(name) is None:
            raise DependencyError(
                f"telemetry.trackers names {name}, but its package is not installed. "
                f"Run: pip install {name}, or leave it out of telemetry.trackers"
            )


def make_trackers(config: RunConfig) -> Trackers:
    """Open the trackers of `telemetry.trackers`. Raises DependencyError where a package is missing."""
    check_trackers(config)
    return Trackers({name: partial(_open, name, config) for name in config.telemetry.trackers})


def _open(name: str, config: RunConfig) -> Tracker:
    tracker: Callable[[TrackedRun], Tracker] = getattr(import_module(f"{__name__}.{name}"), MODULES[name])
    return tracker(TrackedRun(config, _run_id(config)))


def _run_id(config: RunConfig) -> str:
    """The id in the run's folder; made if there is none."""
    file = config.run_dir / "tracker_id"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, f"{config.name}-{secrets.token_hex(4)}")
    return file.read_text(encoding="utf-8")


class Trackers:
    """All trackers of a run. No call raises, and only `close` waits."""

    def __init__(self, openers: Mapping[str, Callable[[], Tracker]], close_timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """`openers` open a tracker by name, each on the thread of the tracker."""
        self._threads = [_TrackerThread(name, opener) for name, opener in openers.items()]
        self._close_timeout_s = close_timeout_s

    def step(self, row: Mapping[str, Any]) -> None:
        """Log the scalars of a step's row (`metrics.METRICS`) at its step."""
        scalars = {
            TAGS.get(key, f"other/{key}"): float(value)
            for key, value in row.items()
            if key not in _COORDINATES and isinstance(value, (bool, int, float))
        }
        for chart in FAMILIES:
            scalars |= {f"{chart.family}/{name}": value for name, value in row.get(chart.family, {}).items()}
        self._log(int(row["step"]), scalars, float(row.get("time_s", time.time())))

    def evaluation(self, evaluation: Evaluation) -> None:
        """Log held-out accuracy and every other estimate, with the ends of its interval, at its policy version."""
        scores = {f"eval/{series.key}": getattr(evaluation, series.key) for series in HELD_OUT.series}
        scalars = {tag: score for tag, score in scores.items() if score is not None}
        for name, estimate in (
            estimates_by_name(evaluation.figures, evaluation.samples).items() if evaluation.figures else ()
        ):
            scalars |= {f"eval/{name}": estimate.value, f"eval_low/{name}": estimate.low}
            scalars[f"eval_high/{name}"] = estimate.high
        self._log(evaluation.version, scalars, time.time())

    def attach(self, files: Sequence[Path]) -> None:
        """Keep text files with the run."""
        for file in files:
            self._call(methodcaller("attach", file))

    def close(self) -> None:
        """Close all of them; give up one that takes too long."""
        for thread in self._threads:
            thread.end()
        for thread in self._threads:
            thread.join(self._close_timeout_s)
            if thread.is_alive():
                log.warning("a tracker did not finish", tracker=thread.name, waited_s=self._close_timeout_s)

    def _log(self, step: int, scalars: Mapping[str, float], at_s: float) -> None:
        finite = {tag: value for tag, value in scalars.items() if math.isfinite(value)}
        self._call(methodcaller("log", step, finite, at_s))

    def _call(self, call: Callable[[Tracker], None]) -> None:
        for thread in self._threads:
            thread.call(call)


class _TrackerThread(threading.Thread):
    """Opens a tracker, makes its calls in order and closes it. A daemon: a tracker that hangs holds up no exit."""

    def __init__(self, name: str, opener: Callable[[], Tracker]) -> None:
        super().__init__(name=name, daemon=True)
        self._opener = opener
        self._calls: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue()
        self._left_out = False
        self.start()

    def call(self, call: Callable[[Tracker], None]) -> None:
        """Have `call` made with the tracker, unless it is left out."""
        if not self._left_out and self._calls.qsize() >= _MOST_WAITING:
            self._leave_out("it does not keep up")
        if not self._left_out:
            self._calls.put(call)

    def end(self) -> None:
        """Have the tracker closed after the calls that wait."""
        self._calls.put(None)

    def run(self) -> None:
        """Work until `end`."""
        try:
            tracker = self._opener()
        except Exception as error:
            self._leave_out(str(error))
            return
        while call := self._calls.get():
            if not self._left_out:
                self._unless_it_fails(partial(call, tracker))
        self._unless_it_fails(tracker.close)

    def _unless_it_fails(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # third-party packages: a missing curve is no reason to stop training
            self._leave_out(str(error))

    def _leave_out(self, why: str) -> None:
        if not self._left_out:
            self._left_out = True
            log.warning("a tracker failed and is left out", tracker=self.name, error=why)
