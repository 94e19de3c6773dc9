"""TensorBoard tracker: writes event files without torch or tensorflow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from async_grpo.config.load import dump
from async_grpo.telemetry.trackers import TrackedRun


class TensorBoardTracker:
    """Event files in run_dir/tensorboard. Attached files appear in TensorBoard's tab `text`."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(run.config.run_dir / "tensorboard"))
        self._closed = False
        self._write_text("config", f"```yaml\n{dump(run.config)}\n```")

    def log(self, step: int, scalars: Mapping[str, float], at_s: float) -> None:
        """Write tag -> value at `step`, and flush."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._writer.add_event(Event(wall_time=at_s, step=step, summary=Summary(value=values)))
        self._writer.flush()

    def attach(self, file: Path) -> None:
        """Write the text of `file` as a summary with its name."""
        self._write_text(file.name, file.read_text(encoding="utf-8"))

    def close(self) -> None:
        """Finish the event file; idempotent."""
        if not self._closed:
            self._closed = True
            self._writer.close()

    def _write_text(self, name: str, text: str) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.plugins.text.metadata import create_summary_metadata

        tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()])
        value = Summary.Value(tag=name, metadata=create_summary_metadata(name, ""), tensor=tensor)
        self._writer.add_event(Event(wall_time=time.time(), summary=Summary(value=[value])))
        self._writer.flush()
