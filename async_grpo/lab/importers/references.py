"""Resolves references between the keys of a YAML file, as OmegaConf writes them.

    actor: {path: MODEL, backend: "fsdp:d4"}
    ref: {path: "${actor.path}", backend: "${actor.backend}"}      -> the values of actor
    name: "${experiment_name}-a"                                   -> text with the value in it
    nnodes: "${oc.select:trainer.nnodes,1}"                        -> the value, or else 1

Other uses of `${...}` are not resolved: relative keys, and resolvers such as `oc.env`, which reads the environment.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from async_grpo.errors import ConfigError

_REFERENCE = re.compile(r"\$\{\s*(?:oc\.select:)?\s*([A-Za-z_][\w.]*)\s*(?:,\s*([^{}]*?)\s*)?\}")
_MAX_DEPTH = 20
"""Maximum number of references that one value may follow. A longer chain is taken for a circle."""


def resolve_references(raw: Mapping[str, Any], parse: Callable[[str], Any]) -> dict[str, Any]:
    """Return the mapping with all references to its own keys resolved. `parse` reads the default of an `oc.select`.

    Raises ConfigError if a key refers to itself.
    """
    return {key: _resolve(value, raw, parse, depth=0) for key, value in raw.items()}


def _resolve(value: Any, raw: Mapping[str, Any], parse: Callable[[str], Any], depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise ConfigError(f"the reference {value!r} leads back to itself. Give one of the keys in it a value")
    if isinstance(value, Mapping):
        return {key: _resolve(item, raw, parse, depth) for key, item in value.items()}
    if isinstance(value, list):
        return [_resolve(item, raw, parse, depth) for item in value]
    if not isinstance(value, str) or "${" not in value:
        return value

    whole = _REFERENCE.fullmatch(value.strip())
    if whole:
        has_target, target = _look_up(whole, raw, parse)
        return _resolve(target, raw, parse, depth + 1) if has_target else value

    def replace(match: re.Match[str]) -> str:
        has_target, target = _look_up(match, raw, parse)
        return str(_resolve(target, raw, parse, depth + 1)) if has_target else match.group()

    return _REFERENCE.sub(replace, value)


def _look_up(match: re.Match[str], raw: Mapping[str, Any], parse: Callable[[str], Any]) -> tuple[bool, Any]:
    """Return whether the reference leads to a value, and the value."""
    path, default = match.groups()
    target: Any = raw
    for part in path.split("."):
        if not isinstance(target, Mapping) or part not in target:
            return default is not None, None if default is None else parse(default)
        target = target[part]
    return True, target
