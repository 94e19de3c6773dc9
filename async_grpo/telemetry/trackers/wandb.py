"""Weights & Biases tracker. Its environment variables choose the destination: WANDB_API_KEY and WANDB_BASE_URL, or
WANDB_MODE=offline and `wandb sync` later."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from async_grpo.telemetry.trackers import TrackedRun


class WandbTracker:
    """A run of the project `telemetry.project`, resumed under its id. Local files: run_dir/wandb."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        _wait_for_a_new_second(run.config.run_dir / "wandb")
        self._run = wandb.init(
            project=run.config.telemetry.project,
            id=run.id,
            name=run.config.name,
            resume="allow",
            dir=run.config.run_dir,
            settings=wandb.Settings(console="off", silent=True, disable_git=True),
        )
        self._run.config.update(run.settings, allow_val_change=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, scalars: Mapping[str, float], at_s: float) -> None:
        """Log tag -> value. `step` is logged as a separate value, because wandb's own step must not decrease, as ours
        does when a resumed run repeats steps."""
        self._run.log({**scalars, "step": step, "_timestamp": at_s})

    def attach(self, file: Path) -> None:
        """Save a copy of the file with the run."""
        self._run.save(str(file), base_path=str(file.parent), policy="now")

    def close(self) -> None:
        """Upload the remaining data."""
        self._run.finish()


def _wait_for_a_new_second(folder: Path) -> None:
    """Wait until the folder of an earlier invocation does not have the current second in its name.

    wandb names folders by the second, so it would overwrite the folder of an invocation that started in the same one.
    """
    while any(folder.glob(f"*{datetime.now():%Y%m%d_%H%M%S}*")):
        time.sleep(0.05)
