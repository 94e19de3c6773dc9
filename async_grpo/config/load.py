"""Loads a YAML file and `-o key=value` overrides into a validated `RunConfig`.

    path --read_raw_config--> raw (plain data, layered over its `base:` files, with overrides) --validate--> RunConfig
    RunConfig --dump--> config.yaml in the run's folder --load--> an equal RunConfig

Every error names the key, where it was set, its value, the rule and the fix. `differing_keys` compares two resolved
configurations.
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
"""Keys for addresses and paths of a machine. They do not influence what the policy learns."""
RESOLVED_CONFIG = "config.yaml"
"""Name of the resolved configuration in the folder of a run."""
_FORMER_LEASE_S = 15.0
"""Former default of rollout.lease_s, which older runs have in their config.yaml. It is below redis.timeout_s."""

_MAX_LAYERS = 8
_MAX_BYTES = 1 << 20
_MAX_PROBLEMS = 20
_MAX_KEYS = 10_000

# YAML aliases can expand a short file to a value of gigabytes, so messages abbreviate values.
_repr = reprlib.Repr()
_repr.maxlevel = 3
_repr.maxstring = 200
_repr.maxother = 200


def differing_keys(before: Any, after: Any, *, ignored: Iterable[str] = MACHINE_SECTIONS) -> list[str]:
    """Return the sorted dotted keys whose values differ between two configurations as plain data.

    >>> differing_keys({"redis": {"url": "a"}, "trainer": {"nodes": 2}}, {"seed": 1, "trainer": {"nodes": 3}})
    ['seed', 'trainer.nodes']
    """
    ignored = tuple(ignored)
    return sorted(key for key in _differences(before, after) if not is_in_sections(key, ignored))


def is_in_sections(key: str, sections: Iterable[str]) -> bool:
    """True if the dotted key is one of `sections` or below one of them."""
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def _differences(before: Any, after: Any, prefix: str = "") -> set[str]:
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return set() if before == after else {prefix.rstrip(".")}

    differing: set[str] = set()
    for key in before.keys() | after.keys():
        differing |= _differences(before.get(key), after.get(key), f"{prefix}{key}.")
    return differing


class _UniqueKeyLoader(yaml.SafeLoader):
    """Safe YAML loader that rejects duplicate keys. Plain YAML silently keeps the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(self.construct_object(key_node, deep=True))
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key!r} is given twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def shipped_configs() -> Path:
    """Folder of the configurations that come with this package."""
    return Path(str(resources.files("async_grpo") / "configs"))


def resolve_config_path(path: Path) -> Path:
    """Return `path` if it exists, or else the shipped configuration of that name.

    The name may be `quickstart`, `quickstart.yaml` or `configs/quickstart.yaml`.
    """
    if path.exists() or path.is_absolute():
        return path
    name = path.relative_to("configs") if path.is_relative_to("configs") else path
    if not name.name:
        return path  # `configs` alone: the caller reports that there is no such file
    if name.suffix not in (".yaml", ".yml"):
        # Not with_suffix: in `qwen2.5_7b` it would replace `.5_7b`.
        name = name.with_name(f"{name.name}.yaml")
    shipped = shipped_configs() / name
    return shipped if shipped.is_file() else path


def load(path: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Load a configuration file with its `base:` files, apply the overrides and validate the result.

    `path` may be a file, the name of a shipped configuration, or the folder of a run, even of an earlier release. The
    runs_dir of a run's folder is always its parent folder, because folders may have been moved.

    Raises ConfigError with all problems: key, value, rule and fix.
    """
    overrides = [*overrides]
    raw, file = read_raw_config(path, overrides)

    def locate_keys_and_overrides() -> dict[str, str]:
        locations = locate_keys(file)
        for override in overrides:
            locations[override.partition("=")[0]] = "-o"
        return locations

    return validate(raw, str(file), locate_keys_and_overrides)


def read_raw_config(path: Path, overrides: Iterable[str] = ()) -> tuple[dict[str, Any], Path]:
    """Return the data that `load` validates, without defaults, and the file that it comes from. Raises ConfigError."""
    if (path / RESOLVED_CONFIG).is_file():
        folder = path
        path = folder / RESOLVED_CONFIG
        raw = _read_layers(path) | {"runs_dir": str(folder.absolute().parent)}
        remove_former_values(raw)
    else:
        path = resolve_config_path(path)
        raw = _read_layers(path)
    for override in overrides:
        _apply_override(raw, override)
    return raw, path


def remove_former_values(raw: dict[str, Any]) -> None:
    """Remove defaults from a resolved configuration that an earlier release wrote and this one would reject."""
    rollout = raw.get("rollout")
    if isinstance(rollout, dict) and rollout.get("lease_s") == _FORMER_LEASE_S:
        del rollout["lease_s"]


def validate(
    raw: Mapping[str, Any], source: str, locate_keys: Callable[[], Mapping[str, str]] | None = None
) -> RunConfig:
    """Validate plain data. Raises ConfigError with all problems.

    `source` names the data in the error. `locate_keys` returns where each dotted key was set; it is called only for an
    error, because it parses the files again.
    """
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        locations = locate_keys() if locate_keys is not None else {}
        lines = [_explain(detail, locations) for detail in error.errors()[:_MAX_PROBLEMS]]
        omitted = error.error_count() - _MAX_PROBLEMS
        if omitted > 0:
            lines.append(f"and {omitted} more")
        raise ConfigError(f"{source} cannot be used:\n" + "\n".join(f"  - {line}" for line in lines)) from None


def dump(config: RunConfig) -> str:
    """Return the resolved configuration as YAML. `load` reads it back to an equal RunConfig."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _read_layers(path: Path, depth: int = 0) -> dict[str, Any]:
    """Return the file's mapping merged over its `base:`, a file or a list of files. Later files take precedence."""
    if depth > _MAX_LAYERS:
        raise ConfigError(f"{path}: more than {_MAX_LAYERS} layers of `base:`. Does a file name itself as its base?")
    raw = _read_yaml(path)
    merged: dict[str, Any] = {}
    for base in _base_files(path, raw.pop("base", None)):
        merged = _merge(merged, _read_layers(base, depth + 1))
    return _merge(merged, raw)


def _base_files(path: Path, base: Any) -> list[Path]:
    """Files of a `base:` entry, relative to the folder of the file that contains it."""
    if base is None:
        return []
    names = base if isinstance(base, list) else [base]
    return [path.parent / str(name) for name in names]


def locate_keys(path: Path) -> dict[str, str]:
    """Return where each dotted key is set: `line 7`, or `base.yaml, line 7` for a base file."""
    raw = _read_yaml(path)
    locations: dict[str, str] = {}
    for base in _base_files(path, raw.get("base")):
        for key, location in locate_keys(base).items():
            is_own_line = "," not in location
            locations[key] = f"{base}, {location}" if is_own_line else location
    for key, line in find_key_lines(path.read_text()).items():
        locations[key] = f"line {line}"
    return locations


def find_key_lines(text: str) -> dict[str, int]:
    """Return the line number of each dotted key in a YAML text, counted from 1."""
    return dict(islice(_walk_keys(yaml.compose(text, Loader=yaml.SafeLoader)), _MAX_KEYS))


def _walk_keys(node: yaml.Node | None, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, int]]:
    """Yield every dotted key of a mapping with its line number."""
    if not isinstance(node, yaml.MappingNode) or depth >= _MAX_LAYERS:
        return
    for key, value in node.value:
        dotted = f"{prefix}{key.value}"
        yield dotted, key.start_mark.line + 1
        yield from _walk_keys(value, f"{dotted}.", depth + 1)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        shipped = [file.stem for file in shipped_configs().glob("*.yaml")]
        similar = difflib.get_close_matches(path.stem, shipped, n=1, cutoff=0.75)
        suggestion = f"Did you mean {similar[0]}? " if similar else ""
        raise ConfigError(
            f"there is no configuration {path}. {suggestion}`async-grpo configs` lists the shipped ones"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read as a configuration ({error.strerror}). Name a YAML file, or the folder of a run"
        ) from None
    if len(data) > _MAX_BYTES:
        raise ConfigError(
            f"{path} is larger than {_MAX_BYTES} bytes, so it is not a configuration. Name the YAML file of a run"
        )

    try:
        raw = _parse(data.decode(), _UniqueKeyLoader)
    except ValueError as error:
        reason = str(error).replace('"<unicode string>"', str(path))
        raise ConfigError(
            f"{path} is not valid YAML: {reason}\nIndent with spaces, indent all keys of a section equally, and quote "
            "text that contains a colon or a brace"
        ) from None

    if not isinstance(raw, dict):
        if raw is None:
            content = "nothing"
        elif isinstance(raw, list):
            content = "a list"
        else:
            content = f"a {type(raw).__name__}"
        raise ConfigError(
            f"{path} contains {content}, but a configuration consists of keys and values (a YAML mapping), such as "
            "`steps: 100`. Start from one of the shipped ones (`async-grpo configs`)"
        )
    return raw


def _parse(text: str, loader: type[yaml.SafeLoader]) -> Any:
    """Parse YAML. Raises ValueError for every kind of error, including nesting beyond Python's recursion limit."""
    try:
        return yaml.load(text, Loader=loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("it is nested too deeply for a configuration") from None


def _merge(base: dict[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            merged[key] = _merge(below, value)
        else:
            merged[key] = value
    return merged


def _apply_override(raw: dict[str, Any], override: str) -> None:
    """Set `a.b.c=value`, where the value is YAML. Missing sections are created."""
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


def _explain(detail: ErrorDetails, locations: Mapping[str, str]) -> str:
    """Return one problem as one line: key, where it is set, value, rule, fix."""
    loc = detail["loc"]
    key = ".".join(str(part) for part in loc) or "(whole file)"
    subject = f"{key} ({locations[key]})" if key in locations else key

    if detail["type"] == "extra_forbidden":
        return f"{subject}: there is no such key. {_suggest_keys(loc, detail['input'])}"
    if detail["type"] == "missing":
        return f"{subject}: this key is required and missing. {_explain_missing(loc)}"
    rule = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "value_error":
        return f"{subject}: {rule}"

    value = _repr.repr(detail["input"])
    section = section_at(loc)
    if detail["type"] in ("model_type", "model_attributes_type") and section is not None:
        keys = ", ".join(section.model_fields)
        return f"{subject}: {value} is not valid: it is a section with the keys {keys}. Set one of these, as {key}.KEY"
    return f"{subject}: {value} is not valid: {rule}. Change it in the file or pass -o {key}=VALUE"


def _explain_missing(loc: tuple[int | str, ...]) -> str:
    section = section_at(loc)
    if section is None:
        return f"Add it, or pass -o {'.'.join(map(str, loc))}=VALUE"
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
"""Keys of other trainers and their equivalents. `async-grpo import-config` translates whole files."""


def _suggest_keys(loc: tuple[int | str, ...], value: Any) -> str:
    """Return "Did you mean ...?" with the keys that an unknown key may stand for.

    Candidates in this order: a very similar spelling in the same section, another trainer's name or the same ending
    elsewhere, a similar spelling anywhere, a roughly similar spelling in the same section, all keys of the section.
    """
    parts = [str(part) for part in loc]
    # With `optimizer.lr`, pydantic reports the unknown section `optimizer` and its value {lr: ...}. Append the rest of
    # the key to search for `optimizer.lr`.
    while isinstance(value, dict) and len(value) == 1:
        [(part, value)] = value.items()
        parts.append(str(part))
    dotted = ".".join(parts)
    last = parts[-1]

    section = section_at(loc[:-1]) or RunConfig
    prefix = "".join(f"{part}." for part in loc[:-1])
    in_section = {key: f"{prefix}{key}" for key in section.model_fields}
    all_keys = [*dotted_keys(RunConfig)]
    anywhere = {key.rpartition(".")[2]: key for key in reversed(all_keys)}

    same_ending = [key for key in all_keys if key.endswith(f".{dotted}")]
    if not same_ending:
        same_ending = [key for key in all_keys if key.endswith(f".{last}")]
    same_ending.sort(key=lambda key: key.startswith("model."))  # settings of the warm-up are rarely meant, so last
    if last in _ALIASES:
        same_ending.insert(0, _ALIASES[last])

    suggestions = (
        _most_similar(last, in_section, cutoff=0.8)
        or same_ending[:3]
        or _most_similar(last, anywhere, cutoff=0.75)
        or _most_similar(last, in_section, cutoff=0.6)
        or [f"one of these here: {', '.join(in_section)}"]
    )
    return f"Did you mean {' or '.join(suggestions)}?"


def _most_similar(word: str, keys: Mapping[str, str], cutoff: float) -> list[str]:
    """Dotted key of the most similar name; empty if none has a similarity of `cutoff` (0 to 1)."""
    return [keys[name] for name in difflib.get_close_matches(word, keys, n=1, cutoff=cutoff)]


def section_at(loc: tuple[int | str, ...]) -> type[BaseModel] | None:
    """Model of the section at `loc`; None for a value or an unknown key."""
    model: type[BaseModel] | None = RunConfig
    for part in loc:
        if isinstance(part, int):
            continue  # an index into a list of sections
        field = model.model_fields.get(part) if model is not None else None
        models = models_in(field.annotation) if field is not None else []
        model = models[0] if models else None
    return model


def dotted_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of a configuration, including sections."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        for nested in models_in(field.annotation):
            yield from dotted_keys(nested, f"{prefix}{name}.")


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Sections that a field may contain: `Model`, `Model | None` or `list[Model]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in getattr(annotation, "__args__", ()) for model in models_in(argument)]
