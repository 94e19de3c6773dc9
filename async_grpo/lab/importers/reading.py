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
from async_grpo.lab.importers.shell import LaunchScript, parse_options
from async_grpo.lab.importers.table import LaunchStyle, SourceSystem

_SECRET = re.compile(r"(api_?key|token|secret|password)$", re.IGNORECASE)
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 70

Outcome = Literal["same", "approximated", "not supported"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
"""Outcomes of a key, from the best to the worst."""


@dataclass(frozen=True, slots=True)
class ImportedKey:
    """A key of the file and the outcome of its import."""

    key: str
    value: Any
    reason: str
    ours: str = ""
    """Our keys that replace it, or the nearest one if it is not supported."""
    outcome: Outcome = "not supported"

    @property
    def shown(self) -> str:
        """The value in at most 70 characters. Secrets are hidden."""
        return "(hidden)" if _SECRET.search(self.key) else _REPR.repr(self.value)

    def merge(self, other: ImportedKey) -> ImportedKey:
        """Merge two outcomes of one key. The worse outcome counts; equal ones keep both reasons."""
        if other.outcome != self.outcome:
            return max(self, other, key=lambda item: OUTCOMES.index(item.outcome))
        reasons = dict.fromkeys([self.reason, other.reason])
        return replace(self, reason="; ".join(reasons))


@dataclass(frozen=True, slots=True)
class GivenKeys:
    """Keys and values of a file."""

    values: Mapping[str, Any]
    left_out: Sequence[ImportedKey] = ()
    """Keys whose value the file does not determine."""
    program: str = ""
    """Program that the launch script starts."""
    file_name: str = ""

    def has_section(self, prefix: str) -> bool:
        """True if the file has a key with this prefix."""
        return any(key.startswith(prefix) for key in self.values)


def read_keys(source: SourceSystem, file: Path, given: Mapping[str, str]) -> GivenKeys:
    """Read a YAML file or, for systems that have them, a launch script.

    `given`: the values of --set, which override variables of the script or keys of the file. Raises ConfigError.
    """
    if source.script is None or file.suffix in (".yaml", ".yml"):
        return _read_yaml_keys(file, given)
    return _read_script_keys(source, source.script, file, given)


def _read_yaml_keys(file: Path, given: Mapping[str, str]) -> GivenKeys:
    values = {**read_yaml(file, given), **_parse_values(given)}
    unresolved = [key for key, value in values.items() if isinstance(value, str) and "${" in value]
    left_out = []
    for key in unresolved:
        reason = f"it refers to what the file does not have; pass --set {key}=VALUE"
        left_out.append(ImportedKey(key, values.pop(key), reason))
    return GivenKeys(values, left_out, file_name=file.name)


def _read_script_keys(source: SourceSystem, style: LaunchStyle, file: Path, given: Mapping[str, str]) -> GivenKeys:
    script = LaunchScript(given)
    program, words = script.find_command(read_text(file), re.compile(style.program))
    arguments = _parse_overrides(words) if style.arguments == "overrides" else parse_options(words)
    values = {}
    if style.config:
        config = Path(arguments.pop(style.config, ""))
        values = read_yaml(_find_config(file, config))

    # A given name that the script refers to is a variable of it, unless the system has a key of that name.
    keys = {row.theirs for row in source.rows}
    overrides = {name: text for name, text in given.items() if name not in script.used or name in keys}

    left_out = []
    for name, text in arguments.items():
        key = style.names.get(name, name)
        reason = script.explain_unknown(key, text)
        if not reason:
            values[key] = parse_value(text)
        elif key not in overrides:
            left_out.append(ImportedKey(key, "$...", reason))
    for name in script.list_conditional():
        reason = "an if, a case or a loop may change it; --set says what holds for you"
        left_out.append(ImportedKey(name, script.variables[name], reason))
    return GivenKeys({**values, **_parse_values(overrides)}, left_out, program, file.name)


def _parse_overrides(words: Sequence[str]) -> dict[str, str]:
    """Parse Hydra's `key=value` and `+key=value`. Other words are ignored."""
    pairs = (word.lstrip("+~").partition("=") for word in words)
    return {key: text for key, equals, text in pairs if equals}


def _find_config(script: Path, config: Path) -> Path:
    for path in (config, script.parent / config, script.parent / config.name):
        if path.is_file():
            return path
    raise ConfigError(
        f"{script} names the configuration {config}, which does not exist there or next to the script. Put it next to "
        "the script"
    )


def read_yaml(file: Path, given: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the dotted keys of a YAML file with references resolved. `given` also overrides values of references.

    Raises ConfigError.
    """
    try:
        raw = yaml.safe_load(read_text(file))
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid YAML: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{file} must hold keys and values (a YAML mapping), but holds {type(raw).__name__}")
    for key, text in (given or {}).items():
        _set_nested(raw, key.split("."), parse_value(text))
    return flatten(resolve_references(raw, parse_value))


def _set_nested(raw: dict[str, Any], path: Sequence[str], value: Any) -> None:
    *sections, leaf = path
    for section in sections:
        below = raw.setdefault(section, {})
        if not isinstance(below, dict):
            return  # the file has a value where the key needs a section
        raw = below
    raw[leaf] = value


def read_text(file: Path) -> str:
    """Read a text file. Raises ConfigError."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is not a text file. Name a YAML file or a launch script") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}). Name a YAML file or a launch script") from None


def parse_value(text: str) -> Any:
    """Parse a value as YAML, except that 1e-6 is a number. In YAML 1.1 it is a string."""
    try:
        if re.fullmatch(r"[-+]?[\d.]+[eE][-+]?\d+", text):
            return float(text)
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _parse_values(given: Mapping[str, str]) -> dict[str, Any]:
    return {key: parse_value(text) for key, text in given.items()}


def flatten(raw: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return dotted key -> value. Lists are values, and empty sections disappear.

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
