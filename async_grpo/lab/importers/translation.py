"""Translates the configuration of another system into this project's YAML.

    file --read_file--> keys and values --translate--> settings, each with a comment  --finish--> Imported
                                                 \\--> keys that are approximated or not supported, with the reason

Nothing is dropped silently: every key of the file is listed as the same, approximated or not supported. A value that
the translation needs and the file lacks is the other system's default.
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
from async_grpo.lab.importers.reading import OUTCOMES, GivenKeys, ImportedKey, Outcome, read_file
from async_grpo.lab.importers.table import KeyRow, SourceSystem
from buffer import plan_buffer_memory

_GIB = 1 << 30
_OFF_WORDS = ("false", "off", "no", "none", "disabled", "")
CHANGE_ME = "CHANGE ME"
"""Marks a value that the user has to check."""


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
    keys: Sequence[ImportedKey]
    """Every key that the file sets."""
    config: RunConfig

    @property
    def left_out(self) -> list[ImportedKey]:
        """The keys that are not supported."""
        return [item for item in self.keys if item.outcome == "not supported"]

    @property
    def approximated(self) -> list[ImportedKey]:
        """The keys that are imported with a difference."""
        return [item for item in self.keys if item.outcome == "approximated"]

    @property
    def defaults(self) -> list[ImportedKey]:
        """The keys that need no setting, because runs here do the same without one."""
        written = [setting.key for setting in self.settings]
        same = [item for item in self.keys if item.outcome == "same"]
        return [item for item in same if not any(_is_below(key, item.ours.split(", ")) for key in written)]

    @property
    def counts(self) -> str:
        """Number of keys of the file by what became of them."""
        outcomes = [item.outcome for item in self.keys]
        return ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in OUTCOMES)

    def text(self, title: str) -> str:
        """The YAML file: the settings with their comments, then as comments what was left out or approximated."""
        settings = sorted(self.settings, key=lambda setting: _position(setting.key))
        nested = _nest({setting.key: setting for setting in settings})
        lines = [f"# {title}", "# Check it: async-grpo run THIS_FILE --dry-run", "", *_yaml_lines(nested, "")]
        lines += _comments("Not supported, with the reason and the nearest key here", self.left_out)
        lines += _comments("Approximated, with the difference", self.approximated)
        lines += _comments("Not written, because runs here do the same without a setting", self.defaults)
        return "\n".join([*lines, ""])


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
    outcomes: dict[str, ImportedKey] = field(default_factory=dict)
    """Keys that are approximated or not supported."""
    _read: set[str] = field(default_factory=set)

    def has(self, key: str) -> bool:
        """True if the file gives the key a value."""
        return self.given.values.get(key) is not None

    def is_null(self, key: str) -> bool:
        """True if the file switches the key off with null. A null that means the default is `not has(key)`."""
        return key in self.given.values and self.given.values[key] is None

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
        """List a key of the file as not supported; a key that the file lacks is not listed."""
        self._list(key, "not supported", reason, near)

    def approximate(self, key: str, reason: str, ours: str = "") -> None:
        """List a key of the file as imported with a difference; a key that the file lacks is not listed."""
        self._list(key, "approximated", reason, ours)

    def _list(self, key: str, outcome: Outcome, reason: str, ours: str) -> None:
        if not self.has(key):
            return
        item = ImportedKey(key, self.given.values[key], reason, ours, outcome)
        earlier = self.outcomes.get(key)
        self.outcomes[key] = item if earlier is None else earlier.merge(item)

    def finish(self) -> Imported:
        """List what became of every key and validate the result. Raises ConfigError."""
        config = self._validated()
        need = plan_buffer_memory(config).needed_bytes
        if need > config.redis.max_memory_bytes:
            self.set("redis.max_memory_bytes", -(-need // _GIB) * _GIB, "what this many samples in flight need")
            config = self._validated()

        keys = [self._explain(key, value) for key, value in self.given.values.items() if value is not None]
        return Imported(tuple(self.settings.values()), (*keys, *self.given.left_out), config)

    def _explain(self, key: str, value: Any) -> ImportedKey:
        """Return what became of a key."""
        if key in self.outcomes:
            return self.outcomes[key]
        row = self.source.find_row(key)
        if row is None:
            return ImportedKey(key, value, f"this importer does not know it; see {self.source.link}", nearest_key(key))
        if row.ours:
            return self._explain_translated(key, value, row)
        if row.always:
            return ImportedKey(key, value, row.always, row.near, "approximated" if value is False else "same")
        is_off = value is False or (isinstance(value, str) and value.lower() in _OFF_WORDS)
        if is_off or (row.same is not None and value == row.same):
            return ImportedKey(
                key, value, f"off in the file; {row.dropped}" if is_off else row.dropped, row.near, "same"
            )
        return ImportedKey(key, value, row.dropped, row.near)

    def _explain_translated(self, key: str, value: Any, row: KeyRow) -> ImportedKey:
        ours = ", ".join(row.ours)
        if key not in self._read:
            unused = "without effect in this file"
            if row.note:
                unused += f"; {row.note}"
            return ImportedKey(key, value, unused, ours, "same")

        settings = [setting for name, setting in self.settings.items() if _is_below(name, row.ours)]
        if not settings:
            return ImportedKey(key, value, "the same by default", ours, "same")
        marked = [setting.comment for setting in settings if CHANGE_ME in setting.comment]
        if marked:
            return ImportedKey(key, value, marked[0], ours, "approximated")
        return ImportedKey(key, value, row.note, ours, "same")

    def _validated(self) -> RunConfig:
        raw = _nest({setting.key: setting.value for setting in self.settings.values()})
        return validate(raw, source=f"the {self.source.title} configuration, translated,")


def import_file(source: SourceSystem, file: Path, given: Mapping[str, str], rows: int | None = None) -> Imported:
    """Read and translate a file. `given`: the values of --set. Raises ConfigError."""
    keys = read_file(source, file, given)
    if not any(source.find_row(key) for key in keys.values):
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


def _is_below(key: str, sections: Sequence[str]) -> bool:
    """True if the key is one of these or in one of these sections."""
    return any(f"{key}.".startswith(f"{section}.") for section in sections if section)


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


def _comments(title: str, items: Sequence[ImportedKey]) -> Iterator[str]:
    """The keys as comments of the YAML file, by reason."""
    if not items:
        return
    groups: dict[str, list[ImportedKey]] = {}
    for item in items:
        reason = f"{item.reason} ({item.ours})" if item.ours else item.reason
        groups.setdefault(reason, []).append(item)
    yield ""
    yield f"# {title}:"
    for reason, members in groups.items():
        yield f"# - {reason}"
        for item in members:
            yield f"#     {item.key}: {item.shown}"


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
