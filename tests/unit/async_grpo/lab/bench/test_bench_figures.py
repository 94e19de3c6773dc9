"""Results of a bench: the table, the file, and how they are computed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from async_grpo.app.cli.main import app
from async_grpo.errors import ConfigError
from async_grpo.lab.bench.measure import (
    Machine,
    Measurement,
    Picture,
    Spread,
    ensure_writable,
    measurement_table,
    write_measurements,
)
from async_grpo.wire import Ticket, encode
from benchmarks.buffer.systems import GroupMaker, make_task

MACHINE = Machine(cpu="a [bold]processor", cores=2, python="3.11.7", date="2026-01-01 00:00:00+0000", load=0.5)
WIDE = {"COLUMNS": "400"}
FIGURES = [Measurement("speed", 1234.5, "groups/s", 2000.0, "a plain list", 0.617), Measurement("alone", 0.0123, "s")]


def test_the_table_shows_every_measurement_and_the_machine() -> None:
    console = Console(width=140)
    with console.capture() as capture:
        console.print(measurement_table("bench", FIGURES, MACHINE))
    shown = capture.get()
    for part in ("1,234 groups/s", "2,000 groups/s", "0.62", "a plain list", "0.0123 s", "a [bold]processor, 2 cores"):
        assert part in shown


def test_the_file_has_the_measurements_and_the_machine(tmp_path: Path) -> None:
    write_measurements(tmp_path / "figures.json", FIGURES, MACHINE)
    content = json.loads((tmp_path / "figures.json").read_text())
    assert content == {"figures": [asdict(figure) for figure in FIGURES], **asdict(MACHINE)}
    assert set(content["figures"][0]) == {"name", "value", "unit", "baseline", "baseline_name", "ratio"}


def test_the_folder_of_a_file_is_created_before_measuring(tmp_path: Path) -> None:
    ensure_writable(tmp_path / "new" / "er" / "figures.json")
    write_measurements(tmp_path / "new" / "er" / "figures.json", FIGURES, MACHINE)
    (tmp_path / "file").touch()
    for impossible, fault in (("file/figures.json", "file cannot be created"), ("new", "new cannot be written")):
        with pytest.raises(ConfigError, match=f"{tmp_path}/{fault}"):
            ensure_writable(tmp_path / impossible)


def test_a_file_that_cannot_be_written_ends_a_bench_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    async def measure(*_: object, **options: object) -> list[Measurement]:
        measured.append(options)
        return FIGURES

    monkeypatch.setattr("async_grpo.lab.bench.rollout.bench.measure", measure)
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["bench", "rollout", "--json", str(tmp_path / "file" / "figures.json")], env=WIDE)
    assert (result.exit_code, measured) == (1, []) and "cannot be created" in result.output
    result = CliRunner().invoke(app, ["bench", "rollout", "--json", str(tmp_path / "new" / "figures.json")])
    assert (result.exit_code, measured) == (0, [{"quick": False, "truncated": False}])


def test_the_plot_is_drawn_after_the_measurements_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, plot = tmp_path / "figures.json", tmp_path / "plots" / "pipeline.png"
    there: list[bool] = []

    async def measure(*_: object, picture: Callable[[Picture], None], **__: Any) -> list[Measurement]:
        picture(lambda path: there.append(file.exists() and path == plot and path.parent.is_dir()))
        return FIGURES

    monkeypatch.setattr("async_grpo.lab.bench.pipeline.bench.measure", measure)
    result = CliRunner().invoke(app, ["bench", "pipeline", "--json", str(file), "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    assert there == [True] and "medians of the repetitions" in result.output  # its own view


def test_this_machine_is_described() -> None:
    machine = Machine.detect()
    assert machine.cores >= 1 and machine.cpu and machine.python.count(".") == 2


def test_a_paired_measurement_has_medians_and_the_median_ratio() -> None:
    """The second pair had half of the machine."""
    figure = Measurement.paired("speed", "rows/s", [(10.0, 20.0), (6.0, 10.0), (9.0, 10.0)], "a loop")
    assert figure == Measurement("speed", 9.0, "rows/s", 10.0, "a loop", 0.6)
    assert str(Spread.of([10.0, 30.0, 8.0], [2.0, 10.0, 4.0])) == "3.00 (2.00 to 5.00)"


def test_the_groups_of_the_bench_are_as_large_as_real_ones() -> None:
    ticket = Ticket(seq=3, task=make_task(3), version=5, epoch=1, attempt=1, holder="x", lease_s=1.0)
    sizes = []
    for seed in range(8):
        maker = GroupMaker(seed, templates=8)
        groups = [maker.make_group(ticket) for _ in range(16)]
        sizes += [len(encode(group)) for group in groups]
    for sample in groups[0].samples:
        sample.validate()
    assert (len(groups[0].samples), groups[0].oldest_version, groups[0].newest_version) == (8, 5, 5)
    assert sum(sizes) / len(sizes) == pytest.approx(276_000, rel=0.1)
