"""Configurations of other systems, read into this project's YAML.

    reading       YAML files and launch scripts (shell) -> dotted keys and values
    references    ${key} in a YAML file -> the value of that key
    table         tables/NAME.toml: their key -> ours, conversion, note; or the reason why there is no counterpart
    translation   the state of one import, and the file that it writes
    conversions   of one key, by the name in the table; and of several keys, shared by the systems
    devices       who trains and who generates
    verl, trl ... what depends on several keys of that system

`SOURCES` names the systems. The tables of docs/coming-from-NAME.md are written from theirs (`with_tables`), and a test
holds them together.
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


def with_tables(page: str, source: SourceSystem) -> str:
    """The system's page with its tables after MARK; the text before MARK is written by hand."""
    tables = "\n".join(_tables(source))
    return f"{page.partition(MARK)[0]}{MARK}\n\n{tables}\n"


def _tables(source: SourceSystem) -> Iterator[str]:
    yield f"## Every key\n\nThe keys of [{source.title}]({source.link}) with a counterpart here:\n"
    yield f"| {source.title} | here | on the way |\n|---|---|---|"
    for row in source.rows:
        if row.ours:
            ours = ", ".join(f"`{key}`" for key in row.ours)
            yield f"| `{row.theirs}` | {ours} | {row.note} |"
    yield f"\n### Always so here\n\n| {source.title} | here | nearest |\n|---|---|---|"
    for row in source.rows:
        if row.always:
            yield f"| `{row.theirs}` | {row.always} | {_code(row.near)} |"
    yield f"\n### Without a counterpart\n\n| {source.title} | reason | nearest |\n|---|---|---|"
    for row in source.rows:
        if row.dropped:
            yield f"| `{row.theirs}` | {row.dropped} | {_code(row.near)} |"


def _code(key: str) -> str:
    return f"`{key}`" if key else ""
