"""Run: reads the folder of a run. `list_runs` finds the runs below a folder.

    config.yaml  run.json  run.lock     -->  config, state
    metrics.jsonl                       -->  steps, probes, warnings
    evaluations/*.jsonl, summary.json   -->  evaluations, summary
    samples/  timeline/  logs/          -->  their files

This module only reads files and never asks the run's server. Files may be truncated, missing or of an older release;
what cannot be read is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
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
from async_grpo.telemetry.rows import RESTARTS_PREFIX, Facts, Row, latest_rows, number, rows_of_kind
from async_grpo.wire.board import Evaluation

SUMMARY = "summary.json"
_FAST_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Ten times as fast if PyYAML was built with libyaml, which matters for lists of many runs."""


class RunStatus(StrEnum):
    """State of a run."""

    LIVE = "live"
    """A process is at work in its folder."""
    FINISHED = "finished"
    FAILED = "failed"
    """It stopped with an error; `Run.reason` is the message."""
    INTERRUPTED = "interrupted"
    """It was stopped or killed before its last step. The command that started it resumes it."""


@dataclass(frozen=True, slots=True)
class Run:
    """The folder of a run, for reading. Every method reads the files again, so that a live run may be followed."""

    path: Path

    @classmethod
    def open(cls, path: Path) -> Run:
        """Raises ConfigError if `path` is not the folder of a run."""
        if not is_run(path):
            raise ConfigError(
                f"{path} is not the folder of a run: it has no config.yaml. Runs lie in runs/ unless runs_dir says "
                "otherwise; `async-grpo runs list` shows them"
            )
        return cls(path)

    @property
    def name(self) -> str:
        """The run's name from its configuration, or else its folder's name."""
        name = self.settings().get("name")
        return name if isinstance(name, str) else self.path.name

    @property
    def folder(self) -> RunFolder:
        """The folder as the launcher's RunFolder."""
        return RunFolder(self.path)

    @property
    def config(self) -> RunConfig:
        """The resolved configuration. Raises ConfigError if this release refuses it; see `settings`."""
        return self.folder.read_config()

    def settings(self) -> dict[str, Any]:
        """config.yaml as plain data, also that of another release; {} if it cannot be read."""
        try:
            found = yaml.load(self.folder.config_file.read_text(), Loader=_FAST_LOADER)
        except (OSError, yaml.YAMLError, UnicodeDecodeError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def state(self) -> RunState:
        """run.json, or a new state if there is none that can be read."""
        try:
            return self.folder.read_state()
        except (OSError, ValueError, TypeError):
            return RunState()

    def status(self) -> RunStatus:
        """State of the run. A held lock means that it is live, so the answer is right however the run ended."""
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
        """All rows of metrics.jsonl (`telemetry.rows`), in the order in which they were written."""
        return read_rows(self.path / "metrics.jsonl")

    def steps(self) -> list[Row]:
        """One row for each optimizer step; of a step that was repeated after a restart, the last."""
        return latest_rows(rows_of_kind(self.rows(), "step"), "step")

    def warnings(self) -> list[Row]:
        """The warnings, oldest first."""
        return rows_of_kind(self.rows(), "warning")

    def evaluations(self) -> list[Facts]:
        """The evaluations by version: fields of `wire.board.Evaluation`, and `time_s` where it is known."""
        files = sorted((self.path / "evaluations").glob("*.jsonl"))
        rows: Iterable[Row] = [row for file in files for row in read_rows(file)]
        known: dict[int, Facts] = {
            row["version"]: dict(row)
            for row in [*(self.written_summary().get("evaluations") or []), *rows]
            if isinstance(row.get("version"), int)
        }
        return [known[version] for version in sorted(known)]

    def summary(self) -> Facts:
        """summary.json if it covers all steps; otherwise the same figures computed from the other files, without the
        accounting of groups."""
        written = self.written_summary()
        is_whole = written and int(written.get("steps") or 0) >= len(self.steps())
        return written if is_whole else self.computed_summary()

    def written_summary(self) -> Facts:
        """summary.json; {} if it is missing or torn."""
        try:
            found = json.loads((self.path / SUMMARY).read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def computed_summary(self, stats: Facts | None = None, counters: Mapping[str, int] | None = None) -> Facts:
        """The summary from the other files. `stats` (fields of BufferStats) and `counters` are those of the server;
        without them, the groups' account and the generated tokens are missing."""
        rows, state = self.rows(), self.state()
        steps = rows_of_kind(rows, "step")
        times = [time_s for row in steps if (time_s := number(row, "time_s")) is not None]
        restarts = {f"{RESTARTS_PREFIX}{role}": count for role, count in state.restarts.items()}
        evaluations = [_evaluation(row) for row in self.evaluations()]
        wall_s = state.wall_s or (max(times) - min(times) if times else 0.0)
        try:
            config = self.config
        except (ConfigError, OSError):
            return {"name": self.name, "steps": len(latest_rows(steps, "step")), "wall_s": wall_s}
        servers = [read_rows(path) for path in self.files("timeline") if path.name.startswith("rollout-")]
        probes, counters = rows_of_kind(rows, "probe"), {**(counters or {}), **restarts}
        return summarize(
            config,
            steps,
            probes,
            evaluations,
            stats or {},
            counters,
            wall_s,
            prepare_s=state.prepare_s,
            servers=servers,
            given_up=state.given_up,
        )

    def samples(self, step: int | None = None) -> list[dict[str, Any]]:
        """The groups in samples/*.jsonl (`telemetry.rows`), or those among them that the optimizer step `step` trained,
        once trained.jsonl has it."""
        rows = [row for file in self.files("samples") for row in read_rows(file) if row.get("completions")]
        if step is None:
            return rows
        trained = [row for row in read_rows(self.path / "trained.jsonl") if row.get("step") == step]
        return [row for row in rows if trained and str(row.get("seq")) in trained[-1].get("groups", {})]

    @property
    def written_s(self) -> float:
        """Time of the last write of a step or of its state, in seconds since the epoch."""
        files = [self.path / name for name in ("metrics.jsonl", "run.json", "config.yaml")]
        return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)

    def files(self, kind: str) -> list[Path]:
        """The files in one of the folders `samples`, `timeline`, `evaluations`, `logs` and `plots`, by name."""
        return sorted(path for path in (self.path / kind).glob("*") if path.is_file())


def _evaluation(row: Row) -> Evaluation:
    return msgspec.convert(row, Evaluation)


def is_run(path: Path) -> bool:
    """True for the folder of a run."""
    return (path / "config.yaml").is_file()


def list_runs(root: Path) -> list[Run]:
    """The runs in `root` and, of sweeps, in its folders; the one that was at work last comes first.

    `root` may also be the folder of a run. Raises ConfigError if `root` is not a folder.
    """
    if not root.is_dir():
        raise ConfigError(f"{root} is not a folder. Name the folder that holds the runs, such as runs/")
    if is_run(root):
        return [Run(root)]
    found = {path for pattern in ("*", "*/*", "*/*/*") for path in root.glob(pattern) if is_run(path)}
    return sorted(map(Run, found), key=lambda run: run.written_s, reverse=True)
