"""`DIR/`: one sweep.

points.json         its points, as they were asked for, and how the last attempt at each ended
configs/NAME.yaml   the resolved configuration of each
logs/NAME.log       what `async-grpo run` printed
runs/NAME/          the run itself
report.md, sweep.json, plots/
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from async_grpo.app.sweep.plan import Point
from async_grpo.config import dump, load
from async_grpo.errors import ConfigError
from async_grpo.utils.files import locked, write_atomic

FORMAT = 1


class PointRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A point, and how the last attempt at it ended."""

    name: str
    values: dict[str, str]
    error: str = ""
    """Of the last attempt; "" if it finished, was stopped, or has not been made."""
    at_once: int = 1
    """How many runs shared the machine, at most."""


class SweepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a sweep remembers over invocations."""

    format: int = FORMAT
    command: str = ""
    """The last that was typed."""
    points: list[PointRecord] = []


@dataclass(frozen=True, slots=True)
class SweepFolder:
    """The files that the sweep itself reads and writes."""

    path: Path

    @property
    def runs_dir(self) -> Path:
        """`runs_dir` of every run."""
        return self.path / "runs"

    @property
    def record_file(self) -> Path:
        """Which points there are."""
        return self.path / "points.json"

    def config_file(self, name: str) -> Path:
        """What `async-grpo run` is given."""
        return self.path / "configs" / f"{name}.yaml"

    def log(self, name: str) -> Path:
        """What `async-grpo run` printed, over all attempts."""
        return self.path / "logs" / f"{name}.log"

    def read(self) -> SweepRecord:
        """What is known so far; a new record without the file. Raises ConfigError for a file of another format."""
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

    def write(self, record: SweepRecord) -> None:
        """Whole or not at all."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomic(self.record_file, msgspec.json.format(msgspec.json.encode(record)).decode() + "\n")

    def points(self, record: SweepRecord) -> list[Point]:
        """As they were resolved when they were last asked for, wherever this folder is by now. Raises ConfigError."""
        configs = [load(self.config_file(known.name)) for known in record.points]
        here = [config.model_copy(update={"runs_dir": self.runs_dir}) for config in configs]
        return [Point(known.values, config) for known, config in zip(record.points, here, strict=True)]

    def write_configs(self, points: Sequence[Point]) -> None:
        """One file a point."""
        for point in points:
            file = self.config_file(point.name)
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, dump(point.config))

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Hold the sweep for this process; the kernel gives it back however the process ends. Raises ConfigError."""
        self.path.mkdir(parents=True, exist_ok=True)
        busy = ConfigError(
            f"another `async-grpo sweep` is at work in {self.path}. Wait for it, stop it, or give this one another "
            "folder (--out)"
        )
        with locked(self.path / "sweep.lock", busy):
            yield
