"""Measurements: as a table for people, as JSON for machines, with the machine they were made on.

`bench_server` is the Redis server of a bench of the state plane: a private one, or a given one.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.table import Table
from rich.text import Text

from async_grpo.config.buffer import RedisConfig
from async_grpo.errors import ConfigError
from buffer import PASSWORD_VARIABLE, EmbeddedServer

Picture = Callable[[Path], None]
"""Draws into a file."""
_CPU_FACTS = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Measurement:
    """A value and the baseline of the same run. `ratio` is value to baseline: of the medians, or, where
    both were measured in pairs, the median of the pairs' ratios."""

    name: str
    value: float
    unit: str
    baseline: float | None = None
    baseline_name: str = ""
    ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """Where and when: figures of different machines, or of a busy one, do not compare."""

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
    """One figure a row, the machine below."""
    view = Table(title=Text(title), caption=Text(str(machine)), caption_justify="left")
    view.add_column("figure")
    for column in ("value", "baseline", "ratio"):
        view.add_column(column, justify="right")
    view.add_column("baseline is")
    for figure in figures:
        view.add_row(
            Text(figure.name),
            f"{_short(figure.value)} {figure.unit}",
            "" if figure.baseline is None else f"{_short(figure.baseline)} {figure.unit}",
            "" if figure.ratio is None else f"{figure.ratio:.2f}",
            Text(figure.baseline_name),
        )
    return view


def make_room(path: Path) -> None:
    """Make the folder of a file that will be written when all has been measured. Raises ConfigError where that could
    not be done."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path.parent} cannot be made ({error.strerror}). Name a file elsewhere") from error
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{path} cannot be written: it is a folder, or not yours to write. Name a file elsewhere")


def write(path: Path, figures: Sequence[Measurement], machine: Machine) -> None:
    """`{"figures": [...], "cpu": ..., "cores": ..., "python": ..., "date": ..., "load": ...}`."""
    content = {"figures": [asdict(figure) for figure in figures], **asdict(machine)}
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")


def _short(value: float) -> str:
    """Three significant digits, and whole numbers with separators."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _cpu_model() -> str:
    """Of the first core; the architecture where the kernel does not say."""
    try:
        lines = _CPU_FACTS.read_text().splitlines()
    except OSError:
        lines = []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


Fsync = Literal["everysec", "always"]
PATIENCE_S = 5.0
"""For a given server that does not answer."""


@contextlib.contextmanager
def bench_server(url: str | None, fsync: Fsync = "always") -> Iterator[RedisConfig]:
    """The configuration that reaches it. The embedded one is that of a run (append-only file included), except
    for `fsync`, and is gone afterwards. Call it in the main thread: the server dies with its starter."""
    if url is not None:
        yield RedisConfig(url=url, timeout_s=PATIENCE_S, durable=False)
        return
    os.environ.pop(PASSWORD_VARIABLE, None)  # it is another server's; ours has none and would refuse it
    with tempfile.TemporaryDirectory(prefix="async-grpo-bench-") as folder:
        server = EmbeddedServer(Path(folder) / "server", RedisConfig(fsync=fsync))
        try:
            yield RedisConfig(url=server.start())
        finally:
            server.stop()
