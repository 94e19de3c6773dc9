"""Explains one key of a configuration: meaning, value, origin of the value, and the checks that mention it.

The checks are found in the source: every message that a section of the configuration yields, or that the launcher
raises as a ConfigError. A list kept by hand would miss the next check.
"""

from __future__ import annotations

import ast
import difflib
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from async_grpo.config.basics import BASIC_KEYS
from async_grpo.config.load import locate_keys, models_in, read_raw_config, section_at, validate
from async_grpo.config.schema import RunConfig
from async_grpo.errors import ConfigError

CHECKED_FOLDERS = ("config", "app/launch")
"""Folders of the package whose messages are searched."""
_WIDTH = 100


@dataclass(frozen=True, slots=True)
class KeyExplanation:
    """What a user wants to know about one key."""

    key: str
    is_basic: bool
    meaning: str
    value: str
    origin: str
    """Where the value comes from, such as `configs/quickstart.yaml, line 44`, `-o` or `default`."""
    default: str
    checks: tuple[str, ...]
    """Messages that mention the key. Values are replaced by an ellipsis."""

    def __str__(self) -> str:
        lines = [
            f"{self.key} ({'basic' if self.is_basic else 'advanced'})",
            textwrap.fill(self.meaning, _WIDTH, initial_indent="  ", subsequent_indent="  "),
            "",
            f"  value    {self.value}",
            f"  from     {self.origin}",
            f"  default  {self.default}",
        ]
        if self.checks:
            lines += ["", "  Checks that mention it:"]
            for check in self.checks:
                lines.append(textwrap.fill(check, _WIDTH, initial_indent="  - ", subsequent_indent="    "))
        return "\n".join(lines)


def explain_key(path: Path, overrides: Iterable[str], key: str) -> list[KeyExplanation]:
    """Explain `key` in the configuration at `path`; for a section, explain all its keys.

    Raises ConfigError for an unknown key, with the nearest names, and for an invalid configuration.
    """
    overrides = [*overrides]
    fields = dict(_fields(RunConfig))
    keys = [name for name in fields if name == key or name.startswith(f"{key}.")]
    if not keys:
        raise ConfigError(f"there is no key {key}. Nearest: {', '.join(_nearest_keys(key, [*fields]))}")

    raw, file = read_raw_config(path, overrides)
    locations = locate_keys(file)
    config = validate(raw, str(file), lambda: locations)
    origins = _Origins(raw, file, locations, overrides, config)
    return [_explain_field(name, fields[name], config, origins) for name in keys]


def _explain_field(key: str, field: FieldInfo, config: RunConfig, origins: _Origins) -> KeyExplanation:
    value = _value_at(config, key)
    default = field.get_default(call_default_factory=True)
    is_required = default is PydanticUndefined
    return KeyExplanation(
        key=key,
        is_basic=key in BASIC_KEYS,
        meaning=" ".join((field.description or "").split()),
        value=_as_text(value),
        origin=origins.find_origin(key, is_default=not is_required and _as_text(value) == _as_text(default)),
        default="none, the key is required" if is_required else _as_text(default),
        checks=tuple(_checks_of(key)),
    )


@dataclass(frozen=True, slots=True)
class ChangedSetting:
    """A setting of a run that differs from the default of its key."""

    key: str
    value: Any
    default: Any
    """None also if the key is required, or not a key of this release."""


def list_changed_settings(settings: Mapping[str, Any]) -> list[ChangedSetting]:
    """Return the settings of a resolved configuration that differ from their defaults, in the order of the file.

    `settings` is plain data and may be from another release: keys that this one does not have count as changed.
    """
    fields = dict(_fields(RunConfig))
    changed = []
    for key, value in _leaf_settings(settings, fields, ""):
        default = fields[key].get_default(call_default_factory=True) if key in fields else PydanticUndefined
        plain_default = None if default is PydanticUndefined else json.loads(_as_text(default))
        if default is PydanticUndefined or json.loads(_as_text(value)) != plain_default:
            changed.append(ChangedSetting(key, value, plain_default))
    return changed


def _leaf_settings(node: Mapping[str, Any], fields: Mapping[str, FieldInfo], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value). A section that is not set is no setting."""
    for name, value in node.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in fields:
            yield from _leaf_settings(value, fields, f"{key}.")
        elif key in fields or value is not None:
            yield key, value


@dataclass(frozen=True, slots=True)
class _Origins:
    """Knows where the values of one configuration were set."""

    raw: Mapping[str, Any]
    file: Path
    locations: Mapping[str, str]
    overrides: list[str]
    config: RunConfig

    def find_origin(self, key: str, *, is_default: bool) -> str:
        if not self._is_set(key):
            section = key.rpartition(".")[0]
            if section and _value_at(self.config, section) is None:
                return f"nowhere: {section} is not set, so this key has no effect"
            if is_default:
                return "default"
            if key.startswith("trainer.objective."):
                return f"preset {self.config.trainer.objective.preset}, or default of the loss"
            return "derived from other keys"

        prefixes = [key.rsplit(".", count)[0] for count in range(key.count(".") + 1)]
        for override in reversed(self.overrides):
            if override.partition("=")[0] in prefixes:
                return f"override -o {override}"
        location = next((self.locations[prefix] for prefix in prefixes if prefix in self.locations), "")
        if location.startswith("line "):
            return f"{self.file}, {location}"
        return location or str(self.file)

    def _is_set(self, key: str) -> bool:
        node: Any = self.raw
        for part in key.split("."):
            if not isinstance(node, Mapping) or part not in node:
                return False
            node = node[part]
        return True


def _fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every dotted key with its field, without sections and without keys of list items."""
    for name, field in model.model_fields.items():
        sections = [] if _is_list(field) else models_in(field.annotation)
        if not sections:
            yield f"{prefix}{name}", field
        for section in sections:
            yield from _fields(section, f"{prefix}{name}.")


def _is_list(field: FieldInfo) -> bool:
    return "list[" in str(field.annotation) or "tuple[" in str(field.annotation)


def _nearest_keys(key: str, keys: list[str]) -> list[str]:
    """Return up to five names: those with the same last part first, then similar spellings."""
    last = key.rpartition(".")[2]
    keys = sorted(keys, key=lambda name: name.startswith("model."))  # settings of toy policies are rarely meant
    same_ending = [name for name in keys if name.rpartition(".")[2] == last]
    by_last = {name.rpartition(".")[2]: name for name in reversed(keys)}
    similar = [by_last[name] for name in difflib.get_close_matches(last, by_last, n=3, cutoff=0.7)]
    similar += difflib.get_close_matches(key, keys, n=3, cutoff=0.5)
    nearest = [*dict.fromkeys([*same_ending, *similar])]
    return nearest[:5] or ["docs/reference.md lists all keys"]


def _value_at(config: RunConfig, key: str) -> Any:
    """Return the value of a dotted key; None below a section that is not set."""
    node: Any = config
    for part in key.split("."):
        node = getattr(node, part, None)
    return node


def _as_text(value: Any) -> str:
    return json.dumps(value, default=_as_plain, ensure_ascii=False)


def _as_plain(value: Any) -> Any:
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else str(value)


def _checks_of(key: str) -> Iterator[str]:
    """Yield every message that names the whole key, or its last part within its own section."""
    section = section_at(tuple(key.split(".")[:-1]))
    owner = section.__name__ if section is not None else ""
    whole = re.compile(rf"(?<![\w.]){re.escape(key)}(?![\w]|\.\w)")
    last = re.compile(rf"(?<![\w.]){re.escape(key.rpartition('.')[2])}(?![\w]|\.\w)")
    seen: set[str] = set()
    for class_name, message in _messages():
        is_named = whole.search(message) or (class_name == owner and last.search(message))
        if is_named and message not in seen:
            seen.add(message)
            yield message


def _messages() -> Iterator[tuple[str, str]]:
    """Yield class name and text of every message of a check; the class name is empty outside of classes."""
    root = Path(__file__).resolve().parents[1]
    for folder in CHECKED_FOLDERS:
        for file in sorted((root / folder).glob("*.py")):
            if file.name == "load.py":
                continue  # its messages name keys as examples only
            tree = ast.parse(file.read_text(encoding="utf-8"))
            for node in tree.body:
                class_name = node.name if isinstance(node, ast.ClassDef) else ""
                for part in ast.walk(node):
                    if (message := _message_of(part)) is not None:
                        yield class_name, message


def _message_of(node: ast.AST) -> str | None:
    """Return the text of `yield "..."`, `raise ValueError("...")` or `raise ConfigError("...")`, else None."""
    match node:
        case ast.Yield(value=ast.expr() as text):
            return _text_of(text)
        case ast.Raise(exc=ast.Call(func=ast.Name(id="ValueError" | "ConfigError"), args=[text, *_])):
            return _text_of(text)
    return None


def _text_of(node: ast.expr) -> str | None:
    """Return the text of a string or f-string, with an ellipsis for every value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
        return " ".join("".join(map(str, parts)).split())
    return None
