"""The stages of `async-grpo accept --scale`: figures of models of ordinary size, next to published ones.

    asynchrony   4B, as many devices for the trainer as for servers, four at most: S = 2 against our own S = 0, and the
                 seconds of a weight update
    throughput   8B, half of all devices each: completion tokens a second and device

Weights are random, in the shapes of Qwen2. The vocabulary has 1,024 tokens, one of which ends a completion: lengths are
spread about geometrically, around 1,000 tokens, so that some samples of a batch take several times as long as others.
With a large vocabulary all would be cut at max_tokens, and S = 0 would lose nothing to stragglers.

On a CPU the same code runs with the tiny model, and its figures are printed without being judged.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from async_grpo.config import RunConfig, validate
from async_grpo.errors import ConfigError
from async_grpo.lab.accept.lab import STEPS, Lab
from async_grpo.lab.accept.stages import (
    RAW_LOGPROBS,
    TOLERANCES,
    Figure,
    Stage,
    bounded,
    finished_run,
    reaching,
)
from async_grpo.lab.simulate.recorded import RecordedRun, read_recorded

LEAST_GAIN = 1.7
"""Tokens/s of S = 2 over those of S = 0; 1.72 for Qwen3-4B on 2 + 2 NPUs of an A3 (github.com/vllm-project/vime,
issue 358)."""
MOST_UPDATE_S = 1.6
"""Maximum seconds of a 4B weight update, from the trainer's call until the last engine resumes."""
LEAST_TOKENS_PER_DEVICE = 378.0
"""Tokens/s and device of 8B: 1.5 times the 252 that MindSpeed-RL publishes for a die."""

SIZES_4B = {
    "hidden_size": 2560,
    "layers": 44,
    "heads": 20,
    "kv_heads": 4,
    "intermediate_size": 9728,
    "vocab_size": 1024,
}
"""3.98 billion parameters. More layers than Qwen3-4B has, because its embedding is missing here."""
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
"""Speeds are of the steps behind the head start: with ten, of some five."""

_SLOW = "see logs/NAME for what the run waited for: async-grpo why on a longer run of the same configuration says more"
_FEW_SAMPLES = {"rollout": {"max_concurrency": 16}, "groups_per_step": 4, "group_size": 4}
_MANY_SAMPLES = {"rollout": {"max_concurrency": 192}, "groups_per_step": 16, "group_size": 8}


async def asynchrony(lab: Lab) -> list[Figure]:
    """Speed of S = 2 over that of S = 0 with 4B on 2 + 2 devices, and the seconds of a weight update."""
    half = _half_of(lab, 4, most=2)
    speeds, runs, gaps = {}, {}, {}
    for staleness in (0, 2):
        config = scaled_config(lab, f"asynchrony-s{staleness}", SIZES_4B, half, staleness)
        summary = await finished_run(lab, config)
        speeds[staleness] = summary["tokens_per_s"] or 0.0
        gaps[staleness] = summary
        runs[staleness] = read_recorded(config.run_dir)
    gain = speeds[2] / speeds[0] if speeds[0] else math.nan
    return [
        _at_least(lab, "S = 2 over S = 0", gain, LEAST_GAIN, "times"),
        _at_most(lab, "weight update, median", update_seconds(runs[2]), MOST_UPDATE_S, "s"),
        Figure("tokens/s with S = 0", speeds[0]),
        Figure("tokens/s with S = 2", speeds[2]),
        Figure("devices that train, and that generate", half),
        *_gap_figures(lab, gaps[2]),
    ]


async def throughput(lab: Lab) -> list[Figure]:
    """Completion tokens a second and device, with 8B."""
    half = _half_of(lab, 8, most=8)
    summary = await finished_run(lab, scaled_config(lab, "throughput", SIZES_8B, half, 2))
    speed = summary["tokens_per_s"] or 0.0
    return [
        _at_least(lab, "tokens/s and device", speed / (2 * half), LEAST_TOKENS_PER_DEVICE, ""),
        Figure("tokens/s", speed),
        Figure("devices", 2 * half),
        Figure("trainer idle", summary["trainer_idle"] or 0.0),
        Figure("servers idle", summary["rollout_idle"] or 0.0),
        *_gap_figures(lab, summary),
    ]


def scaled_config(lab: Lab, name: str, sizes: Mapping[str, int], half: int, staleness: int) -> RunConfig:
    """A run of a few steps with `half` ranks, TP over all of them, and as many servers of one device."""
    raw: dict[str, Any] = lab.config(name, ranks=half, servers=half).model_dump(mode="json")
    raw["max_staleness"] = staleness
    samples = _MANY_SAMPLES if lab.devices else _FEW_SAMPLES
    raw["groups_per_step"], raw["group_size"] = samples["groups_per_step"], samples["group_size"]
    raw["rollout"] |= samples["rollout"]
    raw["steps"] = STEPS_ON_DEVICES if lab.devices else STEPS
    raw["trainer"]["checkpoint"]["every_steps"] = raw["steps"]
    if lab.devices:
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
    """Median seconds from the start of a publication until the last server has loaded it; NaN without any."""
    last: dict[int, float] = {}
    for server in run.servers:
        for _, end, version in server.loads[1:]:  # the first is part of the start
            last[version] = max(end, last.get(version, end))
    seconds = [end - run.published[version][0] for version, end in last.items() if version in run.published]
    return statistics.median(seconds) if seconds else math.nan


def _half_of(lab: Lab, least: int, *, most: int) -> int:
    """Devices of each side; 1 on the CPU."""
    if not lab.devices:
        return 1
    if len(lab.devices) < least:
        raise ConfigError(f"this needs {least} devices, and there are {len(lab.devices)}. Give more, or leave it out")
    half = 1
    while 2 * half <= min(most, len(lab.devices) // 2):  # a power of two divides the heads
        half *= 2
    return half


def _at_least(lab: Lab, name: str, value: float, least: float, unit: str) -> Figure:
    return reaching(name, value, least, unit) if lab.devices else _unjudged(name, value, f"at least {least:g}", unit)


def _at_most(lab: Lab, name: str, value: float, most: float, unit: str) -> Figure:
    return bounded(name, value, most) if lab.devices else _unjudged(name, value, f"at most {most:g}", unit)


def _unjudged(name: str, value: float, limit: str, unit: str) -> Figure:
    return Figure(f"{name}, not judged on a CPU ({limit} on devices):", value, unit)


def _gap_figures(lab: Lab, summary: Mapping[str, Any]) -> list[Figure]:
    gap = summary["logprob_gap_mean"]
    most = TOLERANCES[lab.precision].logprob_mean
    return [
        bounded("gap of decoded tokens, mean", math.inf if gap is None else gap, most, RAW_LOGPROBS),
        Figure("tokens of the gap", summary["gap_tokens"]),
    ]


SCALE_STAGES = {stage.name: stage for stage in (Stage(asynchrony, 3600.0, _SLOW), Stage(throughput, 3600.0, _SLOW))}
