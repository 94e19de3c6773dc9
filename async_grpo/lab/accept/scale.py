"""The stages of `async-grpo accept --scale`: metrics of models of ordinary size, compared with published ones.

    asynchrony   4B, equally many devices for trainer and servers, at most four in total: S = 2 against S = 0, and the
                 duration of a weight update
    throughput   8B, half of all devices for each side: completion tokens per second and device

Weights are random, in the shapes of Qwen2. The vocabulary has 1,024 tokens, one of which ends a completion, so lengths
are roughly geometric around 1,000 tokens and some samples of a batch take several times as long as others. With a large
vocabulary all samples would reach max_tokens, and S = 0 would lose no time to stragglers.

On a CPU the same code runs with the tiny model. Its metrics are printed but not checked.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from async_grpo.config import RunConfig, validate
from async_grpo.errors import ConfigError
from async_grpo.lab.accept.context import STEPS, StageContext
from async_grpo.lab.accept.stages import (
    RAW_LOGPROBS,
    TOLERANCES,
    Stage,
    StageMetric,
    require_at_least,
    require_at_most,
    run_to_end,
    stages_by_name,
)
from async_grpo.lab.simulate.recorded import RecordedRun, read_recorded

MIN_GAIN = 1.7
"""Minimum ratio of tokens/s with S = 2 to tokens/s with S = 0.

Published: 1.72 for Qwen3-4B on 2 + 2 NPUs of an A3 (github.com/vllm-project/vime, issue 358).
"""
MAX_UPDATE_S = 1.6
"""Maximum seconds of a 4B weight update, from the trainer's call until the last engine resumes."""
MIN_TOKENS_PER_DEVICE = 378.0
"""Minimum tokens/s and device of 8B: 1.5 times the 252 that MindSpeed-RL publishes per die."""

SIZES_4B = {
    "hidden_size": 2560,
    "layers": 44,
    "heads": 20,
    "kv_heads": 4,
    "intermediate_size": 9728,
    "vocab_size": 1024,
}
"""3.98 billion parameters. More layers than Qwen3-4B to make up for the small embedding."""
SIZES_8B = {
    "hidden_size": 4096,
    "layers": 42,
    "heads": 32,
    "kv_heads": 8,
    "intermediate_size": 12288,
    "vocab_size": 1024,
}
"""8.1 billion parameters."""
MAX_TOKENS = 2048
STEPS_ON_DEVICES = 20
"""Speeds exclude the steps of the head start; ten steps would leave about five."""

_SLOW = (
    "read logs/NAME for what the run waited for; async-grpo why on a longer run of the same configuration shows more"
)
_CPU_LOAD = {"rollout": {"max_concurrency": 16}, "groups_per_step": 4, "group_size": 4}
_DEVICE_LOAD = {"rollout": {"max_concurrency": 192}, "groups_per_step": 16, "group_size": 8}


async def asynchrony(context: StageContext) -> list[StageMetric]:
    """Measure the gain of S = 2 over S = 0 with 4B on 2 + 2 devices, and the duration of a weight update."""
    half = _devices_per_side(context, required=4, at_most=2)
    speeds: dict[int, float] = {}
    for staleness in (0, 2):
        config = scaled_config(context, f"asynchrony-s{staleness}", SIZES_4B, half, staleness)
        summary = await run_to_end(context, config)
        speeds[staleness] = summary["tokens_per_s"] or 0.0
    recorded = read_recorded(config.run_dir)  # of the last run, S = 2

    gain = speeds[2] / speeds[0] if speeds[0] else math.nan
    return [
        _at_least_on_devices(context, "S = 2 over S = 0", gain, MIN_GAIN, "times"),
        _at_most_on_devices(context, "weight update, median", update_seconds(recorded), MAX_UPDATE_S, "s"),
        StageMetric("tokens/s with S = 0", speeds[0]),
        StageMetric("tokens/s with S = 2", speeds[2]),
        StageMetric("devices per side", half),
        *_gap_metrics(context, summary),
    ]


async def throughput(context: StageContext) -> list[StageMetric]:
    """Measure completion tokens per second and device with 8B."""
    half = _devices_per_side(context, required=8, at_most=8)
    summary = await run_to_end(context, scaled_config(context, "throughput", SIZES_8B, half, 2))
    speed = summary["tokens_per_s"] or 0.0
    return [
        _at_least_on_devices(context, "tokens/s and device", speed / (2 * half), MIN_TOKENS_PER_DEVICE, ""),
        StageMetric("tokens/s", speed),
        StageMetric("devices", 2 * half),
        StageMetric("trainer idle", summary["trainer_idle"] or 0.0),
        StageMetric("servers idle", summary["rollout_idle"] or 0.0),
        *_gap_metrics(context, summary),
    ]


def scaled_config(context: StageContext, name: str, sizes: Mapping[str, int], half: int, staleness: int) -> RunConfig:
    """Return a run of a few steps with `half` tensor-parallel ranks and `half` servers of one device each."""
    raw: dict[str, Any] = context.build_config(name, ranks=half, servers=half).model_dump(mode="json")
    load = _DEVICE_LOAD if context.devices else _CPU_LOAD
    raw["max_staleness"] = staleness
    raw["groups_per_step"] = load["groups_per_step"]
    raw["group_size"] = load["group_size"]
    raw["rollout"] |= load["rollout"]
    raw["steps"] = STEPS_ON_DEVICES if context.devices else STEPS
    raw["trainer"]["checkpoint"]["every_steps"] = raw["steps"]

    if context.devices:
        raw["model"]["random"] = {**sizes, "max_positions": 2 * MAX_TOKENS}
        raw["sampling"]["max_tokens"] = MAX_TOKENS
        raw["rewards"]["soft_overlong_tokens"] = MAX_TOKENS // 2
        raw["rollout"]["vllm"] |= {"kv_cache_bytes": None, "max_model_len": MAX_TOKENS + 512}
        raw["trainer"] |= {
            "tensor_parallel": half,
            "sequence_parallel": half > 1,
            "micro_batch_tokens": 8192,
            "recompute": "full",
        }
        raw["launch"]["ready_timeout_s"] = 1200.0
    return validate(raw, "async-grpo accept --scale")


def update_seconds(run: RecordedRun) -> float:
    """Return the median seconds from the start of a publication until the last server has loaded it.

    NaN if the run has no weight update.
    """
    last_load_s: dict[int, float] = {}
    for server in run.servers:
        for _, end_s, version in server.loads[1:]:  # the first load belongs to the server's start
            last_load_s[version] = max(end_s, last_load_s.get(version, end_s))

    durations_s = []
    for version, end_s in last_load_s.items():
        if version in run.published:
            start_s = run.published[version][0]
            durations_s.append(end_s - start_s)
    return statistics.median(durations_s) if durations_s else math.nan


def _devices_per_side(context: StageContext, required: int, *, at_most: int) -> int:
    """Return the number of devices for each side; 1 on the CPU. Raises ConfigError if there are too few."""
    if not context.devices:
        return 1
    if len(context.devices) < required:
        raise ConfigError(
            f"this stage needs {required} devices, but there are {len(context.devices)}. Use more devices, or leave "
            "the stage out"
        )
    half = 1
    while 2 * half <= min(at_most, len(context.devices) // 2):  # a power of two, which divides the attention heads
        half *= 2
    return half


def _at_least_on_devices(context: StageContext, name: str, value: float, at_least: float, unit: str) -> StageMetric:
    if context.devices:
        return require_at_least(name, value, at_least, unit)
    return _unchecked(name, value, f"at least {at_least:g}", unit)


def _at_most_on_devices(context: StageContext, name: str, value: float, at_most: float, unit: str) -> StageMetric:
    if context.devices:
        return require_at_most(name, value, at_most)
    return _unchecked(name, value, f"at most {at_most:g}", unit)


def _unchecked(name: str, value: float, limit: str, unit: str) -> StageMetric:
    return StageMetric(f"{name}, not checked on a CPU ({limit} on devices):", value, unit)


def _gap_metrics(context: StageContext, summary: Mapping[str, Any]) -> list[StageMetric]:
    gap = summary["logprob_gap_mean"]
    allowed = TOLERANCES[context.precision].logprob_mean
    return [
        require_at_most("gap of decoded tokens, mean", math.inf if gap is None else gap, allowed, RAW_LOGPROBS),
        StageMetric("tokens of the gap", summary["gap_tokens"]),
    ]


SCALE_STAGES = stages_by_name(
    Stage(asynchrony, limit_s=3600.0, fix=_SLOW),
    Stage(throughput, limit_s=3600.0, fix=_SLOW),
)
