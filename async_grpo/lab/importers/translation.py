"""Translates the configuration of another system into this project's YAML.

    file --read_keys--> keys and values --translate--> settings with comments  --finish--> Imported
                                                 \\--> keys that are approximated or not supported, with the reason

Nothing is dropped silently: every key of the file is listed as the same, approximated or not supported. For keys that
the file does not have, the translation uses the other system's defaults.
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
from async_grpo.lab.importers.reading import OUTCOMES, GivenKeys, ImportedKey, Outcome, read_keys
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
    """A translated and validated configuration."""

    settings: Sequence[Setting]
    keys: Sequence[ImportedKey]
    """All keys of the file."""
    config: RunConfig

    @property
    def left_out(self) -> list[ImportedKey]:
        """Keys that are not supported."""
        return [item for item in self.keys if item.outcome == "not supported"]

    @property
    def approximated(self) -> list[ImportedKey]:
        """Keys that are imported with a difference."""
        return [item for item in self.keys if item.outcome == "approximated"]

    @property
    def defaults(self) -> list[ImportedKey]:
        """Keys that need no setting, because they have our default."""
        written = [setting.key for setting in self.settings]
        same = [item for item in self.keys if item.outcome == "same"]
        return [item for item in same if not any(_is_below(key, item.ours.split(", ")) for key in written)]

    @property
    def counts(self) -> str:
        """Number of keys of the file by outcome."""
        outcomes = [item.outcome for item in self.keys]
        return ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in OUTCOMES)

    def format_yaml(self, title: str) -> str:
        """Return the YAML file: the settings, then as comments the keys that are not supported or approximated."""
        settings = sorted(self.settings, key=lambda setting: _schema_position(setting.key))
        nested = _nest_keys({setting.key: setting for setting in settings})
        lines = [f"# {title}", "# Check it: async-grpo run THIS_FILE --dry-run", "", *_format_yaml(nested, "")]
        lines += _format_comments("Not supported, with the reason and the nearest key here", self.left_out)
        lines += _format_comments("Approximated, with the difference", self.approximated)
        lines += _format_comments("Not written, because runs here do the same without a setting", self.defaults)
        return "\n".join([*lines, ""])


@dataclass(slots=True)
class Translation:
    """The state of one import: the keys of the file and the settings so far."""

    source: SourceSystem
    given: GivenKeys
    rows: int | None = None
    """Number of rows of the training data, needed to convert epochs into steps."""
    updates_per_step: int = 1
    """Number of optimizer updates per step here, for systems that count their schedules in updates."""
    settings: dict[str, Setting] = field(default_factory=dict)
    outcomes: dict[str, ImportedKey] = field(default_factory=dict)
    """Keys that are approximated or not supported."""
    _read: set[str] = field(default_factory=set)

    def has(self, key: str) -> bool:
        """True if the file has a value other than null for the key."""
        return self.given.values.get(key) is not None

    def is_null(self, key: str) -> bool:
        """True if the file has null for the key, where null means off. If it means the default, use `has`."""
        return key in self.given.values and self.given.values[key] is None

    def get(self, key: str) -> Any:
        """Return the value in the file, or else the other system's default. Marks the key as translated."""
        self._read.add(key)
        value = self.given.values.get(key)
        if value is not None:
            return value
        for row in self.source.rows:
            if row.theirs == key:
                return row.default
        return None

    def read_number(self, key: str) -> float:
        """Return `get` as a number; 0 if there is none. Raises ConfigError."""
        value = self.get(key)
        try:
            return float(value or 0)
        except (TypeError, ValueError):
            raise ConfigError(
                f"{key} is {value!r}, and a number is needed. Correct the file, or pass --set {key}=NUMBER"
            ) from None

    def read_integer(self, key: str) -> int:
        """Return `read_number`, truncated to an integer."""
        return int(self.read_number(key))

    def read_steps(self, key: str) -> int:
        """Convert a number of optimizer updates into steps, at least 1; 0 if there is none."""
        updates = self.read_number(key)
        if updates <= 0:
            return 0
        return max(1, round(updates / self.updates_per_step))

    def read_flag(self, key: str) -> bool:
        """Return `get` as true or false."""
        return str(self.get(key)).lower() in ("true", "1", "yes", "on")

    def first_present(self, *keys: str) -> str:
        """Return the first of these keys that the file has, or else the last."""
        return next((key for key in keys if self.has(key)), keys[-1])

    def choose_name(self, key: str, names: str, fallback: Any, reason: str, near: str) -> Any:
        """Return our name for the value, from the table's choices `names`.

        If there is none, mark the key as not supported and return `fallback`.
        """
        value = str(self.get(key))
        if value not in self.source.choices[names]:
            self.mark_unsupported(key, reason.format(value), near)
        return self.source.choices[names].get(value, fallback)

    def set(self, key: str, value: Any, comment: str = "") -> None:
        """Set one of our keys; a later call replaces an earlier one."""
        self.settings[key] = Setting(key, value, comment)

    def mark_unsupported(self, key: str, reason: str, near: str = "") -> None:
        """List a key as not supported, if the file has it."""
        self._record_outcome(key, "not supported", reason, near)

    def mark_approximated(self, key: str, reason: str, ours: str = "") -> None:
        """List a key as imported with a difference, if the file has it."""
        self._record_outcome(key, "approximated", reason, ours)

    def _record_outcome(self, key: str, outcome: Outcome, reason: str, ours: str) -> None:
        if not self.has(key):
            return
        item = ImportedKey(key, self.given.values[key], reason, ours, outcome)
        earlier = self.outcomes.get(key)
        self.outcomes[key] = item if earlier is None else earlier.merge(item)

    def finish(self) -> Imported:
        """Return all settings, validated, and the outcome of every key. Raises ConfigError."""
        config = self._validate()
        needed_bytes = plan_buffer_memory(config).needed_bytes
        if needed_bytes > config.redis.max_memory_bytes:
            rounded_bytes = -(-needed_bytes // _GIB) * _GIB
            self.set("redis.max_memory_bytes", rounded_bytes, "what this many samples in flight need")
            config = self._validate()

        keys = [self._describe_outcome(key, value) for key, value in self.given.values.items() if value is not None]
        return Imported(tuple(self.settings.values()), (*keys, *self.given.left_out), config)

    def _describe_outcome(self, key: str, value: Any) -> ImportedKey:
        """Return the outcome of a key, with the reason."""
        if key in self.outcomes:
            return self.outcomes[key]
        row = self.source.find_row(key)
        if row is None:
            return ImportedKey(key, value, f"this importer does not know it; see {self.source.link}", nearest_key(key))
        if row.ours:
            return self._describe_translated(key, value, row)
        if row.always:
            return ImportedKey(key, value, row.always, row.near, "approximated" if value is False else "same")
        if value is False or (isinstance(value, str) and value.lower() in _OFF_WORDS):
            return ImportedKey(key, value, f"off in the file; {row.dropped}", row.near, "same")
        if row.same is not None and value == row.same:
            return ImportedKey(key, value, row.dropped, row.near, "same")
        return ImportedKey(key, value, row.dropped, row.near)

    def _describe_translated(self, key: str, value: Any, row: KeyRow) -> ImportedKey:
        ours = ", ".join(row.ours)
        if key not in self._read:
            reason = "without effect in this file"
            if row.note:
                reason += f"; {row.note}"
            return ImportedKey(key, value, reason, ours, "same")

        settings = [setting for name, setting in self.settings.items() if _is_below(name, row.ours)]
        if not settings:
            return ImportedKey(key, value, "the same by default", ours, "same")
        marked = [setting.comment for setting in settings if CHANGE_ME in setting.comment]
        if marked:
            return ImportedKey(key, value, marked[0], ours, "approximated")
        return ImportedKey(key, value, row.note, ours, "same")

    def _validate(self) -> RunConfig:
        raw = _nest_keys({setting.key: setting.value for setting in self.settings.values()})
        return validate(raw, source=f"the {self.source.title} configuration, translated,")


def import_file(source: SourceSystem, file: Path, given: Mapping[str, str], rows: int | None = None) -> Imported:
    """Read and translate a file. `given`: the values of --set. Raises ConfigError."""
    keys = read_keys(source, file, given)
    if not any(source.find_row(key) for key in keys.values):
        raise ConfigError(f"{file} holds no key of {source.title}. Is it the right file, and the right --from?")
    translation = Translation(source, keys, rows)
    source.translate(translation)
    return translation.finish()


_KEYS = tuple(dotted_keys(RunConfig))


def nearest_key(theirs: str) -> str:
    """Return our key whose last part is most similar to that of theirs; "" if none is similar."""
    # Reversed, so that the first of several keys with the same last part counts.
    key_by_leaf = {key.rpartition(".")[2]: key for key in reversed(_KEYS)}
    leaves = difflib.get_close_matches(theirs.rpartition(".")[2], key_by_leaf, n=1, cutoff=0.75)
    return key_by_leaf[leaves[0]] if leaves else ""


def _is_below(key: str, sections: Sequence[str]) -> bool:
    """True if the key is one of these or in one of these sections."""
    return any(f"{key}.".startswith(f"{section}.") for section in sections if section)


def _schema_position(key: str) -> int:
    """Return the position of a key in the schema; for a key in a free mapping, that of the mapping."""
    return max(index for index, schema_key in enumerate(_KEYS) if f"{key}.".startswith(f"{schema_key}."))


def _nest_keys(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Nest dotted keys into sections."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, leaf = key.split(".")
        target = nested
        for section in sections:
            target = target.setdefault(section, {})
        target[leaf] = value
    return nested


def _format_comments(title: str, items: Sequence[ImportedKey]) -> Iterator[str]:
    """Yield the keys as comments of the YAML file, grouped by reason."""
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


def _format_yaml(nested: Mapping[str, Any], indent: str) -> Iterator[str]:
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
            yield from _format_yaml(value, f"{indent}  ")
