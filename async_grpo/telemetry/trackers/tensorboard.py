"""Step rows and evaluations as TensorBoard scalars, written without torch or tensorflow."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from async_grpo.errors import DependencyError
from async_grpo.evaluation.summary import rows_of
from async_grpo.telemetry.metrics import METRICS
from async_grpo.wire.board import Evaluation

TAGS = {metric.key: metric.tag for metric in METRICS if metric.tag}
"""Key of a step's row -> tag. Numeric keys without a tag are written as `other/<key>`."""

_COORDINATES = ("step", "time_s")


class TensorBoardTracker:
    """Event files under run_dir/tensorboard; does nothing unless `enabled`.

    Raises DependencyError when tensorboard is not installed.
    """

    def __init__(self, run_dir: Path, enabled: bool) -> None:
        self._writer = _open_writer(run_dir / "tensorboard") if enabled else None

    def write_step(self, row: Mapping[str, Any]) -> None:
        """The numeric fields of a step row (see `metrics.METRICS`), at its step."""
        scalars = {
            TAGS.get(key, f"other/{key}"): float(value)
            for key, value in row.items()
            if key not in _COORDINATES and isinstance(value, (bool, int, float))
        }
        self.write(int(row["step"]), scalars, row.get("time_s"))

    def write_evaluation(self, evaluation: Evaluation) -> None:
        """Held-out accuracy and what else was estimated, with the ends of its interval, at its policy version."""
        scalars = {"eval/sampled_accuracy": evaluation.sampled_accuracy}
        if evaluation.greedy_accuracy is not None:
            scalars["eval/greedy_accuracy"] = evaluation.greedy_accuracy
        for name, estimate in rows_of(evaluation.figures, evaluation.samples).items() if evaluation.figures else ():
            scalars |= {f"eval/{name}": estimate.value, f"eval_low/{name}": estimate.low}
            scalars[f"eval_high/{name}"] = estimate.high
        self.write(evaluation.version, scalars)

    def write(self, step: int, scalars: Mapping[str, float], at_s: float | None = None) -> None:
        """Tag -> value at `step`; non-finite values are left out. On disk when this returns."""
        if self._writer is None:
            return
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items() if math.isfinite(value)]
        wall_time = time.time() if at_s is None else at_s
        self._writer.add_event(Event(wall_time=wall_time, step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        """Finish the event file; idempotent."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _open_writer(folder: Path) -> Any:
    try:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError as error:
        raise DependencyError(
            "telemetry.tensorboard is on, but tensorboard is not installed. "
            "Install async-grpo[trainer], or set telemetry.tensorboard to false"
        ) from error
    return EventFileWriter(str(folder))
