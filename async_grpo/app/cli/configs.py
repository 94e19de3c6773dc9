"""`async-grpo configs`: list the shipped configurations, or copy one to start from."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from async_grpo.app.cli.common import exit_with_code, print_line
from async_grpo.config.load import resolve_config_path, shipped_configs
from async_grpo.errors import ConfigError


@exit_with_code()
def configs(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Configuration to copy, with its base layers.")
    ] = None,
    to: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder to copy to; existing files are not overwritten.")
    ] = Path("configs"),
) -> None:
    """List the configurations that come with this package, or copy one as a starting point.

    `async-grpo run NAME` runs a shipped configuration unchanged.
    """
    if name is None:
        return Console().print(_table())
    files = list(_layers(resolve_config_path(Path(name))))
    targets = [to / file.relative_to(shipped_configs()) for file in files]
    existing = [target for target in targets if target.exists()]
    if existing:
        raise ConfigError(f"{existing[0]} exists and would be overwritten. Choose another folder with --to")
    for file, target in zip(files, targets, strict=True):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
        print_line(str(target))


def _table() -> Table:
    table = Table("name", "description", title="shipped configurations: async-grpo run NAME")
    for file in sorted(shipped_configs().glob("*.yaml")):
        table.add_row(Text(file.stem), Text(_first_sentence(file.read_text(encoding="utf-8"))))
    return table


def _first_sentence(text: str) -> str:
    lines = itertools.takewhile(lambda line: line.startswith("# "), text.splitlines())
    return re.split(r"(?<=\.)\s", " ".join(line[2:] for line in lines))[0]


def _layers(file: Path) -> Iterator[Path]:
    """Yield the file and its `base:` files, recursively. Raises ConfigError for a file that is not shipped."""
    if not file.is_relative_to(shipped_configs()):
        raise ConfigError(f"there is no shipped configuration {file}. `async-grpo configs` lists them")
    base = yaml.safe_load(file.read_text(encoding="utf-8")).get("base") or []
    yield file
    for layer in base if isinstance(base, list) else [base]:
        yield from _layers(file.parent / layer)
