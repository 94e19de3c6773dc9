"""Imports configurations of other systems into this project's YAML.

    reading       YAML files and launch scripts (shell) -> dotted keys and values
    shell         variables and commands of a launch script, without executing it
    references    ${key} in a YAML file -> the value of that key
    table         tables/NAME.toml: their key -> ours, conversion, note; or the reason why there is no counterpart
    translation   the state of one import, and the file that it writes
    conversions   conversions of one key, by the name in the table, and of several keys, shared by the systems
    devices       the number of devices for training and for generation
    verl, trl ... conversions of several keys of that system

`SOURCES` lists the systems. The tables of docs/coming-from-NAME.md are generated from theirs (`insert_tables`), and a
test compares them.
"""

from __future__ import annotations

from collections.abc import Iterator

from async_grpo.lab.importers.areal import AREAL
from async_grpo.lab.importers.mindrlhf import MINDRLHF
from async_grpo.lab.importers.mindspeed_rl import MINDSPEED_RL
from async_grpo.lab.importers.table import SourceSystem
from async_grpo.lab.importers.trl import TRL
from async_grpo.lab.importers.verl import VERL

SOURCES: dict[str, SourceSystem] = {source.name: source for source in (MINDSPEED_RL, MINDRLHF, VERL, TRL, AREAL)}
"""Every system of `async-grpo import-config --from`."""

MARK = "<!-- The tables below are written by `make reference`. -->"


def page_name(source: SourceSystem) -> str:
    """Name of the system's page in docs/."""
    return f"coming-from-{source.name}.md"


def insert_tables(page: str, source: SourceSystem) -> str:
    """Return the system's page with its tables after MARK. The text before MARK is kept."""
    text = page.partition(MARK)[0]
    tables = "\n".join(_format_tables(source))
    return f"{text}{MARK}\n\n{tables}\n"


def _format_tables(source: SourceSystem) -> Iterator[str]:
    yield f"## Every key\n\nThe keys of [{source.title}]({source.link}) with a counterpart here:\n"
    yield f"| {source.title} | here | note |\n|---|---|---|"
    for row in source.rows:
        if row.ours:
            ours = ", ".join(f"`{key}`" for key in row.ours)
            yield f"| `{row.theirs}` | {ours} | {row.note} |"
    yield f"\n### Always so here\n\n| {source.title} | here | nearest |\n|---|---|---|"
    for row in source.rows:
        if row.always:
            yield f"| `{row.theirs}` | {row.always} | {_format_code(row.near)} |"
    yield f"\n### Without a counterpart\n\n| {source.title} | reason | nearest |\n|---|---|---|"
    for row in source.rows:
        if row.dropped:
            yield f"| `{row.theirs}` | {row.dropped} | {_format_code(row.near)} |"


def _format_code(key: str) -> str:
    return f"`{key}`" if key else ""
