"""SweepFolder: the files of one sweep.

points.json         its points as they were requested, and how the last attempt at each ended
configs/NAME.yaml   the resolved configuration of each point
logs/NAME.log       the output of `async-grpo run`
runs/NAME/          the run itself
sweep.lock          locked by the process that runs the sweep
report.md, sweep.json, plots/
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from async_grpo.config import dump, load
from async_grpo.errors import ConfigError
from async_grpo.lab.sweep.plan import Point
from async_grpo.utils.files import locked, write_atomic

FORMAT = 1


class PointRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A point and the outcome of its last attempt."""

    name: str
    values: dict[str, str]
    error: str = ""
    """Error of the last attempt; "" if it finished, was stopped or has not been made."""
    at_once: int = 1
    """Largest number of runs that shared the machine with it, itself included."""


class SweepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """points.json: the state of a sweep between invocations."""

    format: int = FORMAT
    command: str = ""
    """The last command, as typed."""
    points: list[PointRecord] = []


@dataclass(frozen=True, slots=True)
class SweepFolder:
    """The files that the sweep itself reads and writes."""

    path: Path

    @property
    def runs_dir(self) -> Path:
        """The folder of all runs: their `runs_dir`."""
        return self.path / "runs"

    @property
    def record_file(self) -> Path:
        """points.json."""
        return self.path / "points.json"

    def config_file(self, name: str) -> Path:
        """Return the configuration file of point `name`, the argument of `async-grpo run`."""
        return self.path / "configs" / f"{name}.yaml"

    def run_argv(self, point: Point) -> list[str]:
        """Return the command that runs `point`, as a user would type it."""
        return [sys.executable, "-m", "async_grpo.app.cli.main", "run", str(self.config_file(point.name))]

    def log_file(self, name: str) -> Path:
        """Return the file with the output of `async-grpo run` for point `name`, over all attempts."""
        return self.path / "logs" / f"{name}.log"

    def read_record(self) -> SweepRecord:
        """Return the record so far; an empty one if there is no file. Raises ConfigError for another format."""
        if not self.record_file.exists():
            return SweepRecord()
        try:
            record = msgspec.json.decode(self.record_file.read_bytes(), type=SweepRecord)
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"{self.record_file} is not the record of a sweep: {error}. Use another folder (--out)"
            ) from None
        if record.format != FORMAT:
            raise ConfigError(
                f"{self.record_file} has format {record.format}, but this version reads format {FORMAT}. Use another "
                "folder for this sweep (--out)"
            )
        return record

    def point_records(self, points: Sequence[Point]) -> dict[str, PointRecord]:
        """Return the record of every point by name: the stored one, or a new one."""
        stored = {record.name: record for record in self.read_record().points}
        records = {}
        for point in points:
            record = stored.get(point.name)
            records[point.name] = record or PointRecord(name=point.name, values=dict(point.values))
        return records

    def write_record(self, record: SweepRecord) -> None:
        """Write points.json atomically."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomic(self.record_file, msgspec.json.format(msgspec.json.encode(record)).decode() + "\n")

    def load_points(self, record: SweepRecord) -> list[Point]:
        """Return the points with the configurations of their last request.

        `runs_dir` is replaced by the present folder, which may have been moved. Raises ConfigError if a configuration
        cannot be loaded.
        """
        points = []
        for point_record in record.points:
            config = load(self.config_file(point_record.name))
            points.append(Point(point_record.values, config.model_copy(update={"runs_dir": self.runs_dir})))
        return points

    def write_configs(self, points: Sequence[Point]) -> None:
        """Write the configuration file of every point."""
        for point in points:
            file = self.config_file(point.name)
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, dump(point.config))

    def lock(self) -> AbstractContextManager[None]:
        """Lock the sweep for the duration of the block. Raises ConfigError if another process has the lock."""
        self.path.mkdir(parents=True, exist_ok=True)
        busy = ConfigError(
            f"another `async-grpo sweep` is running in {self.path}. Wait for it, stop it, or use another folder for "
            "this one (--out)"
        )
        return locked(self.path / "sweep.lock", busy)
