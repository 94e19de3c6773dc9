"""Reads configuration files and launch scripts of other systems into dotted keys and values."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from async_grpo.errors import ConfigError
from async_grpo.lab.importers.references import resolve_references
from async_grpo.lab.importers.shell import LaunchScript, options
from async_grpo.lab.importers.table import SourceSystem

_SECRET = re.compile(r"(api_?key|token|secret|password)$", re.IGNORECASE)
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 70


Outcome = Literal["same", "approximated", "not supported"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


@dataclass(frozen=True, slots=True)
class ImportedKey:
    """A key of the file and what became of it."""

    key: str
    value: Any
    reason: str
    ours: str = ""
    """The keys that it became, or the nearest one if it is not supported."""
    outcome: Outcome = "not supported"

    @property
    def shown(self) -> str:
        """The value in at most 70 characters; secrets are hidden."""
        return "(hidden)" if _SECRET.search(self.key) else _short.repr(self.value)

    def merge(self, other: ImportedKey) -> ImportedKey:
        """Return both outcomes of one key as one: the worse outcome, with the reasons of both."""
        if other.outcome != self.outcome:
            return max(self, other, key=lambda item: OUTCOMES.index(item.outcome))
        reasons = dict.fromkeys([self.reason, other.reason])
        return replace(self, reason="; ".join(reasons))


@dataclass(frozen=True, slots=True)
class GivenKeys:
    """Keys and values of a file."""

    values: Mapping[str, Any]
    left_out: Sequence[ImportedKey] = ()
    program: str = ""
    """The program that a launch script starts."""
    file_name: str = ""

    def has_section(self, prefix: str) -> bool:
        """True if the file has a key with this prefix."""
        return any(key.startswith(prefix) for key in self.values)


def read_file(source: SourceSystem, file: Path, given: Mapping[str, str]) -> GivenKeys:
    """Read a YAML file or, if the system has such, a launch script.

    `given`: the values of --set: variables of the script, or keys, which override those of the file.
    Raises ConfigError.
    """
    if source.script is None or file.suffix in (".yaml", ".yml"):
        values = {**read_yaml(file, given), **_parsed(given)}
        unresolved = [key for key, value in values.items() if isinstance(value, str) and "${" in value]
        left_out = [
            ImportedKey(key, values.pop(key), f"it refers to what the file does not have; pass --set {key}=VALUE")
            for key in unresolved
        ]
        return GivenKeys(values, left_out, file_name=file.name)

    script = LaunchScript(given)
    program, words = script.words(read_text(file), re.compile(source.script.program))
    arguments = _overrides(words) if source.script.arguments == "overrides" else options(words)
    values = {}
    if source.script.config:
        values = read_yaml(_find_config(file, Path(arguments.pop(source.script.config, ""))))

    keys = {row.theirs for row in source.rows}
    override = {name: text for name, text in given.items() if name not in script.used or name in keys}
    left_out = []
    for name, text in arguments.items():
        key = source.script.names.get(name, name)
        if reason := script.reason(key, text):
            if key not in override:
                left_out.append(ImportedKey(key, "$...", reason))
        else:
            values[key] = parse_value(text)
    doubts = [
        ImportedKey(
            name, script.variables[name], "an if, a case or a loop may change it; --set says what holds for you"
        )
        for name in script.doubtful()
    ]
    return GivenKeys({**values, **_parsed(override)}, left_out + doubts, program, file.name)


def _overrides(words: Sequence[str]) -> dict[str, str]:
    """`key=value` and `+key=value`, as Hydra takes them."""
    pairs = (word.lstrip("+~").partition("=") for word in words)
    return {key: text for key, equals, text in pairs if equals}


def _find_config(script: Path, named: Path) -> Path:
    for path in (named, script.parent / named, script.parent / named.name):
        if path.is_file():
            return path
    raise ConfigError(
        f"{script} names the configuration {named}, which does not exist there or next to the script. Put it next to "
        "the script"
    )


def read_yaml(file: Path, given: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The keys of a YAML file, dotted, with references resolved. `given` overrides what references lead to.

    Raises ConfigError.
    """
    try:
        raw = yaml.safe_load(read_text(file))
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid YAML: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{file} must hold keys and values (a YAML mapping), but holds {type(raw).__name__}")
    for key, text in (given or {}).items():
        _override(raw, key.split("."), parse_value(text))
    return flatten(resolve_references(raw, parse_value))


def _override(raw: dict[str, Any], path: Sequence[str], value: Any) -> None:
    *sections, leaf = path
    for section in sections:
        below = raw.setdefault(section, {})
        if not isinstance(below, dict):
            return  # the file has a value where the key needs a section
        raw = below
    raw[leaf] = value


def read_text(file: Path) -> str:
    """The text of a file. Raises ConfigError."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is not a text file. Name a YAML file or a launch script") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}). Name a YAML file or a launch script") from None


def parse_value(text: str) -> Any:
    """Parse a value as YAML, except that 1e-6 is a number (YAML 1.1 takes it for a string)."""
    try:
        return float(text) if re.fullmatch(r"[-+]?[\d.]+[eE][-+]?\d+", text) else yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _parsed(given: Mapping[str, str]) -> dict[str, Any]:
    return {key: parse_value(text) for key, text in given.items()}


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
