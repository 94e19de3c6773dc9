"""Trackio tracker: logs to its local folder (TRACKIO_DIR), or to the server of TRACKIO_SERVER_URL or
TRACKIO_SPACE_ID. `trackio show --project async-grpo` shows the local folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from async_grpo.telemetry.trackers import TrackedRun


class TrackioTracker:
    """A run of the project `telemetry.project`, resumed under its id, which is also its name there."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self._last = 0
        self._run = trackio.init(
            run.config.telemetry.project,
            name=run.id,
            resume="allow",
            config=run.settings,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, scalars: Mapping[str, float], at_s: float) -> None:
        """Log tag -> value at `step`; Trackio records the time itself."""
        self._last = step
        self._run.log(dict(scalars), step=step)

    def attach(self, file: Path) -> None:
        """Log the text of the file under its name."""
        from trackio import Markdown

        self._run.log({file.name: Markdown(file.read_text(encoding="utf-8"))}, step=self._last)

    def close(self) -> None:
        """Send the remaining data."""
        self._run.finish()
