"""What `async-grpo tune` varies: axes, each a few choices, and a choice a few overrides of the configuration.

    max_staleness             0, 1, 2, 4, 8, 16
    rollout.max_concurrency   a quarter of the present number to twice as many
    buffer.selector           fifo, and windowed_fifo for a few W, if the present one is one of these
    rollout.interruption      the present one, and keep
    split                     rollout.servers and trainer.processes, which share out all devices of the present
                              configuration; where each side has devices of its own on one machine
    --vary KEY=A,B,C          any other key whose effect a simulation knows

What changes the training data is varied only when it is asked for: groups_per_step and sampling.max_tokens change the
batch, over-sampling prefers short completions, and so do the selectors that choose by age or by chance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from async_grpo.config import RunConfig
from async_grpo.config.trainer import VLLM_PLATFORMS
from async_grpo.errors import ConfigError
from async_grpo.lab.sweep.plan import parse_axis
from async_grpo.lab.sweep.settings import format_values, sort_values

STALENESS = (0, 1, 2, 4, 8, 16)
LEAST_WINDOWS = 4
"""Windows of S + 1 steps that a run must have: with fewer, most of what it trains is its head start."""
SLOT_FACTORS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
SELECTOR, SPLIT = "buffer.selector", "split"
SIMULATED = frozenset(
    {
        *("max_staleness", "groups_per_step", "group_size", "sampling.max_tokens", "trainer.streaming"),
        *("buffer.selector.kind", "buffer.selector.window", "buffer.on_stale", "buffer.max_uses"),
        *("buffer.admission.kind", "buffer.admission.min_size", "buffer.admission.samples_per_insert"),
        *("rollout.max_concurrency", "rollout.min_concurrency", "rollout.servers", "rollout.oversample"),
        *("rollout.interruption", "rollout.max_interruptions", "trainer.checkpoint.every_steps", "eval.every_steps"),
    }
)
"""Keys whose effect on speed and ages a simulation knows."""
CHANGES_DATA = {
    "groups_per_step": "the batch is another one, so the learning rate may have to change",
    "group_size": "advantages are of other groups",
    "sampling.max_tokens": "longer completions are cut",
    "rollout.oversample": "long completions are trained less often",
    "buffer.max_uses": "groups are trained another number of times",
    "buffer.selector.kind": "another selector may prefer short completions",
    "buffer.on_stale": "other tokens are trained",
}
"""Keys by which a run learns from other data, in words."""

Overrides = Mapping[str, str]
"""Configuration key -> value, as typed."""


@dataclass(frozen=True, slots=True)
class TuningAxis:
    """Something to vary. The first choice is the present one."""

    name: str
    choices: tuple[Overrides, ...]

    @property
    def keys(self) -> set[str]:
        """The configuration keys that it sets."""
        return {key for choice in self.choices for key in choice}


def axes_of(config: RunConfig, vary: Sequence[str], fix: Sequence[str]) -> list[TuningAxis]:
    """The axes of a configuration. Raises ConfigError for an option that is wrong, and if nothing is left to vary."""
    asked = [_asked(config, text) for text in vary]
    taken = {key for axis in asked for key in axis.keys}
    known = [axis for axis in _usual(config) if not axis.keys & taken]
    for key in fix:
        if not any(key == axis.name or key in axis.keys for axis in known):
            names = ", ".join(axis.name for axis in known)
            raise ConfigError(f"--fix {key}: that is not varied. What would be varied is {names or 'nothing'}")
    axes = [axis for axis in known if axis.name not in fix and not axis.keys & set(fix)]
    axes = [axis for axis in [*axes, *asked] if len(axis.choices) > 1]
    if not axes:
        raise ConfigError("nothing is left to vary. Take a --fix away, or name a key with --vary KEY=A,B,C")
    return axes


def combined(choices: Sequence[Overrides]) -> dict[str, str]:
    """The overrides of one choice on every axis."""
    return {key: value for choice in choices for key, value in choice.items()}


def _usual(config: RunConfig) -> Iterator[TuningAxis]:
    rollout, present = config.rollout, config.max_staleness
    most = max(present, config.steps // LEAST_WINDOWS - 1)
    yield _numbers("max_staleness", present, [value for value in STALENESS if value <= most])
    slots = {max(1, round(rollout.max_concurrency * factor)) for factor in SLOT_FACTORS}
    yield _numbers("rollout.max_concurrency", rollout.max_concurrency, slots)
    if config.buffer.selector.kind in ("fifo", "windowed_fifo"):
        yield _selectors(config, [1, *(config.groups_per_step * factor // 2 for factor in (1, 2, 4))])
    modes = dict.fromkeys([rollout.interruption, "keep"])
    yield TuningAxis("rollout.interruption", tuple({"rollout.interruption": mode} for mode in modes))
    if splits := list(_splits(config)):
        yield TuningAxis(SPLIT, tuple(splits))


def _numbers(key: str, present: int, values: Sequence[int] | set[int]) -> TuningAxis:
    return TuningAxis(key, tuple({key: str(value)} for value in [present, *sorted({*values} - {present})]))


def _selectors(config: RunConfig, windows: Sequence[int]) -> TuningAxis:
    """fifo (a window of 1) and windowed_fifo, the present one first."""
    own = config.buffer.selector
    now = own.window if own.kind == "windowed_fifo" else 1
    return TuningAxis(SELECTOR, tuple(_selector(window) for window in dict.fromkeys([now, *windows]) if window))


def _selector(window: int) -> Overrides:
    kind = "fifo" if window == 1 else "windowed_fifo"
    return {f"{SELECTOR}.kind": kind, f"{SELECTOR}.window": str(window)}


def _splits(config: RunConfig) -> Iterator[Overrides]:
    """The ways to share the devices of one machine out between servers and trainer, the present one first."""
    trainer, limits = config.trainer, config.rollout.limits
    if "cpu" in (trainer.platform, limits.platform) or trainer.nodes > 1 or config.launch.share_devices != "off":
        return
    if VLLM_PLATFORMS[trainer.platform] != limits.platform:
        return
    block = trainer.tensor_parallel * trainer.pipeline_parallel * trainer.context_parallel
    total = trainer.processes + config.rollout.servers * limits.devices
    ranks = [ranks for ranks in range(block, total, block) if (total - ranks) % limits.devices == 0]
    for each in dict.fromkeys([trainer.processes, *ranks]):
        yield {"rollout.servers": str((total - each) // limits.devices), "trainer.processes": str(each)}


def _asked(config: RunConfig, text: str) -> TuningAxis:
    """The axis of one --vary KEY=A,B,C; the present value is always among its choices."""
    axis = parse_axis(text, "--vary")
    if axis.key == SELECTOR:
        return _selectors(config, [_window_of(value) for value in axis.values])
    if axis.key not in SIMULATED:
        raise ConfigError(
            f"--vary {axis.key}: a simulation does not know what it does to speed and ages. It knows {SELECTOR}, "
            f"{', '.join(sorted(SIMULATED))}. Compare other keys by real runs: async-grpo sweep --grid"
        )
    present = format_values(config.model_dump(mode="json"), [axis.key])[axis.key]
    rest = sort_values([value for value in axis.values if value != present])
    return TuningAxis(axis.key, tuple({axis.key: value} for value in [present, *rest]))


def _window_of(value: str) -> int:
    """W of `fifo` or `windowed_fifo:W`."""
    kind, _, window = value.partition(":")
    if kind == "fifo" and not window:
        return 1
    if kind == "windowed_fifo" and window.isdecimal() and int(window) > 1:
        return int(window)
    raise ConfigError(
        f"--vary {SELECTOR}: {value!r} is neither fifo nor windowed_fifo:W with a W above 1, such as windowed_fifo:8. "
        f"Give other selectors as --vary {SELECTOR}.kind=fifo,freshest"
    )
