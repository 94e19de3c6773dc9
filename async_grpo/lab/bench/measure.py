"""Parts that all benches share: measurements, alternating rounds, stopwatch, the printed table and the JSON file.

    value, baseline | baseline, value | value, baseline | ...     ratio of each pair, then the median of the ratios

If something slows the machine down for a while, it slows down both sides of a pair. The order alternates, so that
neither side profits from always being second.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from async_grpo.errors import ConfigError

Picture = Callable[[Path], None]
"""Draws into a file."""
Step = Callable[[], None]
"""Advances a progress bar by one."""
_CPU_FACTS = Path("/proc/cpuinfo")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Measurement:
    """A value and its baseline from the same run.

    `ratio` is value / baseline: the median of the pairs' ratios if both were measured in pairs, otherwise the ratio of
    the medians.
    """

    name: str
    value: float
    unit: str
    baseline: float | None = None
    baseline_name: str = ""
    ratio: float | None = None

    @classmethod
    def paired(cls, name: str, unit: str, pairs: Iterable[tuple[float, float]], baseline_name: str) -> Measurement:
        """Measurement from (value, baseline) pairs: the medians of both, and the median of the pairs' ratios."""
        values, baselines = zip(*pairs, strict=True)
        return cls(
            name=name,
            value=median(values),
            unit=unit,
            baseline=median(baselines),
            baseline_name=baseline_name,
            ratio=Spread.of(values, baselines).median,
        )


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, lowest and highest of several values."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Iterable[float], baselines: Iterable[float] | None = None) -> Spread:
        """Return the spread of one or more values; with baselines, the spread of the ratios value / baseline."""
        samples = list(values)
        if baselines is not None:
            samples = [value / baseline for value, baseline in zip(samples, baselines, strict=True)]
        return cls(median(samples), min(samples), max(samples))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.lowest:.2f} to {self.highest:.2f})"


class Stopwatch:
    """Measures a block: after `with Stopwatch() as spent: ...`, its duration is in `spent.seconds`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.seconds = 0.0

    def __enter__(self) -> Stopwatch:
        self.seconds = -self._clock()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += self._clock()


def alternate_order(contestants: Iterable[T], rounds: int) -> Iterator[list[T]]:
    """Yield the contestants of each round, in reversed order in every second round.

    >>> list(alternate_order("ab", 3))
    [['a', 'b'], ['b', 'a'], ['a', 'b']]
    """
    order = list(contestants)
    for number in range(rounds):
        yield order if number % 2 == 0 else order[::-1]


async def measure_pairs(
    ours: Callable[[], Awaitable[T]], theirs: Callable[[], Awaitable[T]], count: int, step: Step
) -> list[tuple[T, T]]:
    """Run `count` pairs of rounds in alternating order and return their (ours, theirs) results.

    `step` is called after every pair.
    """
    pairs = []
    for order in alternate_order((ours, theirs), count):
        results = {contestant: await contestant() for contestant in order}
        pairs.append((results[ours], results[theirs]))
        step()
    return pairs


def add_progress_bar(progress: Progress, description: str, total: int) -> Step:
    """Add a bar of `total` steps and return the function that advances it by one."""
    task = progress.add_task(description, total=total)
    return lambda: progress.advance(task)


def measure_load_average() -> Measurement:
    """Load average of the last five minutes. Call it after everything else has been measured."""
    return Measurement("load average of the last 5 minutes, at the end", os.getloadavg()[1], "processes")


@dataclass(frozen=True, slots=True)
class Machine:
    """Where and when something was measured. Results of different machines, or of a busy one, are not comparable."""

    cpu: str
    cores: int
    python: str
    date: str
    load: float
    """Load average of the last minute, measured before the bench."""

    @classmethod
    def detect(cls) -> Machine:
        """Return this machine, now."""
        return cls(
            cpu=_cpu_model(),
            cores=_usable_cores(),
            python=platform.python_version(),
            date=time.strftime("%Y-%m-%d %H:%M:%S%z"),
            load=round(os.getloadavg()[0], 2),
        )

    def __str__(self) -> str:
        return f"{self.cpu}, {self.cores} cores, load {self.load:g}, Python {self.python}, {self.date}"


def measurement_table(title: str, measurements: Sequence[Measurement], machine: Machine) -> Table:
    """Return a table with one row per measurement and the machine as its caption."""
    view = Table(title=Text(title), caption=Text(str(machine)), caption_justify="left")
    view.add_column("measurement")
    for column in ("value", "baseline", "ratio"):
        view.add_column(column, justify="right")
    view.add_column("baseline is")

    for measurement in measurements:
        baseline = ratio = ""
        if measurement.baseline is not None:
            baseline = f"{format_value(measurement.baseline)} {measurement.unit}"
        if measurement.ratio is not None:
            ratio = f"{measurement.ratio:.2f}"
        view.add_row(
            Text(measurement.name),
            f"{format_value(measurement.value)} {measurement.unit}",
            baseline,
            ratio,
            Text(measurement.baseline_name),
        )
    return view


def ensure_writable(path: Path) -> None:
    """Create the folder of a file that is written after the bench. Raises ConfigError if the file cannot be written.

    Call it before measuring: otherwise a wrong path loses the result of minutes.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path.parent} cannot be created ({error.strerror}). Use a path elsewhere") from error
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{path} cannot be written: it is a folder or has no write permission. Use a path elsewhere")


def write_measurements(path: Path, measurements: Sequence[Measurement], machine: Machine) -> None:
    """Write `{"figures": [...], "cpu": ..., "cores": ..., "python": ..., "date": ..., "load": ...}`."""
    content = {"figures": [asdict(measurement) for measurement in measurements], **asdict(machine)}
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")


def format_value(value: float) -> str:
    """Return three significant digits; from 100 on a whole number with separators."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _usable_cores() -> int:
    """Cores that this process may use; not all systems have affinity."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_model() -> str:
    """Return the model of the first core, or the architecture if the kernel does not report models."""
    try:
        lines = _CPU_FACTS.read_text().splitlines()
    except OSError:
        lines = []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
