"""The table of another system: tables/NAME.toml, read into rows.

    [keys."rl_config."]                   section, in front of the keys below; "a. or b." are two with the same keys, of
                                          which the last one counts that the file has
    mini_batch_size = { ours = "trainer.mini_batches", default = 1, note = "prompts of an update" }
    max_prompt_length = { ours = "data.max_prompt_tokens", default = 512, convert = "integer" }
    "tool_*" = { dropped = "conversations with tools are a workflow", near = "rollout.multi_turn.tools" }
    use_remove_padding = { always = "sequences are always packed" }

    [script]                              launch scripts: `LaunchStyle`
    [choices.losses]                      names of theirs -> names of ours, for conversions of several keys

A row with `convert` is translated by that function of conversions.py. A row with `ours` and no `convert` depends on
other keys: the system's module reads it. A row with `always` names what every run here does, a row with `dropped` what
no run does.
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
    """The keys that it becomes; empty if there is no counterpart."""
    dropped: str = ""
    """Reason why there is no counterpart."""
    always: str = ""
    """What every run here does, so that no key is needed."""
    same: Any = None
    """Value with which runs there do the same as here, for a key without a counterpart. So does a value that switches
    the key off."""
    near: str = ""
    """The nearest key of ours, for a key without a counterpart."""
    note: str = ""
    """Change that the translation makes, for the documentation."""
    default: Any = None
    """The other system's default."""
    convert: str = ""
    """Name of a conversion, or "" if the system's module reads the key."""
    comment: str = ""
    """Comment on the written value."""
    above: float | None = None
    """Write only values above this one."""
    unless: Sequence[str] = ()
    """Keys of the other system that count instead of this one, if the file has them."""
    overrides: bool = False
    """True if the key replaces that of another section, so that it has no effect where the file lacks it."""


@dataclass(frozen=True, slots=True)
class LaunchStyle:
    """The kind of launch scripts that a system has."""

    program: str
    """Regular expression for the program whose arguments are the configuration."""
    arguments: str
    """`overrides` (key=value, as Hydra takes them) or `options` (--key value)."""
    config: str = ""
    """The option that names a YAML file."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Option -> key, where they differ."""


@dataclass(frozen=True, slots=True)
class SourceSystem:
    """Another system whose configurations can be imported."""

    name: str
    title: str
    """The name as its authors write it."""
    link: str
    rows: Sequence[KeyRow]
    choices: Mapping[str, Mapping[str, Any]]
    script: LaunchStyle | None
    translate: Callable[[Any], None]
    """Converts what depends on several keys, given the `translation.Translation` of an import."""

    def find_row(self, key: str) -> KeyRow | None:
        """The row of a key; else the longest pattern that fits it."""
        fits = [row for row in self.rows if fnmatchcase(key, row.theirs)]
        return max(fits, key=lambda row: (row.theirs == key, len(row.theirs)), default=None)


def load_system(name: str, translate: Callable[[Any], None]) -> SourceSystem:
    """Read tables/NAME.toml (`-` in the name is `_` there)."""
    file = resources.files("async_grpo.lab.importers") / "tables" / f"{name.replace('-', '_')}.toml"
    table = tomllib.loads(file.read_text(encoding="utf-8"))
    rows = tuple(row for sections, keys in table["keys"].items() for row in _rows(sections.split(" or "), keys))
    script = LaunchStyle(**table["script"]) if "script" in table else None
    return SourceSystem(name, table["title"], table["link"], rows, table.get("choices", {}), script, translate)


def _rows(sections: Sequence[str], keys: Mapping[str, dict[str, Any]]) -> Iterator[KeyRow]:
    for number, section in enumerate(sections):
        for key, given in keys.items():
            ours = given.get("ours", [])
            unless = (*given.get("unless", []), *(f"{later}{key}" for later in sections[number + 1 :]))
            row = {**given, "ours": [ours] if isinstance(ours, str) else ours, "unless": unless}
            row["overrides"] = number > 0
            yield KeyRow(theirs=f"{section}{key}", **row)
