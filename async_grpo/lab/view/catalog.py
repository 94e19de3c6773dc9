"""RunsRoot: the runs and sweeps below a folder, by unique ids. KnownRun: one run, read again when its files grow."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import HTTPException

from async_grpo.app.runs.run import Run, RunStatus, is_run, list_runs
from async_grpo.config import RunConfig, validate
from async_grpo.config.load import remove_former_values
from async_grpo.errors import ConfigError
from async_grpo.lab.view.columns import READ_S, StepColumns

SEPARATOR = "~"
"""Replaces the slash in ids, so that the id of a run in a subfolder is one segment of a URL."""
SWEEP_RECORD = "points.json"
SIGNS = ("config.yaml", "metrics.jsonl", "run.json", "summary.json", "evaluations/*.jsonl")
"""Files that the figures of a run are computed from."""


class KnownRun:
    """One run: its columns, and the figures of the list, read again when its files have changed."""

    def __init__(self, run_id: str, path: Path) -> None:
        self.id = run_id
        self.run = Run(path)
        self.columns = StepColumns(path)
        self._lock, self._summary_lock = threading.Lock(), threading.Lock()
        self._sign: Any = None
        self._brief: dict[str, Any] = {}
        self._summary: tuple[Any, dict[str, Any]] = (None, {})

    def sign(self) -> tuple[Any, ...]:
        """A value that changes when the run writes, starts or ends."""
        stats = [(path.name, path.stat()) for pattern in SIGNS for path in self.run.path.glob(pattern)]
        return (self.run.folder.has_live_process(), *((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats))

    def brief(self, budget_s: float = READ_S) -> dict[str, Any]:
        """The figures of the run in the list. `read` is the share of its steps that has been read; while it is below 1,
        each call reads further."""
        with self._lock:
            sign = self.sign()
            if sign != self._sign or self._brief["read"] < 1:
                self._brief, self._sign = self._read_brief(budget_s), sign
            return self._brief

    def _read_brief(self, budget_s: float) -> dict[str, Any]:
        read = self.columns.update(budget_s)
        settings, state = self.run.settings(), self.run.state()
        evaluations = self.run.evaluations()
        times = self.columns.column("time_s")
        ages = self.columns.column("age_max")
        spent_s = float(times[-1] - times[0]) if len(times) else None
        config = self._config(settings)
        return {
            "id": self.id,
            "name": self.id.replace(SEPARATOR, "/"),
            "read": read,
            "status": self.run.status().value,
            "reason": self.run.reason,
            "step": self.columns.last("step"),
            "steps": settings.get("steps"),
            "max_staleness": settings.get("max_staleness"),
            "age_bound": config and config.replay_policy.age_bound,
            "capacity": config and config.capacity_groups,
            "age_max": float(np.nanmax(ages)) if not np.isnan(ages).all() else None,
            "reward": self.columns.last("reward_mean"),
            "accuracy": evaluations[-1].get("sampled_accuracy") if evaluations else None,
            "tokens_per_s": self.columns.tokens_per_s(settings.get("max_staleness")),
            "started_s": float(times[0]) if len(times) else None,
            "changed_s": max(path.stat().st_mtime for path in (self.run.path, *self.run.path.glob("metrics.jsonl"))),
            "duration_s": state.wall_s or spent_s,
        }

    def _config(self, settings: dict[str, Any]) -> RunConfig | None:
        """The configuration; None if this release refuses it."""
        try:
            remove_former_values(settings)
            return validate(settings, str(self.run.path))
        except ConfigError:
            return None

    def details(self) -> dict[str, Any]:
        """The data of the run's overview page."""
        brief, folder = self.brief(), self.run.path
        return {
            **brief,
            "path": str(folder),
            "settings": self.run.settings(),
            "evaluations": self.run.evaluations(),
            "warnings": list(self.columns.warnings),
            "logs": [file.stem for file in self.run.files("logs") if file.suffix == ".log"],
            "has_report": (folder / "report.md").is_file(),
        }

    def summary(self) -> dict[str, Any]:
        """The figures of the whole run; {} while it is live. Computing them takes seconds if a long run has not written
        its summary.json."""
        with self._summary_lock:
            if self.brief()["status"] == RunStatus.LIVE:
                return {}
            if (sign := self.sign()) != self._summary[0]:
                self._summary = (sign, self.run.summary())
            return {key: value for key, value in self._summary[1].items() if key != "evaluations"}


class RunsRoot:
    """The runs below a folder, or the one run that the folder is. Links out of it are not followed."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise ConfigError(
                f"{path} is no folder of runs. Name the folder that holds them (runs_dir of the configuration, usually "
                "runs), or one run in it"
            )
        self.path = path.resolve()
        self._known: dict[Path, KnownRun] = {}

    def runs(self) -> list[KnownRun]:
        """All runs, the latest first."""
        paths = [run.path for run in list_runs(self.path)]
        return [self._know(path) for path in paths if self._is_inside(path)]

    def run(self, run_id: str) -> KnownRun:
        """The run of this id. Raises HTTPException if there is none."""
        for path in self._named(run_id):
            if is_run(path):
                return self._know(path)
        raise HTTPException(404, f"there is no run {run_id!r} in {self.path}. It may have been removed or renamed")

    def find(self, run_id: str) -> Path:
        """The folder of a run. Raises HTTPException if there is none of this id."""
        return self.run(run_id).run.path

    def sweeps(self) -> list[Path]:
        """The folders of sweeps, the newest first."""
        places = {path.parent for pattern in ("", "*/", "*/*/") for path in self.path.glob(pattern + SWEEP_RECORD)}
        return sorted(filter(self._is_inside, places), key=lambda path: path.stat().st_mtime, reverse=True)

    def sweep(self, sweep_id: str) -> Path:
        """The folder of a sweep. Raises HTTPException if there is none of this id."""
        for path in self._named(sweep_id):
            if (path / SWEEP_RECORD).is_file():
                return path
        raise HTTPException(404, f"there is no sweep {sweep_id!r} in {self.path}. It may have been removed or renamed")

    def id_of(self, path: Path) -> str:
        """The id of a run or sweep in addresses."""
        return path.name if path == self.path else SEPARATOR.join(path.relative_to(self.path).parts)

    def _know(self, path: Path) -> KnownRun:
        if path not in self._known:
            self._known[path] = KnownRun(self.id_of(path), path)
        return self._known[path]

    def _named(self, name: str) -> Iterator[Path]:
        """The folders that an id can refer to: names may contain the separator themselves."""
        if "/" in name or "\0" in name:
            return
        if name == self.path.name:
            yield self.path
        for parts in ([name], name.split(SEPARATOR)):
            path = self.path.joinpath(*parts)
            if not {"", ".", ".."} & set(parts) and self._is_inside(path):
                yield path

    def _is_inside(self, path: Path) -> bool:
        """Whether the folder lies below the root and its path contains no link."""
        return path.resolve() == path and path.is_relative_to(self.path)
