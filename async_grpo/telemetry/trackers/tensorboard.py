"""Scalars as TensorBoard event files, written without torch or tensorflow."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from async_grpo.errors import DependencyError


class TensorBoardTracker:
    """Event files under run_dir/tensorboard. Raises DependencyError when tensorboard is not installed."""

    def __init__(self, run_dir: Path) -> None:
        self._writer = _open_writer(run_dir / "tensorboard")
        self._closed = False

    def log(self, step: int, scalars: Mapping[str, float], at_s: float | None = None) -> None:
        """Tag -> value at `step`; non-finite values are left out. On disk when this returns."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items() if math.isfinite(value)]
        wall_time = time.time() if at_s is None else at_s
        self._writer.add_event(Event(wall_time=wall_time, step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        """Finish the event file; idempotent."""
        if not self._closed:
            self._closed = True
            self._writer.close()


def _open_writer(folder: Path) -> Any:
    try:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError as error:
        raise DependencyError(
            "telemetry.tensorboard is on, but tensorboard is not installed. "
            "Install async-grpo[trainer], or set telemetry.tensorboard to false"
        ) from error
    return EventFileWriter(str(folder))
