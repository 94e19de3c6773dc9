"""Trackers: destinations for the scalars of a run, one module each.

    row of a step, evaluation, report --> Trackers --one thread each--> TensorBoard, wandb, mlflow, swanlab, trackio

Each tracker has its own thread. A tracker that fails or is too slow is disabled with a warning; it never ends a run
and never delays a step.
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
"""Key of a step's row -> tag. Numeric keys without a tag are logged as `other/<key>`, entries of a chart family
(`telemetry.charts.FAMILIES`) as `<key>/<name>`."""

MODULES = {
    "tensorboard": "TensorBoardTracker",
    "wandb": "WandbTracker",
    "mlflow": "MlflowTracker",
    "swanlab": "SwanlabTracker",
    "trackio": "TrackioTracker",
}
"""Name of a tracker, which is also that of its package and of its module here -> class."""

_COORDINATES = ("step", "time_s")
_MAX_QUEUED_CALLS = 1000
"""Maximum number of queued calls for a slow tracker; beyond that it is disabled."""
_CLOSE_TIMEOUT_S = 60.0
"""Maximum seconds that `Trackers.close` waits for a tracker to upload its remaining data."""

log = structlog.get_logger()


class Tracker(Protocol):
    """Destination for scalars. All calls come from one thread."""

    def log(self, step: int, scalars: Mapping[str, float], at_s: float) -> None:
        """Log tag -> finite value for `step` at Unix time `at_s`. May raise any exception."""
        ...

    def attach(self, file: Path) -> None:
        """Store a text file with the run, under its name. May raise any exception."""
        ...

    def close(self) -> None:
        """Write buffered data. Idempotent."""
        ...


class TrackedRun(NamedTuple):
    """Run for which a tracker is opened."""

    config: RunConfig
    id: str
    """Id of the run in every tracker. A resumed run keeps it; --fresh creates another."""

    @property
    def settings(self) -> dict[str, Any]:
        """Configuration as plain values; it never contains secrets."""
        return self.config.model_dump(mode="json")


def check_trackers(config: RunConfig) -> None:
    """Raise DependencyError for a tracker of `telemetry.trackers` whose package is not installed."""
    for name in config.telemetry.trackers:
        if importlib.util.find_spec(name) is None:
            raise DependencyError(
                f"telemetry.trackers contains {name}, but its package is not installed. "
                f"Run: pip install {name}, or remove it from telemetry.trackers"
            )


def make_trackers(config: RunConfig) -> Trackers:
    """Open the trackers of `telemetry.trackers`. Raises DependencyError if a package is missing."""
    check_trackers(config)
    return Trackers({name: partial(_open, name, config) for name in config.telemetry.trackers})


def _open(name: str, config: RunConfig) -> Tracker:
    tracker: Callable[[TrackedRun], Tracker] = getattr(import_module(f"{__name__}.{name}"), MODULES[name])
    return tracker(TrackedRun(config, _run_id(config)))


def _run_id(config: RunConfig) -> str:
    """Return the tracker id in the run's folder, creating it on first use."""
    file = config.run_dir / "tracker_id"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, f"{config.name}-{secrets.token_hex(4)}")
    return file.read_text(encoding="utf-8")


class Trackers:
    """All trackers of a run. No call raises, and only `close` waits."""

    def __init__(self, openers: Mapping[str, Callable[[], Tracker]], close_timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """`openers`: name -> function that opens the tracker. It is called in the tracker's own thread."""
        self._threads = [_TrackerThread(name, opener) for name, opener in openers.items()]
        self._close_timeout_s = close_timeout_s

    def log_step(self, row: Mapping[str, Any]) -> None:
        """Log the scalars of a step's row (`metrics.METRICS`)."""
        scalars = {}
        for key, value in row.items():
            if key not in _COORDINATES and isinstance(value, (bool, int, float)):
                scalars[TAGS.get(key, f"other/{key}")] = float(value)
        for chart in FAMILIES:
            for name, value in row.get(chart.family, {}).items():
                scalars[f"{chart.family}/{name}"] = value
        self._log(int(row["step"]), scalars, float(row.get("time_s", time.time())))

    def log_evaluation(self, evaluation: Evaluation) -> None:
        """Log held-out accuracy and all other estimates, with their intervals, at the evaluated policy version."""
        scores = {f"eval/{series.key}": getattr(evaluation, series.key) for series in HELD_OUT.series}
        scalars = {tag: score for tag, score in scores.items() if score is not None}
        for name, estimate in (
            estimates_by_name(evaluation.figures, evaluation.samples).items() if evaluation.figures else ()
        ):
            scalars |= {f"eval/{name}": estimate.value, f"eval_low/{name}": estimate.low}
            scalars[f"eval_high/{name}"] = estimate.high
        self._log(evaluation.version, scalars, time.time())

    def attach_files(self, files: Sequence[Path]) -> None:
        """Store text files with the run."""
        for file in files:
            self._call(methodcaller("attach", file))

    def close(self) -> None:
        """Close all trackers. One that does not finish in time is abandoned with a warning."""
        for thread in self._threads:
            thread.request_close()
        for thread in self._threads:
            thread.join(self._close_timeout_s)
            if thread.is_alive():
                log.warning("a tracker did not finish", tracker=thread.name, waited_s=self._close_timeout_s)

    def _log(self, step: int, scalars: Mapping[str, float], at_s: float) -> None:
        finite = {tag: value for tag, value in scalars.items() if math.isfinite(value)}
        self._call(methodcaller("log", step, finite, at_s))

    def _call(self, call: Callable[[Tracker], None]) -> None:
        for thread in self._threads:
            thread.submit_call(call)


class _TrackerThread(threading.Thread):
    """Opens a tracker, executes its calls in order and closes it. A daemon thread, so that a hanging tracker cannot
    block the exit of the process."""

    def __init__(self, name: str, opener: Callable[[], Tracker]) -> None:
        super().__init__(name=name, daemon=True)
        self._opener = opener
        self._calls: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue()
        self._is_disabled = False
        self.start()

    def submit_call(self, call: Callable[[Tracker], None]) -> None:
        """Queue a call with the tracker, unless the tracker is disabled."""
        if not self._is_disabled and self._calls.qsize() >= _MAX_QUEUED_CALLS:
            self._disable("it does not keep up")
        if not self._is_disabled:
            self._calls.put(call)

    def request_close(self) -> None:
        """Close the tracker after the queued calls."""
        self._calls.put(None)

    def run(self) -> None:
        """Execute calls until `request_close`."""
        try:
            tracker = self._opener()
        except Exception as error:  # third-party packages may raise anything
            self._disable(str(error))
            return
        while True:
            call = self._calls.get()
            if call is None:
                break
            if not self._is_disabled:
                self._try(partial(call, tracker))
        self._try(tracker.close)

    def _try(self, call: Callable[[], None]) -> None:
        """Execute the call; disable the tracker if it fails."""
        try:
            call()
        except Exception as error:  # third-party packages may raise anything, and a curve is not worth the training
            self._disable(str(error))

    def _disable(self, reason: str) -> None:
        if not self._is_disabled:
            self._is_disabled = True
            log.warning("a tracker failed and is left out", tracker=self.name, error=reason)
