"""Conflicts within and between sections are rejected before anything starts, with reason and fix."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from async_grpo.config import RunConfig, dump, validate
from async_grpo.config.model import LoraConfig
from async_grpo.config.rewards import HttpRewardConfig
from async_grpo.errors import ConfigError

TRAINER = [
    ({"objective": {"kl_beta": 0.1}}, r"kl_beta is 0\.1.*trainer\.reference\.source"),
    ({"reference": {"source": "synced"}}, r"trainer\.reference\.sync_every"),
    ({"reference": {"source": "frozen", "sync_every": 4}}, r"sync_every \(4\).*source frozen"),
    ({"reference": {"path": "elsewhere"}}, "path .*source none"),
    ({"streaming": True, "num_iterations": 2}, r"streaming .*num_iterations \(2\)"),
    ({"streaming": True, "mini_batches": 2}, r"streaming .*mini_batches \(2\)"),
    ({"streaming": True, "objective": {"advantage": "lite_ppo"}}, "streaming .*advantage lite_ppo"),
    (
        {"streaming": True, "objective": {"advantage": "reinforce_pp_baseline"}},
        "streaming .*advantage reinforce_pp_baseline",
    ),
    ({"streaming": True, "objective": {"advantage": "mine:own"}}, "streaming .*advantage mine:own"),
    ({"streaming": True, "objective": {"corrections": ["m2po"]}}, "streaming .*correction m2po"),
    (
        {"streaming": True, "objective": {"corrections": [{"kind": "mine:own", "whole_batch": True}]}},
        "streaming .*correction mine:own",
    ),
    ({"mini_batches": 17}, r"mini_batches \(17\).*groups_per_step \(16\)"),
    ({"micro_batch_tokens": 100}, r"trainer\.micro_batch_tokens \(100\).*trainer\.overlong"),
    ({"processes": 6, "tensor_parallel": 2, "context_parallel": 2}, r"trainer\.processes to 4 times"),
    ({"processes": 4, "expert_parallel": 3}, r"trainer\.expert_parallel to a divisor of 4"),
    (
        {"processes": 4, "pipeline_parallel": 2, "expert_parallel": 4},
        r"trainer\.expert_parallel to a divisor of 2",
    ),
    ({"processes": 2, "sequence_parallel": True}, r"sequence_parallel.*trainer\.tensor_parallel above 1"),
]
LORA: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"targets": ["q_proj", "q_proj"]}, {}, "targets .*q_proj"),
    ({"engine": "adapters", "rank": 513}, {}, r"rank \(513\).*model\.lora\.engine to merged"),
    ({"targets": ["lm_head"]}, {}, "lm_head.*'q_proj'"),
    (
        {},
        {"source": "frozen", "path": "other"},
        r"trainer\.reference\.path is other.*trainer\.reference\.placement to model",
    ),
    ({}, {"source": "synced", "sync_every": 2, "placement": "model"}, r"trainer\.reference\.placement to swap"),
]
WARMUP = [
    ({"heads": 8}, r"heads \(8\)"),
    ({"kv_heads": 3}, r"kv_heads \(3\)"),
    ({"max_positions": 32}, r"max_positions \(32\)"),
    ({"accuracy_floor": 0.6}, r"accuracy_floor \(0\.6\)"),
]
REWARDS = [
    ({"functions": [{"name": "format"}, {"name": "format", "weight": 2}]}, "functions: format .*twice"),
    ({"functions": [{"name": "format", "required": False}]}, "functions: .*required"),
    ({"functions": [{"name": "overlong"}]}, "'overlong'.*length penalty"),
    ({"functions": [{"name": "format", "weight": float("nan")}]}, "weight.*finite"),
    ({"overlong": "soft"}, "overlong is 'soft' and soft_overlong_tokens is None"),
    ({"overlong": "filter", "soft_overlong_tokens": 4}, "overlong is 'filter' and soft_overlong_tokens is 4"),
    ({"environment": ["A=b"]}, "A=b"),
    ({"memory_bytes": 1 << 20}, r"memory_bytes.*1048576"),
    ({"overlong": "soft", "soft_overlong_tokens": 8}, r"soft_overlong_tokens \(8\).*sampling\.max_tokens \(8\)"),
]


def run_with(section: str, keys: dict[str, Any]) -> RunConfig:
    raw: dict[str, Any] = {"name": "a", "model": {"random": {}}, "sampling": {"max_tokens": 8}, section: keys}
    return validate(raw, "test")


@pytest.mark.parametrize(
    ("section", "keys", "message"),
    [
        *(("trainer", *row) for row in TRAINER),
        *(("rewards", *row) for row in REWARDS),
        *(("model", {"warmup": keys}, fix) for keys, fix in WARMUP),
    ],
)
def test_conflicting_settings_are_rejected(section: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_with(section, keys)


@pytest.mark.parametrize(("lora", "reference", "message"), LORA)
def test_invalid_adapters_are_rejected(lora: dict[str, Any], reference: dict[str, Any], message: str) -> None:
    raw = {"name": "a", "model": {"random": {}, "lora": lora}, "trainer": {"reference": reference}}
    with pytest.raises(ConfigError, match=message):
        validate(raw, "test")


@pytest.mark.parametrize(
    ("precision", "vllm", "message"),
    [
        ("float32", {}, r"precision is float32.*model\.fp32_head"),
        ("bfloat16", {"platform": "ascend"}, r"model\.fp32_head.*0\.26"),
        ("bfloat16", {"extra": {"hf_overrides": {}}}, r"hf_overrides.*rollout\.vllm\.extra"),
    ],
)
def test_a_float32_head_without_effect_is_rejected(precision: str, vllm: dict[str, Any], message: str) -> None:
    raw = {
        "name": "a",
        "model": {"random": {}, "precision": precision, "fp32_head": True},
        "rollout": {"vllm": vllm},
    }
    with pytest.raises(ConfigError, match=message):
        validate(raw, "test")


def test_an_engine_with_its_own_adapters_cannot_sleep() -> None:
    model = {"random": {}, "lora": {"engine": "adapters"}}
    with pytest.raises(ConfigError, match=r"launch\.share_devices is sleep.*model\.lora\.engine"):
        validate({"name": "a", "model": model, "launch": {"share_devices": "sleep"}}, "test")


@pytest.mark.parametrize(("keys", "scale"), [({}, 2.0), ({"alpha": 8}, 0.5), ({"alpha": 8, "rslora": True}, 2.0)])
def test_adapter_scale_is_alpha_over_rank_or_its_root(keys: dict[str, Any], scale: float) -> None:
    assert LoraConfig(rank=16, **keys).scale == scale


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "ftp://judge/"}, "ftp://judge .*https://"),
        ({"url": "file:///etc/passwd"}, "file://.*https://"),
        ({"url": "judge:80"}, "judge://.*https://"),
        ({"url": "http://user:password@judge/"}, "password.*token_env"),
        ({"url": "http://judge/", "score_pointer": "score"}, "'score'.*/choices/0/score"),
        ({"url": "http://judge/", "headers": {"Authorization": "Bearer abc"}}, "Authorization.*token_env"),
        ({"url": "http://judge/", "headers": {"X-Api-Key": "abc"}}, "X-Api-Key.*token_env"),
        ({"url": "http://judge/", "token_env": "Bearer abc"}, "token_env"),
    ],
)
def test_invalid_judges_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HttpRewardConfig(**settings)


@pytest.mark.parametrize(
    "keys",
    [
        {"micro_batch_tokens": 100, "overlong": "truncate"},
        {"micro_batch_tokens": 100, "overlong": "drop"},
        {"streaming": True},
        {"streaming": True, "objective": {"preset": "grpo"}},
        {"streaming": True, "objective": {"preset": "gspo"}},
        {"streaming": True, "objective": {"corrections": ["ess_lr", "seq_mis"]}},
        {"streaming": True, "objective": {"advantage": "opo"}},
        {"reference": {"source": "frozen"}},
        {"processes": 4, "tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 4},
    ],
)
def test_dumped_sections_load_equal(keys: dict[str, Any]) -> None:
    judge = {"name": "judge", "weight": 0.5, "http": {"url": "https://judge/v1"}}
    config = run_with("trainer", keys).model_dump(mode="json")
    config_with_rewards = validate({**config, "rewards": {"functions": [{"name": "gsm8k"}, judge]}}, "test")
    assert validate(yaml.safe_load(dump(config_with_rewards)), "test") == config_with_rewards
