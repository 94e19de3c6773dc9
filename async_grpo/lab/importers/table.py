"""The table of another system: tables/NAME.toml, read into rows.

    [keys."rl_config."]                   prefix of the keys below; "a. or b." are two sections with the same keys, and
                                          the last one in the file counts
    mini_batch_size = { ours = "trainer.mini_batches", default = 1, note = "prompts of an update" }
    max_prompt_length = { ours = "data.max_prompt_tokens", default = 512, convert = "integer" }
    "tool_*" = { dropped = "conversations with tools are a workflow", near = "rollout.multi_turn.tools" }
    use_remove_padding = { always = "sequences are always packed" }

    [script]                              launch scripts: `LaunchStyle`
    [choices.losses]                      names of theirs -> names of ours, for conversions of several keys

A row with `convert` is translated by that function of conversions.py. A row with `ours` and no `convert` depends on
other keys, so the system's module converts it. `always` describes what every run here does, `dropped` what no run does.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import resources
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRow:
    """A key of another system; `*` in it stands for any text."""

    theirs: str
    ours: Sequence[str] = ()
    """Our keys that replace it; empty if there is no counterpart."""
    dropped: str = ""
    """Reason why there is no counterpart."""
    always: str = ""
    """Behaviour of every run here that makes the key unnecessary."""
    same: Any = None
    """Value of a key without a counterpart with which runs there behave as runs here. A value that switches the key off
    is always one."""
    near: str = ""
    """Our nearest key, for a key without a counterpart."""
    note: str = ""
    """Change that the translation makes, for the documentation."""
    default: Any = None
    """The other system's default."""
    convert: str = ""
    """Name of a conversion; "" if the system's module converts the key."""
    comment: str = ""
    """Comment on the written value."""
    above: float | None = None
    """Write only values above this one."""
    unless: Sequence[str] = ()
    """Keys of the other system that take precedence over this one."""
    overrides: bool = False
    """True if the key takes precedence over the same key of another section, and has no default of its own."""


@dataclass(frozen=True, slots=True)
class LaunchStyle:
    """The form of a system's launch scripts."""

    program: str
    """Regular expression for the program whose arguments are the configuration."""
    arguments: str
    """`overrides` (Hydra's key=value) or `options` (--key value)."""
    config: str = ""
    """Option with the path of a YAML file."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Option -> key, where they differ."""


@dataclass(frozen=True, slots=True)
class SourceSystem:
    """Another system whose configurations can be imported."""

    name: str
    title: str
    """Name in its authors' spelling."""
    link: str
    rows: Sequence[KeyRow]
    choices: Mapping[str, Mapping[str, Any]]
    script: LaunchStyle | None
    translate: Callable[[Any], None]
    """Translates a configuration, given the `translation.Translation` of an import."""

    def find_row(self, key: str) -> KeyRow | None:
        """Return the row of a key, or else that of the longest matching pattern; None if there is none."""
        matching = [row for row in self.rows if fnmatchcase(key, row.theirs)]
        return max(matching, key=lambda row: (row.theirs == key, len(row.theirs)), default=None)


def load_system(name: str, translate: Callable[[Any], None]) -> SourceSystem:
    """Read tables/NAME.toml (`-` in the name is `_` there)."""
    file = resources.files("async_grpo.lab.importers") / "tables" / f"{name.replace('-', '_')}.toml"
    table = tomllib.loads(file.read_text(encoding="utf-8"))
    return SourceSystem(
        name=name,
        title=table["title"],
        link=table["link"],
        rows=tuple(row for sections, keys in table["keys"].items() for row in _make_rows(sections.split(" or "), keys)),
        choices=table.get("choices", {}),
        script=LaunchStyle(**table["script"]) if "script" in table else None,
        translate=translate,
    )


def _make_rows(sections: Sequence[str], keys: Mapping[str, dict[str, Any]]) -> Iterator[KeyRow]:
    for index, section in enumerate(sections):
        later_sections = sections[index + 1 :]
        for key, fields in keys.items():
            ours = fields.get("ours", [])
            row = {
                **fields,
                "ours": [ours] if isinstance(ours, str) else ours,
                "unless": (*fields.get("unless", []), *(f"{later}{key}" for later in later_sections)),
                "overrides": index > 0,
            }
            yield KeyRow(theirs=f"{section}{key}", **row)
