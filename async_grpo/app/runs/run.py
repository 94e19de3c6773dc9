"""Run: read access to the folder of a run. `list_runs` finds the runs in a folder.

    config.yaml  run.json  run.lock     -->  config, state
    metrics.jsonl                       -->  steps, probes, warnings
    evaluations/*.jsonl, summary.json   -->  evaluations, summary
    samples/  timeline/  logs/          -->  their files

This module only reads files and never connects to the run's server. Files may be truncated, missing or from an older
release; unreadable parts are omitted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
import yaml

from async_grpo.app.launch.run_folder import RunFolder, RunState
from async_grpo.app.report.summary import summarize
from async_grpo.config import RunConfig
from async_grpo.errors import ConfigError
from async_grpo.telemetry.jsonl import read_rows
from async_grpo.telemetry.rows import RESTARTS_PREFIX, Facts, Row, latest_rows, numbers, rows_of_kind
from async_grpo.wire.board import Evaluation

SUMMARY = "summary.json"
_FAST_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The loader of libyaml, if PyYAML has it: ten times as fast, which matters for lists of many runs."""


class RunStatus(StrEnum):
    """State of a run."""

    LIVE = "live"
    """A process runs in its folder."""
    FINISHED = "finished"
    FAILED = "failed"
    """It stopped with an error; `Run.reason` is the message."""
    INTERRUPTED = "interrupted"
    """It was stopped or killed before its last step. The command that started it resumes it."""


@dataclass(frozen=True, slots=True)
class Run:
    """Folder of a run, for reading.

    Every method reads the files again, so that a live run can be followed. Methods with a parameter `rows` accept the
    rows of metrics.jsonl, so that a caller with several queries reads this file, which may be large, only once.
    """

    path: Path

    @classmethod
    def open(cls, path: Path) -> Run:
        """Open the run in `path`. Raises ConfigError if it is not the folder of a run."""
        if not is_run(path):
            raise ConfigError(
                f"{path} is not the folder of a run: it has no config.yaml. Runs are in runs/ unless runs_dir is set; "
                "`async-grpo runs list` shows them"
            )
        return cls(path)

    @property
    def name(self) -> str:
        """Name of the run in its configuration; the folder's name if that is unreadable."""
        name = self.settings().get("name")
        return name if isinstance(name, str) else self.path.name

    @property
    def folder(self) -> RunFolder:
        """The launcher's view of the folder."""
        return RunFolder(self.path)

    @property
    def config(self) -> RunConfig:
        """Resolved configuration. Raises ConfigError if this release rejects it; see `settings`."""
        return self.folder.read_config()

    def settings(self) -> dict[str, Any]:
        """Return config.yaml as plain data, for any release; {} if it cannot be read."""
        try:
            settings = yaml.load(self.folder.config_file.read_text(), Loader=_FAST_LOADER)
        except (OSError, yaml.YAMLError, UnicodeDecodeError, RecursionError):
            return {}
        return settings if isinstance(settings, dict) else {}

    def state(self) -> RunState:
        """Return run.json; an empty state if it is missing or unreadable."""
        try:
            return self.folder.read_state()
        except (OSError, ValueError, TypeError):
            return RunState()

    def status(self) -> RunStatus:
        """Return the state of the run. A run is live while a process has its lock, which ends even with SIGKILL."""
        if self.folder.has_live_process():
            return RunStatus.LIVE
        state = self.state()
        if state.finished_steps and state.finished_steps >= int(self.settings().get("steps") or 0):
            return RunStatus.FINISHED
        return RunStatus.FAILED if state.failure else RunStatus.INTERRUPTED

    @property
    def reason(self) -> str:
        """Reason of the failure; "" if the run did not fail."""
        return self.state().failure

    def rows(self) -> list[dict[str, Any]]:
        """Return all rows of metrics.jsonl (`telemetry.rows`) in file order."""
        return read_rows(self.path / "metrics.jsonl")

    def steps(self, rows: Sequence[Row] | None = None) -> list[Row]:
        """Return one row per optimizer step; the last one of a step that was repeated after a restart."""
        rows = self.rows() if rows is None else rows
        return latest_rows(rows_of_kind(rows, "step"), "step")

    def warnings(self, rows: Sequence[Row] | None = None) -> list[Row]:
        """Return the warnings, oldest first."""
        rows = self.rows() if rows is None else rows
        return rows_of_kind(rows, "warning")

    def evaluations(self) -> list[Facts]:
        """Return the evaluations by version: fields of `wire.board.Evaluation`, and `time_s` if known."""
        rows: list[Row] = list(self.written_summary().get("evaluations") or [])
        for file in sorted((self.path / "evaluations").glob("*.jsonl")):
            rows += read_rows(file)
        # Rows of the files come last, so that they replace those of an older summary.
        by_version: dict[int, Facts] = {}
        for row in rows:
            if isinstance(row.get("version"), int):
                by_version[row["version"]] = dict(row)
        return [by_version[version] for version in sorted(by_version)]

    def summary(self, rows: Sequence[Row] | None = None) -> Facts:
        """Return summary.json if it covers all steps; otherwise the same values computed from the other files, without
        the accounting of groups."""
        rows = self.rows() if rows is None else rows
        written = self.written_summary()
        if written and int(written.get("steps") or 0) >= len(self.steps(rows)):
            return written
        return self.computed_summary(rows=rows)

    def written_summary(self) -> Facts:
        """Return summary.json; {} if it is missing or torn."""
        try:
            summary = json.loads((self.path / SUMMARY).read_text())
        except (OSError, ValueError):
            return {}
        return summary if isinstance(summary, dict) else {}

    def computed_summary(
        self,
        stats: Facts | None = None,
        counters: Mapping[str, int] | None = None,
        *,
        rows: Sequence[Row] | None = None,
    ) -> Facts:
        """Compute the summary from the other files.

        `stats` (fields of BufferStats) and `counters` are from the run's server. Without them, the accounting of groups
        and the generated tokens are missing.
        """
        rows = self.rows() if rows is None else rows
        state = self.state()
        steps = rows_of_kind(rows, "step")
        times = numbers(steps, "time_s")
        wall_s = state.wall_s or (max(times) - min(times) if times else 0.0)
        evaluations = [_evaluation(row) for row in self.evaluations()]
        try:
            config = self.config
        except (ConfigError, OSError):
            return {"name": self.name, "steps": len(latest_rows(steps, "step")), "wall_s": wall_s}

        servers = [read_rows(path) for path in self.files("timeline") if path.name.startswith("rollout-")]
        restarts = {f"{RESTARTS_PREFIX}{role}": count for role, count in state.restarts.items()}
        return summarize(
            config,
            steps,
            rows_of_kind(rows, "probe"),
            evaluations,
            stats or {},
            {**(counters or {}), **restarts},
            wall_s,
            prepare_s=state.prepare_s,
            servers=servers,
            given_up=state.given_up,
        )

    def samples(self, step: int | None = None) -> list[dict[str, Any]]:
        """Return the groups in samples/*.jsonl (`telemetry.rows`); with `step`, only those that this optimizer step
        trained, according to trained.jsonl."""
        rows = [row for file in self.files("samples") for row in read_rows(file) if row.get("completions")]
        if step is None:
            return rows
        trained = [row for row in read_rows(self.path / "trained.jsonl") if row.get("step") == step]
        if not trained:
            return []
        groups = trained[-1].get("groups", {})
        return [row for row in rows if str(row.get("seq")) in groups]

    @property
    def written_s(self) -> float:
        """Time of the last write of a step or of the state, in seconds since the epoch."""
        files = [self.path / name for name in ("metrics.jsonl", "run.json", "config.yaml")]
        return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)

    def files(self, kind: str) -> list[Path]:
        """Return the files in one of the folders `samples`, `timeline`, `evaluations`, `logs` and `plots`, by name."""
        return sorted(path for path in (self.path / kind).glob("*") if path.is_file())


def _evaluation(row: Row) -> Evaluation:
    return msgspec.convert(row, Evaluation)


def is_run(path: Path) -> bool:
    """True for the folder of a run."""
    return (path / "config.yaml").is_file()


def list_runs(root: Path) -> list[Run]:
    """Return the runs in `root` and in the folders of its sweeps, most recently written first.

    `root` may also be the folder of a run. Raises ConfigError if `root` is not a folder.
    """
    if not root.is_dir():
        raise ConfigError(f"{root} is not a folder. Name the folder that holds the runs, such as runs/")
    if is_run(root):
        return [Run(root)]
    paths = {path for pattern in ("*", "*/*", "*/*/*") for path in root.glob(pattern) if is_run(path)}
    return sorted(map(Run, paths), key=lambda run: run.written_s, reverse=True)
