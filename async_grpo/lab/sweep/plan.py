"""The points of a sweep: the existing ones, and those requested by `--grid` and `--seeds`. Pure except for `Resolve`.

    existing points --resolved again--> unchanged? --no--> rejected: another base configuration
    grid x seeds    --resolved--------> allowed?   --no--> rejected: which point, and why

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
_DIGEST_LENGTH = 8
_MAX_SHOWN_REJECTIONS = 10
_OPENING_BRACKETS = "[{("
_CLOSING_BRACKETS = "]})"
_QUOTES = "'\""
_RESERVED = {
    "seed": "Give one seed with --seed N",
    "name": "It changes nothing that is predicted. Leave it out",
    "runs_dir": "It changes nothing that is predicted. Leave it out",
}
"""Keys that no command varies on an axis -> what to do, for commands that start no runs."""
_RESERVED_IN_SWEEPS = {
    "seed": "Give the seeds with --seeds 1,2,3",
    "name": "A sweep names its runs itself; -o name=... names the sweep",
    "runs_dir": "A sweep keeps its runs in its folder; set it with --out",
}

Resolve = Callable[[Sequence[str]], RunConfig]
"""Overrides -> the sweep's configuration file with them, checked as a run. Raises ConfigError."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One key of the configuration and the values to try, as typed."""

    key: str
    values: tuple[str, ...]


def parse_axis(text: str, option: str = "--grid", reserved: Mapping[str, str] = _RESERVED) -> Axis:
    """Return the axis of one `key=a,b,c` option; a comma inside brackets or quotes belongs to its value.

    `reserved` maps keys that cannot be varied to what to do instead. Raises ConfigError for another form, a reserved
    key or a repeated value.

    >>> parse_axis("trainer.objective.corrections=[],[geo_rs, opsm]").values
    ('[]', '[geo_rs, opsm]')
    """
    key, equals, text_after = text.partition("=")
    key = key.strip()
    values = split_values(text_after)
    if not equals or not key or not all(values):
        raise ConfigError(f"{option} {text!r} is not of the form key=value,value,... such as max_staleness=0,1,2,4")
    if key in reserved:
        raise ConfigError(f"{option} {text!r}: {key} cannot be an axis. {reserved[key]}")
    repeated = [value for value in values if values.count(value) > 1]
    if repeated:
        raise ConfigError(f"{option} {text!r}: the value {repeated[0]} appears twice. Remove one")
    return Axis(key, tuple(values))


def parse_axes(texts: Sequence[str], overrides: Sequence[str]) -> list[Axis]:
    """Return the axes of all `--grid` options.

    Raises ConfigError if there are none, if one is wrong, or if a key appears twice or also in `-o`.
    """
    axes = [parse_axis(text, reserved=_RESERVED_IN_SWEEPS) for text in texts]
    if not axes:
        raise ConfigError(
            "a sweep needs something to vary: --grid key=value,value,... such as --grid max_staleness=0,2"
        )
    keys = [axis.key for axis in axes]
    overridden = {override.partition("=")[0] for override in overrides}
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"--grid {key}=... appears twice. Give all values of {key} in one --grid")
        if key in overridden:
            raise ConfigError(f"{key} is both in --grid and in -o. Remove one of them")
    return axes


def parse_seeds(text: str) -> tuple[int, ...]:
    """Return the seeds of `--seeds 1,2,3`. Raises ConfigError unless they are distinct whole numbers."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ConfigError(f"--seeds {text!r} is not a list of whole numbers such as 1,2,3")
    seeds = [int(part) for part in parts]
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds {text!r} names a seed twice, which would repeat the same run. Remove one")
    return tuple(seeds)


def combinations(axes: Sequence[Axis]) -> list[dict[str, str]]:
    """Return every choice of one value per axis, the last axis varying fastest; one empty choice without axes."""
    keys = [axis.key for axis in axes]
    return [dict(zip(keys, values, strict=True)) for values in product(*(axis.values for axis in axes))]


def split_values(text: str) -> list[str]:
    """Split `text` at the commas outside brackets and quotes."""
    parts = [""]
    depth = 0
    quote = ""
    for character in text:
        if quote:
            if character == quote:
                quote = ""
        elif character in _QUOTES:
            quote = character
        elif character in _OPENING_BRACKETS:
            depth += 1
        elif character in _CLOSING_BRACKETS:
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
        """True if the run was trained, evaluated and reported to its last step."""
        return RunFolder(self.config.run_dir).read_state().finished_steps >= self.config.steps

    def __str__(self) -> str:
        return ", ".join([*assignments(self.values), f"seed={self.seed}"])


@dataclass(frozen=True, slots=True)
class SweepRequest:
    """The points that a command requests."""

    base_name: str
    """Name of the configuration, without overrides."""
    overrides: Sequence[str]
    axes: Sequence[Axis]
    seeds: Sequence[int]
    runs_dir: Path


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """All points of a sweep, and the names of those that are requested now."""

    points: Sequence[Point]
    requested: frozenset[str]


def plan_points(request: SweepRequest, existing: Sequence[Point], resolve: Resolve) -> SweepPlan:
    """Return the plan with the existing points of the sweep and those of the grid.

    Raises ConfigError if an existing point would now be another run, if a new one is not allowed, or if two are the
    same run.
    """
    existing = [_resolve_again(point, request, resolve) for point in existing]
    point_by_identity = {_identity(point): point for point in reversed(existing)}
    taken_names = {point.name for point in existing}

    requested: list[Point] = []
    rejections: dict[str, int] = {}  # in order, without repeating them for each seed
    for values, seed in product(combinations(request.axes), request.seeds):
        try:
            name = point_name(request.base_name, values, seed, taken_names, overrides=request.overrides)
            point = Point(values, resolve(_overrides(request, values, seed, name)))
        except ConfigError as error:
            rejections.setdefault(f"{', '.join(assignments(values))}: {error}", seed)
            continue

        # The same run under another name, for example if a new axis has the default as one of its values.
        point = point_by_identity.get(_identity(point), point)
        taken_names.add(point.name)
        requested.append(point)

    if rejections:
        raise ConfigError(_describe_rejections(list(rejections), len(combinations(request.axes))))
    _check_distinct(requested)
    names = frozenset(point.name for point in requested)
    others = [point for point in existing if point.name not in names]
    return SweepPlan([*others, *requested], names)


def point_name(
    base: str,
    values: Mapping[str, str],
    seed: int,
    taken: Collection[str] = (),
    *,
    overrides: Sequence[str] = (),
) -> str:
    """Return the name of a point's run: base, overrides of the whole sweep, values and seed of the point.

    If that is too long or taken, a digest replaces the overrides: the values are what tells the points apart.

    >>> point_name("quickstart", {"max_staleness": "4"}, 2, overrides=["steps=60"])
    'quickstart-steps.60-max_staleness.4-seed.2'
    """
    sweep_name = run_name(base, overrides)
    own_values = [*assignments(values), f"seed={seed}"]
    name = run_name(sweep_name, own_values)
    if len(name) < _NAME_LENGTH and name not in taken:
        return name

    identity = json.dumps([sweep_name, dict(values), seed], sort_keys=True)
    digest = hashlib.sha256(identity.encode()).hexdigest()[:_DIGEST_LENGTH]
    short_name = run_name(base, own_values)
    return f"{short_name[: _NAME_LENGTH - _DIGEST_LENGTH - 1]}-{digest}"


def assignments(values: Mapping[str, str]) -> list[str]:
    """Return the values as overrides: `key=value`."""
    return [f"{key}={value}" for key, value in values.items()]


def _overrides(request: SweepRequest, values: Mapping[str, str], seed: int, name: str) -> list[str]:
    """Return the overrides of a point. Those of the sweep itself come last and win."""
    runs_dir = json.dumps(str(request.runs_dir))
    return [
        *request.overrides,
        *assignments(values),
        f"seed={seed}",
        f"name={name}",
        f"runs_dir={runs_dir}",
    ]


def _resolve_again(point: Point, request: SweepRequest, resolve: Resolve) -> Point:
    """Resolve an existing point with the present configuration.

    Raises ConfigError if more than where and how it runs has changed: its result would not be comparable.
    """
    config = resolve(_overrides(request, point.values, point.seed, point.name))
    changed = changed_keys(_plain_dict(point.config), _plain_dict(config))
    if changed:
        raise ConfigError(
            f"{request.runs_dir.parent} has a sweep of another base configuration: {', '.join(changed)} would differ "
            f"for its point {point}. Points of two configurations are not comparable. Restore the configuration, or "
            "give this sweep another folder (--out)"
        )
    return replace(point, config=config)


def _check_distinct(points: Sequence[Point]) -> None:
    point_by_identity: dict[str, Point] = {}
    for point in points:
        twin = point_by_identity.setdefault(_identity(point), point)
        if twin is not point:
            raise ConfigError(f"the points {twin} and {point} are the same run. Remove one of the values")


def _identity(point: Point) -> str:
    """Return the configuration without name and folder, as text: equal for two points that are the same run."""
    config = _plain_dict(point.config)
    return json.dumps({key: value for key, value in config.items() if key not in ("name", "runs_dir")}, sort_keys=True)


def _plain_dict(config: RunConfig) -> dict[str, Any]:
    return config.model_dump(mode="json")


def _describe_rejections(rejections: Sequence[str], total: int) -> str:
    shown = ["  - " + rejection.replace("\n", "\n  ") for rejection in rejections[:_MAX_SHOWN_REJECTIONS]]
    if len(rejections) > len(shown):
        shown.append(f"  - and {len(rejections) - len(shown)} more")
    head = f"{len(rejections)} of the {total} combinations cannot be run, so nothing is started:"
    return "\n".join([head, *shown, "Remove these values from the grid"])
