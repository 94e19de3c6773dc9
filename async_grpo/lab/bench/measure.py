"""What every bench is made of: measurements, turns, stopwatches; the table for people and the file for machines.

    value, baseline | baseline, value | value, baseline | ...     the ratio of each pair, and the median of the ratios

What slows the machine down for a while slows down all contestants of a turn. The order alternates, so that being second
favours none.
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
"""Moves a progress bar by one."""
_CPU_FACTS = Path("/proc/cpuinfo")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Measurement:
    """A value and the baseline of the same run. `ratio` is value / baseline: that of the medians, or, if both were
    measured in pairs, the median of the pairs' ratios."""

    name: str
    value: float
    unit: str
    baseline: float | None = None
    baseline_name: str = ""
    ratio: float | None = None

    @classmethod
    def paired(cls, name: str, unit: str, pairs: Iterable[tuple[float, float]], baseline_name: str) -> Measurement:
        """The medians of (value, baseline) pairs, and the median of the pairs' ratios."""
        values, baselines = zip(*pairs, strict=True)
        return cls(name, median(values), unit, median(baselines), baseline_name, Spread.of(values, baselines).median)


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of several values, and the lowest and the highest of them."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Iterable[float], baselines: Iterable[float] | None = None) -> Spread:
        """The spread of at least one value; with baselines, of the ratios of value to baseline, pair by pair."""
        found = list(values)
        if baselines is not None:
            found = [value / baseline for value, baseline in zip(found, baselines, strict=True)]
        return cls(median(found), min(found), max(found))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.lowest:.2f} to {self.highest:.2f})"


class Stopwatch:
    """`with Stopwatch() as spent: ...` leaves in `spent.seconds` what the block took by `clock`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.seconds = 0.0

    def __enter__(self) -> Stopwatch:
        self.seconds = -self._clock()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += self._clock()


def in_turns(contestants: Iterable[T], rounds: int) -> Iterator[list[T]]:
    """The contestants of each round: in their order, and reversed in every second round.

    >>> list(in_turns("ab", 3))
    [['a', 'b'], ['b', 'a'], ['a', 'b']]
    """
    order = list(contestants)
    for number in range(rounds):
        yield order if number % 2 == 0 else order[::-1]


async def paired_rounds(
    ours: Callable[[], Awaitable[T]], theirs: Callable[[], Awaitable[T]], count: int, step: Step
) -> list[tuple[T, T]]:
    """`count` pairs of rounds, (ours, theirs), made in alternating order; `step` is called after every pair."""
    pairs = []
    for order in in_turns((ours, theirs), count):
        done = {contestant: await contestant() for contestant in order}
        pairs.append((done[ours], done[theirs]))
        step()
    return pairs


def progress_bar(progress: Progress, what: str, total: int) -> Step:
    """A new bar of `total` steps; each call of the result moves it by one."""
    task = progress.add_task(what, total=total)
    return lambda: progress.advance(task)


def final_load() -> Measurement:
    """The load average of the last five minutes, to be taken when all has been measured."""
    return Measurement("load average of the last 5 minutes, at the end", os.getloadavg()[1], "processes")


@dataclass(frozen=True, slots=True)
class Machine:
    """Where and when something was measured: figures of different machines, or of a busy one, cannot be compared."""

    cpu: str
    cores: int
    python: str
    date: str
    load: float
    """Load average of the last minute, taken before the bench."""

    @classmethod
    def here(cls) -> Machine:
        """This machine, now."""
        return cls(
            cpu=_cpu_model(),
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            python=platform.python_version(),
            date=time.strftime("%Y-%m-%d %H:%M:%S%z"),
            load=round(os.getloadavg()[0], 2),
        )

    def __str__(self) -> str:
        return f"{self.cpu}, {self.cores} cores, load {self.load:g}, Python {self.python}, {self.date}"


def table(title: str, figures: Sequence[Measurement], machine: Machine) -> Table:
    """A table with a row for each figure, and the machine below."""
    view = Table(title=Text(title), caption=Text(str(machine)), caption_justify="left")
    view.add_column("figure")
    for column in ("value", "baseline", "ratio"):
        view.add_column(column, justify="right")
    view.add_column("baseline is")
    for figure in figures:
        view.add_row(
            Text(figure.name),
            f"{short(figure.value)} {figure.unit}",
            "" if figure.baseline is None else f"{short(figure.baseline)} {figure.unit}",
            "" if figure.ratio is None else f"{figure.ratio:.2f}",
            Text(figure.baseline_name),
        )
    return view


def make_room(path: Path) -> None:
    """Make the folder of a file that will be written when everything has been measured. Raises ConfigError if that
    is not possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path.parent} cannot be made ({error.strerror}). Name a file elsewhere") from error
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{path} cannot be written: it is a folder, or not yours to write. Name a file elsewhere")


def write(path: Path, figures: Sequence[Measurement], machine: Machine) -> None:
    """Write `{"figures": [...], "cpu": ..., "cores": ..., "python": ..., "date": ..., "load": ...}`."""
    content = {"figures": [asdict(figure) for figure in figures], **asdict(machine)}
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")


def short(value: float) -> str:
    """Three significant digits; whole numbers with separators from 100 on."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _cpu_model() -> str:
    """The model of the first core, or the architecture if the kernel does not say."""
    try:
        lines = _CPU_FACTS.read_text().splitlines()
    except OSError:
        lines = []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
