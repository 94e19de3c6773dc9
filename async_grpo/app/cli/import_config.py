"""`async-grpo import-config`: translate the configuration of another system."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from async_grpo.app.cli.common import exit_with_code, print_message
from async_grpo.errors import ConfigError

if TYPE_CHECKING:
    from async_grpo.lab.importers.translation import Imported


class SourceName(StrEnum):
    """Names of the systems in `async_grpo.lab.importers.SOURCES`."""

    MINDSPEED_RL = "mindspeed-rl"
    MINDRLHF = "mindrlhf"
    VERL = "verl"
    TRL = "trl"
    AREAL = "areal"


@exit_with_code()
def import_config(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="YAML file or launch script. A script is parsed, never executed.")
    ],
    source: Annotated[SourceName, typer.Option("--from", help="System of the file.")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE", help="File to write (default: standard output).")
    ] = None,
    given: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Value of a script's variable or of a key; may be repeated."),
    ] = None,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Rows of the training data, for converting epochs to steps.")
    ] = None,
) -> None:
    """Translate a configuration of MindSpeed-RL, MindRLHF, verl, TRL or AReaL into one of this project.

    Lists every key of the file as the same, approximated or not supported, with the reason and the key of this project.
    docs/coming-from.md has a page for each system.
    """
    from async_grpo.lab.importers import SOURCES
    from async_grpo.lab.importers.translation import import_file

    if out is not None and out.exists():
        raise ConfigError(f"{out} exists and would be overwritten. Name another file with -o, or remove it")
    imported = import_file(SOURCES[source], file, _parse_pairs(given or []), rows)
    text = imported.format_yaml(f"From {file.name} of {SOURCES[source].title}, by async-grpo import-config.")
    if out is None:
        typer.echo(text, nl=False)
    else:
        out.write_text(text, encoding="utf-8")
    print_message(_closing(imported, out))
    Console(stderr=True).print(_outcome_table(imported))
    print_message(f"{len(imported.keys)} keys of the file: {imported.counts}.")


def _parse_pairs(pairs: list[str]) -> dict[str, str]:
    values = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--set {pair} is not of the form NAME=VALUE")
        values[name] = value
    return values


def _outcome_table(imported: Imported) -> Table:
    """One row per key of the file. The rows that need attention come last, next to the prompt."""
    from async_grpo.lab.importers.reading import OUTCOMES

    table = Table("what became of it", title=imported.counts)
    table.add_column("key of the file", ratio=4, overflow="fold")
    table.add_column("key here, and the reason", ratio=5, overflow="fold")
    for item in sorted(imported.keys, key=lambda item: OUTCOMES.index(item.outcome)):
        reason = ": ".join(filter(None, [item.ours, item.reason]))
        table.add_row(*map(Text, (item.outcome, f"{item.key}: {item.shown}", reason)))
    return table


def _closing(imported: Imported, out: Path | None) -> str:
    marked = [setting.key for setting in imported.settings if "CHANGE" in f"{setting.value} {setting.comment}"]
    missing = f" Fill in {', '.join(marked)}." if marked else ""
    shown = out or "FILE"
    return f"{len(imported.settings)} keys written.{missing} Next: async-grpo run {shown} --dry-run"
