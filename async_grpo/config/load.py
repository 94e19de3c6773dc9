"""From a YAML file and `-o key=value` overrides to a checked `RunConfig`, with errors that say how to fix them.

`differing_keys` compares two resolved configurations.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from async_grpo.config.schema import RunConfig
from async_grpo.errors import ConfigError

MACHINE_SECTIONS = ("runs_dir", "runs_store", "redis", "launch", "telemetry", "weights")
"""Keys for addresses and paths of a machine: nothing that is learned depends on them."""


RESOLVED = "config.yaml"
"""The resolved configuration in the folder of a run."""
_FORMER_LEASE_S = 15.0
"""Former default of rollout.lease_s, which stands in the config.yaml of older runs. It is below redis.timeout_s."""


def differing_keys(before: Any, after: Any, *, free: Iterable[str] = MACHINE_SECTIONS) -> list[str]:
    """Dotted keys whose values differ, sorted, between two configurations as plain data; `free` ones do not count.

    >>> differing_keys({"redis": {"url": "a"}, "trainer": {"nodes": 2}}, {"seed": 1, "trainer": {"nodes": 3}})
    ['seed', 'trainer.nodes']
    """
    free = tuple(free)
    return sorted(key for key in _differences(before, after) if not is_at_or_below(key, free))


def is_at_or_below(key: str, sections: Iterable[str]) -> bool:
    """True if the dotted key is one of these, or a part of one."""
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def _differences(before: Any, after: Any, prefix: str = "") -> set[str]:
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return set() if before == after else {prefix.rstrip(".")}
    keys = before.keys() | after.keys()
    return set().union(*(_differences(before.get(key), after.get(key), f"{prefix}{key}.") for key in keys))


_MAX_LAYERS = 8
_MAX_BYTES = 1 << 20
_MAX_SHOWN = 20
_MOST_LINES = 10_000
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


def shipped_configs() -> Path:
    """The folder of the configurations that come with this package."""
    return Path(str(resources.files("async_grpo") / "configs"))


def find_config(path: Path) -> Path:
    """The file itself, or else the shipped one of that name: `quickstart`, with .yaml, or behind `configs/`."""
    inside = path.relative_to("configs") if path.is_relative_to("configs") else path
    named = inside if inside.suffix in (".yaml", ".yml") else inside.with_name(f"{inside.name}.yaml")
    shipped = shipped_configs() / named
    return shipped if not path.exists() and not path.is_absolute() and shipped.is_file() else path


def load(path: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Read `path`, or the shipped configuration of that name (and what its `base:` names), apply the overrides, check
    everything.

    `path` may be the folder of a run, which an earlier release may have made; its runs_dir is then where it lies now.
    Raises ConfigError with every problem found: key, value, rule and fix.
    """
    overrides = [*overrides]
    raw, file = read_plain(path, overrides)
    return validate(
        raw, str(file), lambda: _places(file) | {override.partition("=")[0]: "-o" for override in overrides}
    )


def read_plain(path: Path, overrides: Iterable[str] = ()) -> tuple[dict[str, Any], Path]:
    """The input of `load` as plain data without defaults, and its file. Raises ConfigError."""
    if (path / RESOLVED).is_file():
        folder, path = path, path / RESOLVED
        raw = _read_layers(path) | {"runs_dir": str(folder.absolute().parent)}
        renew(raw)
    else:
        path = find_config(path)
        raw = _read_layers(path)
    for override in overrides:
        _apply_override(raw, override)
    return raw, path


def renew(raw: dict[str, Any]) -> None:
    """Remove from a resolved configuration what an earlier release wrote and this one refuses."""
    rollout = raw.get("rollout")
    if isinstance(rollout, dict) and rollout.get("lease_s") == _FORMER_LEASE_S:
        del rollout["lease_s"]


def validate(raw: Mapping[str, Any], source: str, places: Callable[[], Mapping[str, str]] = lambda: {}) -> RunConfig:
    """Plain data -> RunConfig. Raises ConfigError; `places` tells where a dotted key was given, for its message."""
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        given = places()
        lines = [_explain(detail, given) for detail in error.errors()[:_MAX_SHOWN]]
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


def _places(path: Path) -> dict[str, str]:
    """Dotted key -> where it is given: `line 7`, or `base.yaml, line 7` for a layer below."""
    raw, text = _read_yaml(path), path.read_text()
    base = raw.get("base")
    found: dict[str, str] = {}
    for file in base if isinstance(base, list) else [base] if base is not None else []:
        below = path.parent / str(file)
        places = _places(below).items()
        found |= {key: place if place.startswith("-") or "," in place else f"{below}, {place}" for key, place in places}
    return found | {key: f"line {line}" for key, line in key_lines(text).items()}


def key_lines(text: str) -> dict[str, int]:
    """Dotted key -> its line in a YAML text, the first line being 1."""
    return dict(islice(_lines(yaml.compose(text, Loader=yaml.SafeLoader)), _MOST_LINES))


def _lines(node: yaml.Node | None, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, int]]:
    """Every dotted key of a mapping, with its line."""
    for key, value in node.value if isinstance(node, yaml.MappingNode) and depth < _MAX_LAYERS else []:
        dotted = f"{prefix}{key.value}"
        yield dotted, key.start_mark.line + 1
        yield from _lines(value, f"{dotted}.", depth + 1)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"no configuration file {path}. `async-grpo configs` lists the shipped ones") from None
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read as a configuration ({error.strerror}). Name a YAML file, or the folder of a run"
        ) from None
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"{path} is above {_MAX_BYTES} bytes, and no configuration is. Name a YAML file of a run")
    try:
        raw = _parse(data.decode(), _UniqueKeyLoader)
    except ValueError as error:
        said = str(error).replace('"<unicode string>"', str(path))
        raise ConfigError(
            f"{path} is not valid YAML: {said}\nIndent by spaces, the keys of a section alike, and put text with a "
            "colon or a brace in quotes"
        ) from None
    if not isinstance(raw, dict):
        holds = "nothing" if raw is None else f"a {'list' if isinstance(raw, list) else type(raw).__name__}"
        raise ConfigError(
            f"{path} holds {holds}, but a configuration is keys and values (a YAML mapping), such as `steps: 100`. "
            "Start from one of configs/"
        )
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
        raise ConfigError(f"override {override!r} is not of the form KEY=VALUE, such as -o trainer.optimizer.lr=1e-5")
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


def _explain(detail: ErrorDetails, places: Mapping[str, str]) -> str:
    """One problem in one line: key, where it is given, value, rule, fix."""
    key = ".".join(str(part) for part in detail["loc"]) or "(whole file)"
    where = f"{key} ({places[key]})" if key in places else key
    if detail["type"] == "extra_forbidden":
        return f"{where}: there is no such key. {_suggest(detail['loc'], detail['input'])}"
    if detail["type"] == "missing":
        return f"{where}: this key is required and missing. {_example(detail['loc'])}"
    rule = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "value_error":
        return f"{where}: {rule}"
    if section := _section(detail["loc"]) if detail["type"] in ("model_type", "model_attributes_type") else None:
        rule = f"it is a section with the keys {', '.join(section.model_fields)}"
        return f"{where}: {_repr.repr(detail['input'])} does not fit: {rule}. Set one of these, as {key}.KEY"
    return f"{where}: {_repr.repr(detail['input'])} does not fit: {rule}. Change it in the file or pass -o {key}=VALUE"


def _example(loc: tuple[int | str, ...]) -> str:
    key, section = ".".join(map(str, loc)), _section(loc)
    if section is None:
        return f"Add it, or pass -o {key}=VALUE"
    return f"Add this section; its keys are {', '.join(section.model_fields)}"


_ALIASES = {
    "learning_rate": "trainer.optimizer.lr",
    "batch_size": "groups_per_step",
    "num_generations": "group_size",
    "max_steps": "steps",
    "max_new_tokens": "sampling.max_tokens",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "dataset": "data.path",
    "reward": "rewards.functions",
    "gpus": "trainer.processes",
}
"""Words that other trainers use, and the key for each. `async-grpo import-config` reads whole files."""


def _suggest(loc: tuple[int | str, ...], value: Any) -> str:
    """The keys that may be meant: with this ending, of this meaning elsewhere, or spelt alike, here or anywhere."""
    asked = [str(part) for part in loc]
    while isinstance(value, dict) and len(value) == 1:  # `optimizer.lr`: the section is unknown, not only the key
        (part, value), *_ = value.items()
        asked.append(str(part))
    dotted, last = ".".join(asked), asked[-1]
    section, prefix = _section(loc[:-1]) or RunConfig, "".join(f"{part}." for part in loc[:-1])
    here, every = {key: f"{prefix}{key}" for key in section.model_fields}, [*dotted_keys(RunConfig)]
    ending = [key for key in every if key.endswith(f".{dotted}")] or [key for key in every if key.endswith(f".{last}")]
    ending.sort(key=lambda key: key.startswith("model."))  # the first policy is seldom meant
    meant = ([_ALIASES[last]] if last in _ALIASES else []) + ending
    anywhere = {key.rpartition(".")[2]: key for key in reversed(every)}
    found = (
        _spelt(last, here, 0.8)
        or meant[:3]
        or _spelt(last, anywhere, 0.75)
        or _spelt(last, here, 0.6)
        or [f"one of these here: {', '.join(here)}"]
    )
    return f"Did you mean {' or '.join(found)}?"


def _spelt(word: str, keys: Mapping[str, str], alike: float) -> list[str]:
    """The key whose name is most like the word; [] if none is `alike` (0 to 1)."""
    return [keys[name] for name in difflib.get_close_matches(word, keys, n=1, cutoff=alike)]


def _section(loc: tuple[int | str, ...]) -> type[BaseModel] | None:
    """The section at `loc`; None if there is a value."""
    model: type[BaseModel] | None = RunConfig
    for part in loc:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part) if model is not None else None
        model = next(iter(_models_in(field.annotation if field else None)), None)
    return model


def dotted_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key of a configuration, sections included."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        for nested in _models_in(field.annotation):
            yield from dotted_keys(nested, f"{prefix}{name}.")


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """The models that a field may hold: `Model`, `Model | None` or `list[Model]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in getattr(annotation, "__args__", ()) for model in _models_in(argument)]
