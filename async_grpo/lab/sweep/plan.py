"""The points of a sweep: those that it had, and those that `--grid` and `--seeds` ask for. Pure but for `Resolve`.

    known points  --resolved again-->  as they were?  --no-->  refused: another base configuration
    grid x seeds  --resolved-------->  allowed?       --no-->  refused: which point, and why

Nothing is started before every point is known to be allowed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from async_grpo.app.launch.run_folder import RunFolder, changed_keys, run_name
from async_grpo.config import RunConfig
from async_grpo.errors import ConfigError

_NAME_LENGTH = 64
_SHOWN_REFUSALS = 10
_OPENING, _CLOSING, _QUOTES = "[{(", "]})", "'\""
_RESERVED = {
    "seed": "Give one seed with --seed N",
    "name": "It changes nothing that is predicted. Leave it out",
    "runs_dir": "It changes nothing that is predicted. Leave it out",
}
"""Keys that no command varies on an axis -> what to do, for commands that start no runs."""
_RESERVED_IN_SWEEPS = {
    "seed": "Give the seeds with --seeds 1,2,3",
    "name": "A sweep names its runs itself; -o name=... names the sweep",
    "runs_dir": "A sweep keeps its runs in its own folder; set it with --out",
}

Resolve = Callable[[Sequence[str]], RunConfig]
"""Overrides -> the sweep's configuration file with them, checked as a run. Raises ConfigError."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One key of the configuration and the values to try, as they were typed."""

    key: str
    values: tuple[str, ...]


def parse_axis(text: str, option: str = "--grid", reserved: Mapping[str, str] = _RESERVED) -> Axis:
    """The axis of one `--grid key=a,b,c`, or of another option of that form; a comma inside brackets or quotes belongs
    to its value. `reserved`: keys that cannot be varied, and what to do.

    Raises ConfigError for another form, a reserved key or a repeated value.

    >>> parse_axis("trainer.objective.corrections=[],[geo_rs, opsm]").values
    ('[]', '[geo_rs, opsm]')
    """
    key, equals, values = text.partition("=")
    key, parts = key.strip(), split_values(values)
    if not equals or not key or not all(parts):
        raise ConfigError(f"{option} {text!r} is not of the form key=value,value,... such as max_staleness=0,1,2,4")
    if key in reserved:
        raise ConfigError(f"{option} {text!r}: {key} cannot be an axis. {reserved[key]}")
    twice = [value for value in parts if parts.count(value) > 1]
    if twice:
        raise ConfigError(f"{option} {text!r}: the value {twice[0]} stands twice. Remove one")
    return Axis(key, tuple(parts))


def parse_axes(texts: Sequence[str], overrides: Sequence[str]) -> list[Axis]:
    """The axes of all `--grid` options. Raises ConfigError if there are none or one is wrong, and for a key that stands
    twice or in `-o` as well."""
    axes = [parse_axis(text, reserved=_RESERVED_IN_SWEEPS) for text in texts]
    if not axes:
        raise ConfigError(
            "a sweep needs something to vary: --grid key=value,value,... such as --grid max_staleness=0,2"
        )
    keys = [axis.key for axis in axes]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"--grid {key}=... stands twice. Give all values of {key} in one --grid")
        if key in [override.partition("=")[0] for override in overrides]:
            raise ConfigError(f"{key} is both in --grid and in -o. Remove one of them")
    return axes


def parse_seeds(text: str) -> tuple[int, ...]:
    """The seeds of `--seeds 1,2,3`. Raises ConfigError for anything but distinct whole numbers."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ConfigError(f"--seeds {text!r} is not a list of whole numbers such as 1,2,3")
    seeds = [int(part) for part in parts]
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds {text!r} names a seed twice: the same run would be made twice. Remove one")
    return tuple(seeds)


def combinations(axes: Sequence[Axis]) -> list[dict[str, str]]:
    """Every choice of one value per axis, the last axis varying fastest; one empty choice if there are no axes."""
    keys = [axis.key for axis in axes]
    return [dict(zip(keys, values, strict=True)) for values in product(*(axis.values for axis in axes))]


def split_values(text: str) -> list[str]:
    """Split `text` at the commas outside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in _QUOTES:
            quote = character
        elif character in _OPENING:
            depth += 1
        elif character in _CLOSING:
            depth -= 1
        if character == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


@dataclass(frozen=True, slots=True)
class Point:
    """One run: a choice of one value per axis, with a seed."""

    values: Mapping[str, str]
    """Key -> value, as typed."""
    config: RunConfig

    @property
    def name(self) -> str:
        """Name of the run and of its folder."""
        return self.config.name

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return self.config.seed

    @property
    def is_finished(self) -> bool:
        """Whether the run was trained, evaluated and reported to its last step."""
        return RunFolder(self.config.run_dir).read_state().finished_steps >= self.config.steps

    def __str__(self) -> str:
        return ", ".join([*assignments(self.values), f"seed={self.seed}"])


@dataclass(frozen=True, slots=True)
class SweepRequest:
    """The points that a command asks for."""

    name: str
    """Beginning of every run's name."""
    overrides: Sequence[str]
    axes: Sequence[Axis]
    seeds: Sequence[int]
    runs_dir: Path


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """All points of a sweep, and the names of those that are asked for now."""

    points: Sequence[Point]
    asked: frozenset[str]


def lay_out(request: SweepRequest, known: Sequence[Point], resolve: Resolve) -> SweepPlan:
    """The plan with the points that the sweep had (`known`, as they were resolved then) and those of the grid.

    Raises ConfigError if a known point would be another run now, if a new one is refused, or if two are the same run.
    """
    known = [_again(point, request, resolve) for point in known]
    taken = {point.name for point in known}
    asked: list[Point] = []
    refusals: dict[str, int] = {}  # in order, each once over all seeds
    for values, seed in product(combinations(request.axes), request.seeds):
        try:
            name = point_name(request.name, values, seed, taken)
            point = Point(values, resolve(_overrides(request, values, seed, name)))
        except ConfigError as error:
            refusals.setdefault(f"{', '.join(assignments(values))}: {error}", seed)
            continue
        point = next((one for one in known if _identity(one) == _identity(point)), point)
        taken.add(point.name)
        asked.append(point)
    if refusals:
        raise ConfigError(_refused(list(refusals), len(combinations(request.axes))))
    _check_distinct(asked)
    names = frozenset(point.name for point in asked)
    return SweepPlan([*(point for point in known if point.name not in names), *asked], names)


def point_name(base: str, values: Mapping[str, str], seed: int, taken: Collection[str] = ()) -> str:
    """The name of a point's run: readable, and with a digest if the readable name is too long or taken.

    >>> point_name("quickstart", {"max_staleness": "4"}, 2)
    'quickstart-max_staleness.4-seed.2'
    """
    name = run_name(base, [*assignments(values), f"seed={seed}"])
    if len(name) < _NAME_LENGTH and name not in taken:
        return name
    identity = json.dumps([base, dict(values), seed], sort_keys=True)
    return f"{name[: _NAME_LENGTH - 9]}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"


def assignments(values: Mapping[str, str]) -> list[str]:
    """The values as overrides: `key=value`."""
    return [f"{key}={value}" for key, value in values.items()]


def _overrides(request: SweepRequest, values: Mapping[str, str], seed: int, name: str) -> list[str]:
    """The overrides of a point; those of the sweep itself come last and win."""
    own = [f"seed={seed}", f"name={name}", f"runs_dir={json.dumps(str(request.runs_dir))}"]
    return [*request.overrides, *assignments(values), *own]


def _again(point: Point, request: SweepRequest, resolve: Resolve) -> Point:
    """The point resolved again. Where and how it runs may have changed, nothing else: it is part of the comparison."""
    now = resolve(_overrides(request, point.values, point.seed, point.name))
    changed = changed_keys(_plain(point.config), _plain(now))
    if changed:
        raise ConfigError(
            f"{request.runs_dir.parent} holds a sweep of another base configuration: {', '.join(changed)} would differ "
            f"for its point {point}. Points of two configurations do not compare. Restore the configuration, or give "
            "this sweep a folder of its own (--out)"
        )
    return replace(point, config=now)


def _check_distinct(points: Sequence[Point]) -> None:
    first: dict[str, Point] = {}
    for point in points:
        twin = first.setdefault(_identity(point), point)
        if twin is not point:
            raise ConfigError(f"the points {twin} and {point} are the same run. Remove one of the values")


def _identity(point: Point) -> str:
    """The configuration without name and folder, as text: equal for two points that are the same run."""
    plain = _plain(point.config)
    return json.dumps({key: value for key, value in plain.items() if key not in ("name", "runs_dir")}, sort_keys=True)


def _plain(config: RunConfig) -> dict[str, Any]:
    return config.model_dump(mode="json")


def _refused(refusals: Sequence[str], total: int) -> str:
    shown = ["  - " + refusal.replace("\n", "\n  ") for refusal in refusals[:_SHOWN_REFUSALS]]
    if len(refusals) > len(shown):
        shown.append(f"  - and {len(refusals) - len(shown)} more")
    head = f"{len(refusals)} of the {total} combinations cannot be run, so nothing is started:"
    return "\n".join([head, *shown, "Take these values out of the grid"])
