"""SweepFolder: the files of one sweep.

points.json         its points as they were requested, and how the last attempt at each ended
configs/NAME.yaml   the resolved configuration of each point
logs/NAME.log       what `async-grpo run` printed
runs/NAME/          the run itself
sweep.lock          held by the process that works here
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
    """A point, and how the last attempt at it ended."""

    name: str
    values: dict[str, str]
    error: str = ""
    """Error of the last attempt; "" if it finished, was stopped, or has not been made."""
    at_once: int = 1
    """Largest number of runs that shared the machine with it."""


class SweepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """points.json: what a sweep remembers between invocations."""

    format: int = FORMAT
    command: str = ""
    """The command as it was last typed."""
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
        """The configuration file that `async-grpo run` is given for the point `name`."""
        return self.path / "configs" / f"{name}.yaml"

    def argv(self, point: Point) -> list[str]:
        """The command that runs `point`, as a user would type it."""
        return [sys.executable, "-m", "async_grpo.app.cli.main", "run", str(self.config_file(point.name))]

    def log(self, name: str) -> Path:
        """The output of `async-grpo run` for the point `name`, over all attempts."""
        return self.path / "logs" / f"{name}.log"

    def read(self) -> SweepRecord:
        """The record so far; an empty one if there is no file. Raises ConfigError for a file of another format."""
        if not self.record_file.exists():
            return SweepRecord()
        try:
            record = msgspec.json.decode(self.record_file.read_bytes(), type=SweepRecord)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{self.record_file} is not the record of a sweep: {error}. Give another --out") from None
        if record.format != FORMAT:
            raise ConfigError(
                f"{self.record_file} has format {record.format}, and this version reads format {FORMAT}. Give this "
                "sweep another folder (--out)"
            )
        return record

    def records(self, points: Sequence[Point]) -> dict[str, PointRecord]:
        """The record of every point by its name, with what earlier invocations wrote."""
        known = {record.name: record for record in self.read().points}
        return {one.name: known.get(one.name) or PointRecord(name=one.name, values=dict(one.values)) for one in points}

    def write(self, record: SweepRecord) -> None:
        """Write points.json, whole or not at all."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomic(self.record_file, msgspec.json.format(msgspec.json.encode(record)).decode() + "\n")

    def points(self, record: SweepRecord) -> list[Point]:
        """The points as they were resolved when they were last asked for; `runs_dir` is where this folder is now.

        Raises ConfigError if a configuration cannot be loaded.
        """
        configs = [load(self.config_file(known.name)) for known in record.points]
        here = [config.model_copy(update={"runs_dir": self.runs_dir}) for config in configs]
        return [Point(known.values, config) for known, config in zip(record.points, here, strict=True)]

    def write_configs(self, points: Sequence[Point]) -> None:
        """Write the configuration file of every point."""
        for point in points:
            file = self.config_file(point.name)
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, dump(point.config))

    def locked(self) -> AbstractContextManager[None]:
        """Hold the sweep for this process, for the length of the block. Raises ConfigError if another one does."""
        self.path.mkdir(parents=True, exist_ok=True)
        busy = ConfigError(
            f"another `async-grpo sweep` is at work in {self.path}. Wait for it, stop it, or give this one another "
            "folder (--out)"
        )
        return locked(self.path / "sweep.lock", busy)
