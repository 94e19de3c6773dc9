"""From a YAML file and `-o key=value` overrides to a checked `RunConfig`, with errors that say how to fix them.

`differing_keys` compares two resolved configurations.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from async_grpo.config.schema import RunConfig
from async_grpo.errors import ConfigError

MACHINE_SECTIONS = ("runs_dir", "redis", "launch", "telemetry", "weights")
"""How a machine reaches the others, and where it reads and writes: nothing that is learned depends on them."""


def differing_keys(before: Any, after: Any, *, free: Iterable[str] = MACHINE_SECTIONS) -> list[str]:
    """Dotted keys whose values differ, sorted, between two configurations as plain data; `free` ones do not count.

    >>> differing_keys({"redis": {"url": "a"}, "trainer": {"nodes": 2}}, {"seed": 1, "trainer": {"nodes": 3}})
    ['seed', 'trainer.nodes']
    """
    free = tuple(free)
    return sorted(key for key in _differences(before, after) if not is_at_or_below(key, free))


def is_at_or_below(key: str, sections: Iterable[str]) -> bool:
    """Whether the dotted key is one of these, or a part of one."""
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def _differences(before: Any, after: Any, prefix: str = "") -> set[str]:
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return set() if before == after else {prefix.rstrip(".")}
    keys = before.keys() | after.keys()
    return set().union(*(_differences(before.get(key), after.get(key), f"{prefix}{key}.") for key in keys))


_MAX_LAYERS = 8
_MAX_BYTES = 1 << 20
_MAX_SHOWN = 20
_repr = reprlib.Repr()
"""A value in a message: aliases of YAML can make a short file a value of gigabytes."""
_repr.maxlevel, _repr.maxstring, _repr.maxother = 3, 200, 200


class _UniqueKeyLoader(yaml.SafeLoader):
    """Safe YAML in which a key may stand only once (plain YAML silently keeps the last)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(self.construct_object(key_node, deep=True))
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key!r} is given twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def load(path: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Read `path` (and what its `base:` names), apply the overrides, check everything.

    Raises ConfigError with every problem found: key, value, rule and fix.
    """
    raw = _read_layers(path)
    for override in overrides:
        _apply_override(raw, override)
    return validate(raw, source=str(path))


def validate(raw: Mapping[str, Any], source: str) -> RunConfig:
    """Plain data -> RunConfig. Raises ConfigError."""
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        lines = [_explain(detail) for detail in error.errors()[:_MAX_SHOWN]]
        if (more := error.error_count() - _MAX_SHOWN) > 0:
            lines.append(f"and {more} more")
        raise ConfigError(f"{source} cannot be used:\n" + "\n".join(f"  - {line}" for line in lines)) from None


def dump(config: RunConfig) -> str:
    """The resolved configuration as YAML; `load` reads it back to an equal RunConfig."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _read_layers(path: Path, depth: int = 0) -> dict[str, Any]:
    """The file's mapping over those of its `base`, a file or a list of them of which the later win, key by key."""
    if depth > _MAX_LAYERS:
        raise ConfigError(f"{path}: more than {_MAX_LAYERS} layers of `base:`. Does a file name itself as its base?")
    raw = _read_yaml(path)
    base = raw.pop("base", None)
    below: dict[str, Any] = {}
    for file in base if isinstance(base, list) else [base] if base is not None else []:
        below = _merge(below, _read_layers(path.parent / str(file), depth + 1))
    return _merge(below, raw)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"no configuration file {path}. The shipped ones are in configs/") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read as a configuration ({error.strerror}). Name a YAML file") from None
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"{path} is above {_MAX_BYTES} bytes, and no configuration is. Name a YAML file of a run")
    try:
        raw = _parse(data.decode(), _UniqueKeyLoader)
    except ValueError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold keys and values (a YAML mapping), but holds {type(raw).__name__}")
    return raw


def _parse(text: str, loader: type[yaml.SafeLoader]) -> Any:
    """Raises ValueError for whatever is wrong with the text."""
    try:
        return yaml.load(text, Loader=loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("it is nested too deeply, and no configuration is") from None


def _merge(base: dict[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _apply_override(raw: dict[str, Any], override: str) -> None:
    """`a.b.c=value` with a YAML value; sections that are missing are made."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r} is not of the form section.key=value")
    *sections, leaf = key.split(".")
    target = raw
    for section in sections:
        below = target.get(section)
        if below is None:
            below = target[section] = {}
        if not isinstance(below, dict):
            raise ConfigError(f"override {override!r}: {section!r} is a value ({below!r}), not a section")
        target = below
    try:
        target[leaf] = _parse(text, yaml.SafeLoader)
    except ValueError as error:
        raise ConfigError(f"override {_repr.repr(override)}: the value is not valid YAML: {error}") from None


def _explain(detail: ErrorDetails) -> str:
    """One problem in one line: key, value, rule, fix."""
    key = ".".join(str(part) for part in detail["loc"]) or "(whole file)"
    if detail["type"] == "extra_forbidden":
        return f"{key}: there is no such key. {_suggest(detail['loc'])}"
    if detail["type"] == "missing":
        return f"{key}: this key is required and missing. Add it, or pass -o {key}=VALUE"
    rule = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "value_error":
        return f"{key}: {rule}"
    return f"{key}: {_repr.repr(detail['input'])} does not fit: {rule}. Change it in the file or pass -o {key}=VALUE"


def _suggest(loc: tuple[int | str, ...]) -> str:
    """The nearest known keys of the section."""
    model: type[BaseModel] = RunConfig
    for part in loc[:-1]:
        field = model.model_fields.get(str(part))
        nested = [kind for kind in _models_in(field.annotation if field else None)]
        if not nested:
            break
        model = nested[0]
    known = list(model.model_fields)
    near = difflib.get_close_matches(str(loc[-1]), known, n=1, cutoff=0.6)
    return f"Did you mean {near[0]!r}?" if near else f"Known here: {', '.join(known)}"


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """The models that a field may hold: `Model`, `Model | None` or `list[Model]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in getattr(annotation, "__args__", ()) for model in _models_in(argument)]
