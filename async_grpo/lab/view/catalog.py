"""RunsRoot: the runs and sweeps below a folder, by unique ids. ViewedRun: one run, read again when its files grow."""

from __future__ import annotations

import copy
import threading
import time
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
from async_grpo.lab.view.overview import AdviceCache, make_overview

SPARKLINE_POINTS = 40
"""Points of the reward curve in the list of runs."""
SEPARATOR = "~"
"""Replaces the slash in ids, so that the id of a run in a subfolder is one segment of a URL."""
SWEEP_RECORD = "points.json"
WATCHED_FILES = ("config.yaml", "metrics.jsonl", "run.json", "summary.json", "evaluations/*.jsonl")
"""Files from which the metrics of a run are computed."""


class ViewedRun:
    """One run: its columns and its entry in the list, read again when its files have changed. Thread-safe."""

    def __init__(self, run_id: str, path: Path) -> None:
        self.id = run_id
        self.run = Run(path)
        self.columns = StepColumns(path)
        self._lock = threading.Lock()
        # With a lock of its own: an explanation takes seconds, and the list of runs must not wait for it.
        self._advice = AdviceCache(path)
        self._fingerprint: Any = None
        self._entry: dict[str, Any] = {}
        self._settings: dict[str, Any] = {}
        self._settings_written_ns = 0

    def fingerprint(self) -> tuple[Any, ...]:
        """Return a value that changes when the run writes, starts or ends."""
        files = []
        for pattern in WATCHED_FILES:
            for path in self.run.path.glob(pattern):
                stat = path.stat()
                files.append((path.name, stat.st_size, stat.st_mtime_ns))
        return (self.run.folder.has_live_process(), *files)

    def list_entry(self, budget_s: float = READ_S) -> dict[str, Any]:
        """Return the run's entry in the list.

        `read` is the share of its steps that has been read. While it is below 1, each call reads further.
        """
        with self._lock:
            # Take the fingerprint before reading: a change during the read is then picked up by the next call.
            fingerprint = self.fingerprint()
            if fingerprint != self._fingerprint or self._entry["read"] < 1:
                self._entry = self._read_entry(budget_s)
                self._fingerprint = fingerprint
            return self._entry

    def _read_entry(self, budget_s: float) -> dict[str, Any]:
        read = self.columns.read_new_rows(budget_s)
        settings = self.settings()
        evaluations = self.run.evaluations()
        config = self._validate(settings)
        times = self.columns.column("time_s")
        ages = self.columns.column("age_max")
        steps_s = float(times[-1] - times[0]) if len(times) else None
        return {
            "id": self.id,
            "name": self.id.replace(SEPARATOR, "/"),
            "read": read,
            "status": self.run.status().value,
            "reason": self.run.reason,
            "step": self.columns.last_value("step"),
            "steps": settings.get("steps"),
            "max_staleness": settings.get("max_staleness"),
            "age_bound": config and config.replay_policy.age_bound,
            "capacity": config and config.capacity_groups,
            "age_max": float(np.nanmax(ages)) if not np.isnan(ages).all() else None,
            "reward": self.columns.last_value("reward_mean"),
            "rewards": self.columns.mean_in_ranges("reward_mean", SPARKLINE_POINTS),
            "accuracy": evaluations[-1].get("sampled_accuracy") if evaluations else None,
            "tokens_per_s": self.columns.tokens_per_s(settings.get("max_staleness")),
            "started_s": float(times[0]) if len(times) else None,
            "changed_s": max(path.stat().st_mtime for path in (self.run.path, *self.run.path.glob("metrics.jsonl"))),
            "duration_s": self.run.state().wall_s or steps_s,
        }

    def settings(self) -> dict[str, Any]:
        """Return config.yaml as plain data, parsed again only when the file has changed: it takes milliseconds, and the
        list of a large sweep needs it for every point."""
        file = self.run.folder.config_file
        written_ns = file.stat().st_mtime_ns if file.exists() else 0
        if written_ns != self._settings_written_ns:
            self._settings = self.run.settings()
            self._settings_written_ns = written_ns
        return copy.deepcopy(self._settings)

    def _validate(self, settings: dict[str, Any]) -> RunConfig | None:
        """Return the configuration; None if this release rejects it."""
        try:
            remove_former_values(settings)
            return validate(settings, str(self.run.path))
        except ConfigError:
            return None

    def details(self) -> dict[str, Any]:
        """Return the data of the run's overview page. `read` below 1 means that the next call reads further."""
        until = time.monotonic() + READ_S
        entry = self.list_entry(READ_S)
        read = min(entry["read"], self.columns.read_new_spans(until - time.monotonic()))
        folder = self.run.path
        return {
            **entry,
            **make_overview(self.run, self.columns, entry, self.settings()),
            "read": read,
            "path": str(folder),
            "evaluations": self.run.evaluations(),
            "warnings": list(self.columns.warnings),
            "logs": [file.stem for file in self.run.files("logs") if file.suffix == ".log"],
            "has_report": (folder / "report.md").is_file(),
        }

    def advice(self) -> dict[str, Any]:
        """Return the advice of `async-grpo why`. Takes seconds for a long run."""
        is_live = self.list_entry()["status"] == RunStatus.LIVE
        return self._advice.advise(self.fingerprint(), is_live=is_live)


class RunsRoot:
    """The runs below a folder, or the one run that the folder is. Links that lead out of it are not followed."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise ConfigError(
                f"{path} is not a folder of runs. Name the folder of all runs (runs_dir of the configuration, usually "
                "runs), or one run in it"
            )
        self.path = path.resolve()
        self._runs: dict[Path, ViewedRun] = {}

    def viewed_runs(self) -> list[ViewedRun]:
        """Return all runs, the latest first."""
        paths = [run.path for run in list_runs(self.path)]
        return [self._viewed_run(path) for path in paths if self._is_inside(path)]

    def find_run(self, run_id: str) -> ViewedRun:
        """Return the run with this id. Raises HTTPException if there is none."""
        for path in self._candidate_paths(run_id):
            if is_run(path):
                return self._viewed_run(path)
        raise HTTPException(404, f"there is no run {run_id!r} in {self.path}. It may have been removed or renamed")

    def find_run_folder(self, run_id: str) -> Path:
        """Return the folder of the run with this id. Raises HTTPException if there is none."""
        return self.find_run(run_id).run.path

    def sweep_folders(self) -> list[Path]:
        """Return the folders of sweeps, the newest first."""
        folders: set[Path] = set()
        for depth in ("", "*/", "*/*/"):
            folders.update(path.parent for path in self.path.glob(depth + SWEEP_RECORD))
        inside = [folder for folder in folders if self._is_inside(folder)]
        return sorted(inside, key=lambda path: path.stat().st_mtime, reverse=True)

    def find_sweep_folder(self, sweep_id: str) -> Path:
        """Return the folder of the sweep with this id. Raises HTTPException if there is none."""
        for path in self._candidate_paths(sweep_id):
            if (path / SWEEP_RECORD).is_file():
                return path
        raise HTTPException(404, f"there is no sweep {sweep_id!r} in {self.path}. It may have been removed or renamed")

    def make_id(self, path: Path) -> str:
        """Return the id of a run or sweep for URLs."""
        return path.name if path == self.path else SEPARATOR.join(path.relative_to(self.path).parts)

    def _viewed_run(self, path: Path) -> ViewedRun:
        if path not in self._runs:
            self._runs[path] = ViewedRun(self.make_id(path), path)
        return self._runs[path]

    def _candidate_paths(self, name: str) -> Iterator[Path]:
        """Yield the folders that an id can refer to. Names may contain the separator themselves."""
        if "/" in name or "\0" in name:
            return
        if name == self.path.name:
            yield self.path
        for parts in ([name], name.split(SEPARATOR)):
            path = self.path.joinpath(*parts)
            if not {"", ".", ".."} & set(parts) and self._is_inside(path):
                yield path

    def _is_inside(self, path: Path) -> bool:
        """True if the folder is below the root and its path has no link."""
        return path.resolve() == path and path.is_relative_to(self.path)
