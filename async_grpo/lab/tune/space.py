"""The search space of `async-grpo tune`: axes of a few choices, each a few overrides of the configuration.

    max_staleness             0, 1, 2, 4, 8, 16
    rollout.max_concurrency   from a quarter to twice the present number
    buffer.selector           fifo, and windowed_fifo with a few W, if the present one is one of these
    rollout.interruption      the present one, and keep
    split                     rollout.servers and trainer.processes, which divide all devices of the present
                              configuration, if both sides have separate devices on one machine
    --vary KEY=A,B,C          any other key whose effect can be simulated

Keys that change the training data are varied only on request: groups_per_step and sampling.max_tokens change the batch;
over-sampling and the selectors that choose by age or at random prefer short completions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from async_grpo.config import RunConfig
from async_grpo.config.trainer import VLLM_PLATFORMS
from async_grpo.errors import ConfigError
from async_grpo.lab.sweep.plan import parse_axis
from async_grpo.lab.sweep.settings import format_values, sort_values

STALENESS = (0, 1, 2, 4, 8, 16)
MIN_WINDOWS = 4
"""Minimum number of windows of S + 1 steps per run. In a shorter run most steps train its head start."""
SLOT_FACTORS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
SELECTOR = "buffer.selector"
SPLIT = "split"
SIMULATED_KEYS = frozenset(
    {
        "max_staleness",
        "groups_per_step",
        "group_size",
        "sampling.max_tokens",
        "trainer.streaming",
        "trainer.checkpoint.every_steps",
        "eval.every_steps",
        "buffer.selector.kind",
        "buffer.selector.window",
        "buffer.on_stale",
        "buffer.max_uses",
        "buffer.admission.kind",
        "buffer.admission.min_size",
        "buffer.admission.samples_per_insert",
        "rollout.max_concurrency",
        "rollout.min_concurrency",
        "rollout.servers",
        "rollout.oversample",
        "rollout.interruption",
        "rollout.max_interruptions",
    }
)
"""Keys whose effect on speed and ages a simulation covers."""
CHANGES_DATA = {
    "groups_per_step": "the batch changes, so the learning rate may have to change",
    "group_size": "advantages are computed over other groups",
    "sampling.max_tokens": "longer completions are cut",
    "rollout.oversample": "long completions are trained less often",
    "buffer.max_uses": "groups are trained another number of times",
    "buffer.selector.kind": "another selector may prefer short completions",
    "buffer.on_stale": "other tokens are trained",
}
"""Keys that change the training data, and how."""

Overrides = Mapping[str, str]
"""Configuration key -> value, as typed."""


@dataclass(frozen=True, slots=True)
class TuningAxis:
    """A dimension of the search. The first choice is the present configuration."""

    name: str
    choices: tuple[Overrides, ...]

    @property
    def keys(self) -> set[str]:
        """The configuration keys that it sets."""
        return {key for choice in self.choices for key in choice}


def build_axes(config: RunConfig, vary: Sequence[str], fix: Sequence[str]) -> list[TuningAxis]:
    """Build the axes for a configuration, --vary and --fix.

    Raises ConfigError for an invalid option, and if nothing is left to vary.
    """
    requested = [_parse_vary(config, text) for text in vary]
    requested_keys = {key for axis in requested for key in axis.keys}
    defaults = [axis for axis in _default_axes(config) if not axis.keys & requested_keys]

    for key in fix:
        if not any(key == axis.name or key in axis.keys for axis in defaults):
            names = ", ".join(axis.name for axis in defaults)
            raise ConfigError(f"--fix {key}: that is not varied. Varied by default are {names or 'no keys'}")

    axes = [axis for axis in defaults if axis.name not in fix and not axis.keys & set(fix)]
    axes = [axis for axis in [*axes, *requested] if len(axis.choices) > 1]
    if not axes:
        raise ConfigError("nothing is left to vary. Remove a --fix, or add a key with --vary KEY=A,B,C")
    return axes


def merge_choices(choices: Sequence[Overrides]) -> dict[str, str]:
    """Merge the overrides of one choice per axis."""
    return {key: value for choice in choices for key, value in choice.items()}


def _default_axes(config: RunConfig) -> Iterator[TuningAxis]:
    present_staleness = config.max_staleness
    max_staleness = max(present_staleness, config.steps // MIN_WINDOWS - 1)
    yield _number_axis("max_staleness", present_staleness, [value for value in STALENESS if value <= max_staleness])

    present_slots = config.rollout.max_concurrency
    slots = {max(1, round(present_slots * factor)) for factor in SLOT_FACTORS}
    yield _number_axis("rollout.max_concurrency", present_slots, slots)

    if config.buffer.selector.kind in ("fifo", "windowed_fifo"):
        windows = [config.groups_per_step * factor // 2 for factor in (1, 2, 4)]
        yield _selector_axis(config, [1, *windows])

    modes = dict.fromkeys([config.rollout.interruption, "keep"])
    yield TuningAxis("rollout.interruption", tuple({"rollout.interruption": mode} for mode in modes))

    splits = tuple(_device_splits(config))
    if splits:
        yield TuningAxis(SPLIT, splits)


def _number_axis(key: str, present: int, values: Collection[int]) -> TuningAxis:
    others = sorted(set(values) - {present})
    return TuningAxis(key, tuple({key: str(value)} for value in [present, *others]))


def _selector_axis(config: RunConfig, windows: Sequence[int]) -> TuningAxis:
    """Axis of fifo (a window of 1) and windowed_fifo, the present one first."""
    selector = config.buffer.selector
    present = selector.window if selector.kind == "windowed_fifo" else 1
    unique_windows = dict.fromkeys([present, *windows])
    return TuningAxis(SELECTOR, tuple(_selector_choice(window) for window in unique_windows if window))


def _selector_choice(window: int) -> Overrides:
    kind = "fifo" if window == 1 else "windowed_fifo"
    return {f"{SELECTOR}.kind": kind, f"{SELECTOR}.window": str(window)}


def _device_splits(config: RunConfig) -> Iterator[Overrides]:
    """Yield the ways to divide the devices of one machine between servers and trainer, the present one first."""
    trainer = config.trainer
    engine = config.rollout.limits
    if "cpu" in (trainer.platform, engine.platform) or trainer.nodes > 1 or config.launch.share_devices != "off":
        return
    if VLLM_PLATFORMS[trainer.platform] != engine.platform:
        return

    ranks_per_replica = trainer.tensor_parallel * trainer.pipeline_parallel * trainer.context_parallel
    devices = trainer.processes + config.rollout.servers * engine.devices
    ranks = [trainer.processes]
    for candidate in range(ranks_per_replica, devices, ranks_per_replica):
        if (devices - candidate) % engine.devices == 0:
            ranks.append(candidate)
    for count in dict.fromkeys(ranks):
        yield {"rollout.servers": str((devices - count) // engine.devices), "trainer.processes": str(count)}


def _parse_vary(config: RunConfig, text: str) -> TuningAxis:
    """Parse one --vary KEY=A,B,C. The present value is always among the choices."""
    axis = parse_axis(text, "--vary")
    if axis.key == SELECTOR:
        return _selector_axis(config, [_parse_window(value) for value in axis.values])
    if axis.key not in SIMULATED_KEYS:
        raise ConfigError(
            f"--vary {axis.key}: its effect on speed and ages cannot be simulated. Keys that can be: {SELECTOR}, "
            f"{', '.join(sorted(SIMULATED_KEYS))}. Compare other keys by real runs: async-grpo sweep --grid"
        )
    present = format_values(config.model_dump(mode="json"), [axis.key])[axis.key]
    others = sort_values([value for value in axis.values if value != present])
    return TuningAxis(axis.key, tuple({axis.key: value} for value in [present, *others]))


def _parse_window(value: str) -> int:
    """Parse W of `fifo` or `windowed_fifo:W`."""
    kind, _, window = value.partition(":")
    if kind == "fifo" and not window:
        return 1
    if kind == "windowed_fifo" and window.isdecimal() and int(window) > 1:
        return int(window)
    raise ConfigError(
        f"--vary {SELECTOR}: {value!r} is neither fifo nor windowed_fifo:W with a W above 1, such as windowed_fifo:8. "
        f"Vary other selectors with --vary {SELECTOR}.kind=fifo,freshest"
    )
