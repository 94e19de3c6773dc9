"""Scalars in MLflow: on the server of MLFLOW_TRACKING_URI, else in runs_dir/mlflow.db.

`mlflow ui --backend-store-uri sqlite:///runs/mlflow.db` shows the latter.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from async_grpo.telemetry.trackers import TrackedRun

_ID_TAG = "async_grpo.id"
_LONGEST_VALUE = 6000
"""Characters of a parameter that MLflow keeps (`MAX_PARAM_VAL_LENGTH`)."""
_MOST_PARAMETERS = 100
"""Parameters that one request may have."""


class MlflowTracker:
    """A run of the experiment `telemetry.project`, found again by its id."""

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient

        runs_dir = run.config.run_dir.parent.resolve()
        own = "MLFLOW_TRACKING_URI" not in os.environ
        self._client = MlflowClient(f"sqlite:///{runs_dir}/mlflow.db" if own else None)
        project = run.config.telemetry.project
        experiment = self._client.get_experiment_by_name(project)
        folder = (runs_dir / "mlflow-artifacts").as_uri() if own else None
        number = experiment.experiment_id if experiment else self._client.create_experiment(project, folder)
        found = self._client.search_runs([number], f"tags.`{_ID_TAG}` = '{run.id}'")
        self._id = found[0].info.run_id if found else self._create(number, run)
        self._client.set_terminated(self._id, "RUNNING")

    def log(self, step: int, scalars: Mapping[str, float], at_s: float) -> None:
        """Log tag -> value at `step`. MLflow allows no `@` in names: pass@8 is pass_at_8 there."""
        from mlflow.entities import Metric

        at_ms = int(at_s * 1000)
        metrics = [Metric(tag.replace("@", "_at_"), value, at_ms, step) for tag, value in scalars.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def attach(self, file: Path) -> None:
        """Save a copy of the file as an artifact."""
        self._client.log_artifact(self._id, str(file))

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._id)

    def _create(self, experiment: str, run: TrackedRun) -> str:
        """Start a run with the configuration as its parameters, which MLflow never changes; returns MLflow's id."""
        from mlflow.entities import Param

        made: str = self._client.create_run(experiment, tags={_ID_TAG: run.id}, run_name=run.config.name).info.run_id
        parameters = [Param(key, value[:_LONGEST_VALUE]) for key, value in _flattened(run.settings)]
        for start in range(0, len(parameters), _MOST_PARAMETERS):
            self._client.log_batch(made, params=parameters[start : start + _MOST_PARAMETERS])
        return made


def _flattened(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """`trainer.lr`-like keys with their values as text."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)
