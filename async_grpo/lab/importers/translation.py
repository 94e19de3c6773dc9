"""Translates the keys of another system's configuration into this project's YAML; shared by all sources.

    file --read--> keys and values --translate--> settings, each with a comment  --finish--> Imported
                                            \\--> keys that are left out, each with its reason

A source is a table of `KeyRow`s, a reader of its files and a function that translates. Nothing is dropped silently: a
key of the file becomes a setting or is listed, and a value that the translation needs and the file lacks is the other
system's default, said in a comment.
"""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel

from async_grpo.config import RunConfig
from async_grpo.config.load import validate
from async_grpo.errors import ConfigError
from buffer import memory_plan

_SECRET = re.compile(r"(api_?key|token|secret|password)$", re.IGNORECASE)
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 70
_GIB = 1 << 30


ADAPTERS = "not translated: set the rank, alpha and targets of model.lora yourself"
"""Note of the keys of LoRA."""


@dataclass(frozen=True, slots=True)
class KeyRow:
    """A key of another system; with a final `*`, all keys with that prefix."""

    theirs: str
    ours: str = ""
    """The keys that it becomes, or "" for none."""
    note: str = ""
    """What the translation changes; without `ours`, why there is no counterpart."""
    default: Any = None
    """The other system's default."""
    near: str = ""
    """The nearest key, if `ours` is empty."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One line of the written configuration."""

    key: str
    value: Any
    comment: str = ""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A key of the file that did not become a setting."""

    key: str
    value: Any
    reason: str
    near: str = ""

    @property
    def shown(self) -> str:
        """The value in at most 70 characters; secrets are hidden."""
        return "(hidden)" if _SECRET.search(self.key) else _short.repr(self.value)


@dataclass(frozen=True, slots=True)
class GivenKeys:
    """What a reader found in a file."""

    values: Mapping[str, Any]
    left_out: Sequence[LeftOut] = ()
    entry: str = ""
    """The program that a launch script starts."""


@dataclass(frozen=True, slots=True)
class SourceSystem:
    """Another system whose configurations can be imported."""

    name: str
    title: str
    """The name as its authors write it, and the kind of file."""
    link: str
    rows: Sequence[KeyRow]
    read: Callable[[Path, Mapping[str, str]], GivenKeys]
    """Reads a file; the mapping holds what the user sets for it (variables of a script, keys of a YAML file)."""
    translate: Callable[[Translation], None]


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
        nested: dict[str, Any] = {}
        for setting in sorted(self.settings, key=lambda setting: _place(setting.key)):
            *sections, leaf = setting.key.split(".")
            target = nested
            for section in sections:
                target = target.setdefault(section, {})
            target[leaf] = setting
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
        found: dict[str, list[LeftOut]] = {}
        for item in self.left_out:
            found.setdefault(f"{item.reason} ({item.near})" if item.near else item.reason, []).append(item)
        return found


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
        """Whether the file gives the key a value."""
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
        left_out = [*self.left_out, *filter(None, map(self._fate, rest)), *self.given.left_out]
        defaults = [item for key in rest if (item := self._default(key)) is not None]
        config = self._validated()
        need = memory_plan(config).needed_bytes
        if need > config.redis.max_memory_bytes:
            self.set("redis.max_memory_bytes", -(-need // _GIB) * _GIB, "what this many samples in flight need")
            config = self._validated()
        return Imported(tuple(self.settings.values()), tuple(left_out), config, defaults)

    def _default(self, key: str) -> LeftOut | None:
        """The key, if it was translated and none of its counterparts had to be set; else None."""
        row = self._row(key)
        if row is None or not row.ours or key not in self._read:
            return None
        if any(ours in self.settings for ours in row.ours.split(", ")):
            return None
        return LeftOut(key, self.given.values[key], "the same by default", row.ours)

    def _fate(self, key: str) -> LeftOut | None:
        """Why the key is left out; None if it was translated."""
        row, value = self._row(key), self.given.values[key]
        if row is None:
            return LeftOut(key, value, f"this importer does not know it; see {self.source.link}", nearest_key(key))
        if row.ours and key in self._read:
            return None
        unused = f"without effect in this file{'; ' * bool(row.note)}{row.note}"
        return LeftOut(key, value, unused if row.ours else row.note, row.near or row.ours)

    def _row(self, key: str) -> KeyRow | None:
        fits = [row for row in self.source.rows if row.theirs == key or _covers(row.theirs, key)]
        return max(fits, key=lambda row: (row.theirs == key, len(row.theirs)), default=None)

    def _validated(self) -> RunConfig:
        raw: dict[str, Any] = {}
        for setting in self.settings.values():
            *sections, leaf = setting.key.split(".")
            target = raw
            for section in sections:
                target = target.setdefault(section, {})
            target[leaf] = setting.value
        return validate(raw, source=f"the {self.source.title} configuration, translated,")


def import_file(source: SourceSystem, file: Path, given: Mapping[str, str], rows: int | None = None) -> Imported:
    """Read and translate a file. `given`: the values of --set. Raises ConfigError."""
    found = source.read(file, given)
    if not found.values:
        raise ConfigError(f"{file} holds no key of {source.title}. Is it the right file, and the right --from?")
    translation = Translation(source, found, rows)
    source.translate(translation)
    return translation.finish()


def read_yaml(file: Path, given: Mapping[str, str]) -> GivenKeys:
    """The keys of a YAML file, dotted. Raises ConfigError."""
    values = flatten(parse_yaml(read_text(file), file))
    return GivenKeys({**values, **{key: parse_value(text) for key, text in given.items()}})


def read_text(file: Path) -> str:
    """The text of a file. Raises ConfigError."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is not a text file. Name a YAML file or a launch script") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}). Name a YAML file or a launch script") from None


def parse_yaml(text: str, file: Path) -> Mapping[str, Any]:
    """Parse a YAML mapping of plain data. Raises ConfigError."""
    try:
        raw = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid YAML: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{file} must hold keys and values (a YAML mapping), but holds {type(raw).__name__}")
    return raw


def parse_value(text: str) -> Any:
    """Parse a value as YAML, except that 1e-6 is a number (YAML 1.1 takes it for a string)."""
    try:
        return float(text) if re.fullmatch(r"[-+]?[\d.]+[eE][-+]?\d+", text) else yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def flatten(raw: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value; lists stay values, and an empty section disappears.

    >>> flatten({"a": {"b": 1, "c": [2]}})
    {'a.b': 1, 'a.c': [2]}
    """
    flat: dict[str, Any] = {}
    for key, value in raw.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = parse_value(value) if isinstance(value, str) else value
    return flat


def all_keys(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Every dotted key of the configuration, in order; lists are not descended into."""
    for name, info in model.model_fields.items():
        kinds = (info.annotation, *(get_args(info.annotation) if get_origin(info.annotation) is not list else ()))
        section = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        yield from all_keys(section, f"{prefix}{name}.") if section else [f"{prefix}{name}"]


_KEYS = tuple(all_keys())


def nearest_key(theirs: str) -> str:
    """Our key whose last part is most similar to theirs; "" if none is similar."""
    leaves = {key.rpartition(".")[2]: key for key in reversed(_KEYS)}
    near = difflib.get_close_matches(theirs.rpartition(".")[2], leaves, n=1, cutoff=0.75)
    return leaves[near[0]] if near else ""


def _place(key: str) -> int:
    return next((at for at, known in enumerate(_KEYS) if key == known or key.startswith(f"{known}.")), len(_KEYS))


def _covers(pattern: str, key: str) -> bool:
    return pattern.endswith("*") and key.startswith(pattern[:-1])


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


def renamed(rows: Iterable[KeyRow], prefix: str) -> list[KeyRow]:
    """The rows with a section's name in front of their keys."""
    return [replace(row, theirs=f"{prefix}{row.theirs}") for row in rows]
