"""MLflow tracker: logs to the server of MLFLOW_TRACKING_URI, or to runs_dir/mlflow.db.

`mlflow ui --backend-store-uri sqlite:///runs/mlflow.db` shows the local file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from async_grpo.telemetry.trackers import TrackedRun

_ID_TAG = "async_grpo.id"
_MAX_VALUE_LENGTH = 6000
"""Maximum characters of a parameter value in MLflow (`MAX_PARAM_VAL_LENGTH`)."""
_MAX_PARAMETERS = 100
"""Maximum parameters per request."""


class MlflowTracker:
    """A run of the experiment `telemetry.project`, found again by its id."""

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient

        runs_dir = run.config.run_dir.parent.resolve()
        is_local = "MLFLOW_TRACKING_URI" not in os.environ
        self._client = MlflowClient(f"sqlite:///{runs_dir}/mlflow.db" if is_local else None)

        project = run.config.telemetry.project
        experiment = self._client.get_experiment_by_name(project)
        if experiment:
            experiment_id = experiment.experiment_id
        else:
            artifacts = (runs_dir / "mlflow-artifacts").as_uri() if is_local else None
            experiment_id = self._client.create_experiment(project, artifacts)

        earlier = self._client.search_runs([experiment_id], f"tags.`{_ID_TAG}` = '{run.id}'")
        self._id = earlier[0].info.run_id if earlier else self._create_run(experiment_id, run)
        self._client.set_terminated(self._id, "RUNNING")

    def log(self, step: int, scalars: Mapping[str, float], at_s: float) -> None:
        """Log tag -> value at `step`. MLflow does not allow `@` in names, so pass@8 becomes pass_at_8."""
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

    def _create_run(self, experiment: str, run: TrackedRun) -> str:
        """Create a run with the configuration as its parameters, and return MLflow's id.

        A resumed run does not log them again: MLflow refuses to change a parameter.
        """
        from mlflow.entities import Param

        created = self._client.create_run(experiment, tags={_ID_TAG: run.id}, run_name=run.config.name)
        run_id: str = created.info.run_id
        parameters = [Param(key, value[:_MAX_VALUE_LENGTH]) for key, value in _flatten(run.settings)]
        for start in range(0, len(parameters), _MAX_PARAMETERS):
            self._client.log_batch(run_id, params=parameters[start : start + _MAX_PARAMETERS])
        return run_id


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted keys, such as `trainer.lr`, with their values as text."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)
