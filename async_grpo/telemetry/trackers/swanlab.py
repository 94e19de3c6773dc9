"""SwanLab tracker. SwanLab's environment variables choose the destination: SWANLAB_API_KEY, or SWANLAB_MODE=offline
and `swanlab sync` later."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from async_grpo.telemetry.trackers import TrackedRun


class SwanlabTracker:
    """A run of the project `telemetry.project`, resumed under its id. Local files: run_dir/swanlab."""

    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        self._last = 0
        folder = run.config.run_dir / "swanlab"
        folder.mkdir(parents=True, exist_ok=True)
        self._run = swanlab.init(
            project=run.config.telemetry.project,
            name=run.config.name,
            id=run.id,
            resume="allow",
            config=run.settings,
            log_dir=str(folder),
            settings=swanlab.Settings(terminal={"proxy_type": "none"}),
        )

    def log(self, step: int, scalars: Mapping[str, float], at_s: float) -> None:
        """Log tag -> value at `step`; SwanLab records the time itself."""
        self._last = step
        self._run.log(dict(scalars), step=step)

    def attach(self, file: Path) -> None:
        """Log the text of the file under its name."""
        from swanlab import Text

        self._run.log({file.name: Text(file.read_text(encoding="utf-8"))}, step=self._last)

    def close(self) -> None:
        """Upload the remaining data."""
        self._run.finish()
