"""Translates the configuration of another system into this project's YAML.

    file --read_file--> keys and values --translate--> settings, each with a comment  --finish--> Imported
                                                 \\--> keys that are left out, each with its reason

Nothing is dropped silently: a key of the file becomes a setting or is listed, and a value that the translation needs
and the file lacks is the other system's default.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from async_grpo.config import RunConfig
from async_grpo.config.load import dotted_keys, validate
from async_grpo.errors import ConfigError
from async_grpo.lab.importers.reading import GivenKeys, LeftOut, read_file
from async_grpo.lab.importers.table import SourceSystem
from buffer import plan_buffer_memory

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Setting:
    """One line of the written configuration."""

    key: str
    value: Any
    comment: str = ""


@dataclass(frozen=True, slots=True)
class Imported:
    """A translated configuration that validates."""

    settings: Sequence[Setting]
    left_out: Sequence[LeftOut]
    config: RunConfig
    defaults: Sequence[LeftOut] = ()
    """Keys of the file that have a counterpart, and whose values need no setting: runs here do the same by default."""

    def text(self, title: str) -> str:
        """The YAML file: the settings with their comments, then what was left out as comments."""
        settings = sorted(self.settings, key=lambda setting: _position(setting.key))
        nested = _nest({setting.key: setting for setting in settings})
        head = [f"# {title}", "# Check it: async-grpo run THIS_FILE --dry-run", ""]
        tail = ["", "# Not imported, with the reason and the nearest key here:"] if self.left_out else []
        for reason, items in self.reasons().items():
            tail += [f"# - {reason}", *(f"#     {item.key}: {item.shown}" for item in items)]
        if self.defaults:
            tail += ["", "# Not written, because runs here do the same without a setting:"]
            tail += [f"#     {item.key}: {item.shown} ({item.near})" for item in self.defaults]
        return "\n".join([*head, *_yaml_lines(nested, ""), *tail, ""])

    def reasons(self) -> dict[str, list[LeftOut]]:
        """The keys that were left out, by reason and nearest key."""
        groups: dict[str, list[LeftOut]] = {}
        for item in self.left_out:
            groups.setdefault(f"{item.reason} ({item.near})" if item.near else item.reason, []).append(item)
        return groups


@dataclass(slots=True)
class Translation:
    """The state of one import: the keys of the file and the settings so far."""

    source: SourceSystem
    given: GivenKeys
    rows: int | None = None
    """Number of rows of the training data, needed to convert epochs into steps."""
    updates_per_step: int = 1
    """Optimizer updates of one of our steps, where the other system counts its schedules in updates."""
    settings: dict[str, Setting] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)
    _read: set[str] = field(default_factory=set)

    def has(self, key: str) -> bool:
        """True if the file gives the key a value."""
        return self.given.values.get(key) is not None

    def get(self, key: str) -> Any:
        """The value in the file, or else the other system's default. Marks the key as translated."""
        self._read.add(key)
        value = self.given.values.get(key)
        return next((row.default for row in self.source.rows if row.theirs == key), None) if value is None else value

    def number(self, key: str) -> float:
        """`get` as a number; 0 where there is none. Raises ConfigError."""
        value = self.get(key)
        try:
            return float(value or 0)
        except (TypeError, ValueError):
            raise ConfigError(
                f"{key} is {value!r}, and a number is needed. Correct the file, or pass --set {key}=NUMBER"
            ) from None

    def integer(self, key: str) -> int:
        """`number`, cut to an integer."""
        return int(self.number(key))

    def steps(self, key: str) -> int:
        """A number of optimizer updates as a number of our steps, at least 1; 0 where there is none."""
        updates = self.number(key)
        return max(1, round(updates / self.updates_per_step)) if updates > 0 else 0

    def flag(self, key: str) -> bool:
        """`get` as true or false."""
        return str(self.get(key)).lower() in ("true", "1", "yes", "on")

    def first(self, *keys: str) -> str:
        """The first of these keys that the file has, else the last."""
        return next((key for key in keys if self.has(key)), keys[-1])

    def choose(self, key: str, names: str, fallback: Any, reason: str, near: str) -> Any:
        """Our name for the value, of the table's choices; if there is none, list the key and return `fallback`."""
        value = str(self.get(key))
        if value not in self.source.choices[names]:
            self.drop(key, reason.format(value), near)
        return self.source.choices[names].get(value, fallback)

    def set(self, key: str, value: Any, comment: str = "") -> None:
        """Set one of our keys; a later call replaces an earlier one."""
        self.settings[key] = Setting(key, value, comment)

    def drop(self, key: str, reason: str, near: str = "") -> None:
        """List a key of the file as left out; a key that the file lacks is not listed."""
        if self.has(key):
            self.left_out.append(LeftOut(key, self.given.values[key], reason, near))

    def finish(self) -> Imported:
        """List all remaining keys as left out and validate the result. Raises ConfigError."""
        listed = {item.key for item in self.left_out}
        rest = [key for key, value in self.given.values.items() if value is not None and key not in listed]
        left_out = [*self.left_out, *filter(None, map(self._explain, rest)), *self.given.left_out]
        defaults = [item for key in rest if (item := self._find_default(key)) is not None]
        config = self._validated()
        need = plan_buffer_memory(config).needed_bytes
        if need > config.redis.max_memory_bytes:
            self.set("redis.max_memory_bytes", -(-need // _GIB) * _GIB, "what this many samples in flight need")
            config = self._validated()
        return Imported(tuple(self.settings.values()), tuple(left_out), config, defaults)

    def _find_default(self, key: str) -> LeftOut | None:
        """The key, if it was translated and none of its counterparts had to be set; else None."""
        row = self.source.find_row(key)
        if row is None or not row.ours or key not in self._read or any(ours in self.settings for ours in row.ours):
            return None
        return LeftOut(key, self.given.values[key], "the same by default", ", ".join(row.ours))

    def _explain(self, key: str) -> LeftOut | None:
        """The reason why the key is left out; None if it was translated."""
        row, value = self.source.find_row(key), self.given.values[key]
        if row is None:
            return LeftOut(key, value, f"this importer does not know it; see {self.source.link}", nearest_key(key))
        if not row.ours:
            return LeftOut(key, value, row.dropped, row.near)
        if key in self._read:
            return None
        unused = "without effect in this file"
        if row.note:
            unused += f"; {row.note}"
        return LeftOut(key, value, unused, ", ".join(row.ours))

    def _validated(self) -> RunConfig:
        raw = _nest({setting.key: setting.value for setting in self.settings.values()})
        return validate(raw, source=f"the {self.source.title} configuration, translated,")


def import_file(source: SourceSystem, file: Path, given: Mapping[str, str], rows: int | None = None) -> Imported:
    """Read and translate a file. `given`: the values of --set. Raises ConfigError."""
    keys = read_file(source, file, given)
    if not keys.values:
        raise ConfigError(f"{file} holds no key of {source.title}. Is it the right file, and the right --from?")
    translation = Translation(source, keys, rows)
    source.translate(translation)
    return translation.finish()


_KEYS = tuple(dotted_keys(RunConfig))


def nearest_key(theirs: str) -> str:
    """Our key whose last part is most similar to theirs; "" if none is similar."""
    leaves = {key.rpartition(".")[2]: key for key in reversed(_KEYS)}
    near = difflib.get_close_matches(theirs.rpartition(".")[2], leaves, n=1, cutoff=0.75)
    return leaves[near[0]] if near else ""


def _position(key: str) -> int:
    """The place of a key in the schema; keys below a free mapping have that of the mapping."""
    return max(at for at, known in enumerate(_KEYS) if f"{key}.".startswith(f"{known}."))


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as sections within sections."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, leaf = key.split(".")
        target = nested
        for section in sections:
            target = target.setdefault(section, {})
        target[leaf] = value
    return nested


def _yaml_lines(nested: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, value in nested.items():
        if isinstance(value, Setting):
            text = yaml.safe_dump(
                value.value, default_flow_style=True, width=10_000, allow_unicode=True, sort_keys=False
            )
            comment = f"    # {value.comment}" if value.comment else ""
            yield f"{indent}{key}: {text.removesuffix('...' + chr(10)).strip()}{comment}"
        else:
            yield from ([""] if not indent else [])
            yield f"{indent}{key}:"
            yield from _yaml_lines(value, f"{indent}  ")
