"""AReaL: conversions of several keys. Those of one key are in tables/areal.toml.

`train_dataset.batch_size` counts prompts, each with `gconfig.n_samples` samples. A loss is the sum over the trained
tokens of a mini-batch, divided by their number before any rejection (areal/utils/functional/functional.py), so
`aggregation` is token_mean, and rejected tokens stay in the denominator as they do here.
"""

from __future__ import annotations

import math
import re
from typing import Any

from async_grpo.errors import ConfigError
from async_grpo.lab.importers.conversions import (
    convert_keys,
    set_data,
    set_kl,
    set_lengths,
    set_overlong,
    set_sampling,
    set_schedule,
    set_steps,
    set_trackers,
)
from async_grpo.lab.importers.devices import DeviceCount, set_devices, set_engine_memory
from async_grpo.lab.importers.table import load_system
from async_grpo.lab.importers.translation import CHANGE_ME, Translation
from async_grpo.models.hub_dataset import KNOWN_DATASETS

_ACTOR = "actor."
_ROLLOUT = "rollout."
_OBJECTIVE = "trainer.objective."
_REJECTION = f"{_ACTOR}rejection_sampling."
_OPTIMIZER = f"{_ACTOR}optimizer."
_CORRECTIONS = f"{_OBJECTIVE}corrections"
_UNBOUNDED = 1e9
"""A bound above every importance weight: the logarithm of a weight is at most 20."""


def translate(t: Translation) -> None:
    """Translate a whole AReaL configuration."""
    kind = str(t.get("train_dataset.type"))
    if kind != "rl":
        raise ConfigError(f"train_dataset.type is {kind}, and only rl has a counterpart. Import a file of GRPO or PPO")
    convert_keys(t)
    set_sampling(t, "gconfig.")
    if t.has(f"{_ACTOR}temperature") and t.read_number(f"{_ACTOR}temperature") != t.read_number("gconfig.temperature"):
        t.mark_unsupported(f"{_ACTOR}temperature", "the trainer has the temperature of gconfig", "sampling.temperature")
    _set_run_options(t)
    _set_data(t)
    _set_optimizer(t)
    _set_advantage(t)
    _set_loss(t)
    _set_kl(t)
    _set_rewards(t)
    _set_devices(t)


def _set_run_options(t: Translation) -> None:
    name = "-".join(str(t.get(key)) for key in ("experiment_name", "trial_name") if t.has(key)) or "from-areal"
    t.set("name", re.sub(r"[^A-Za-z0-9._-]", "-", name).strip("-._")[:64] or "from-areal")

    groups = t.settings["groups_per_step"].value
    if t.has("total_train_steps"):
        t.set("steps", t.read_integer("total_train_steps"))
        t.mark_unsupported("total_train_epochs", "total_train_steps decides", "steps")
    else:
        set_steps(t, "total_train_epochs", groups)
    updates = t.read_integer(f"{_ACTOR}ppo_n_minibatches")
    if updates > 1:
        t.set("trainer.mini_batches", min(updates, groups), "updates of a step")

    every = _read_interval(t, "saver", groups)
    if t.get("recover.mode") in ("on", "auto"):
        every = _read_interval(t, "recover", groups) or every
    if every:
        t.set("trainer.checkpoint.every_steps", every)
    every = _read_interval(t, "evaluator", groups)
    if every:
        t.set("eval.every_steps", every)
    trackers = [name for name in ("wandb", "swanlab") if t.get(f"stats_logger.{name}.mode") != "disabled"]
    if t.get("stats_logger.tensorboard.path"):
        trackers.append("tensorboard")
    set_trackers(t, "stats_logger.wandb.mode", trackers)


def _read_interval(t: Translation, section: str, groups: int) -> int:
    """Return the interval of a section in steps, from its steps or epochs; 0 if the file has neither."""
    if t.read_integer(f"{section}.freq_steps"):
        return t.read_integer(f"{section}.freq_steps")
    epochs = t.read_integer(f"{section}.freq_epochs")
    if not epochs:
        return 0
    if t.rows:
        return max(1, epochs * t.rows // groups)
    t.mark_unsupported(
        f"{section}.freq_epochs", "counted in steps here; pass --rows N (rows of the data) to compute them"
    )
    return 0


def _set_data(t: Translation) -> None:
    path = str(t.get("train_dataset.path") or "FILE")
    if t.has("train_dataset.max_length"):
        t.set("data.max_prompt_tokens", t.read_integer("train_dataset.max_length"))
    else:
        t.set("data.max_prompt_tokens", 1024, f"{CHANGE_ME}: AReaL bounds prompts by train_dataset.max_length only")
    if path in {dataset.id for dataset in KNOWN_DATASETS.values()}:
        t.set("data.kind", "jsonl")
        t.set("data.path", path, "downloaded once; the instruction after the question is in the script there")
        t.mark_approximated(
            "train_dataset.path", "the script there adds its own instruction: data.template", "data.path"
        )
    else:
        prompt = t.settings["data.max_prompt_tokens"].value
        set_data(t, path, f"FILE --max-prompt-tokens {prompt} --model MODEL")
    set_lengths(t, micro_tokens=t.read_integer(f"{_ACTOR}mb_spec.max_tokens_per_mb"))


def _set_optimizer(t: Translation) -> None:
    style = f"{_OPTIMIZER}lr_scheduler_type"
    lowest = t.read_number(f"{_OPTIMIZER}min_lr_ratio") * t.read_number(f"{_OPTIMIZER}lr")
    set_schedule(t, style, str(t.get(style)), t.read_number(f"{_OPTIMIZER}warmup_steps_proportion"), lowest)
    if t.read_flag(f"{_ACTOR}gradient_checkpointing"):
        t.set("trainer.recompute", "full")


def _set_advantage(t: Translation) -> None:
    """Set the advantage from the levels of both normalisations.

    AReaL normalises rewards over the group or the batch, uses them as the advantage of every token (discount and
    gae_lambda are 1), and normalises these over the tokens of the batch. The second normalisation cancels a first one
    over the batch, because that is the same for all samples.
    """
    mean, std = _read_levels(t, "reward_norm")
    levels = _read_levels(t, "adv_norm")
    key = f"{_ACTOR}reward_norm.mean_level"
    advantage = t.source.choices["advantages"].get(f"{mean}/{std}")
    if advantage is None:
        t.mark_unsupported(
            key, f"there is no advantage with mean {mean} and deviation {std}; grpo is taken", "trainer.objective"
        )
        advantage = "grpo"
    if mean == "group" and t.read_flag(f"{_ACTOR}reward_norm.mean_leave1out"):
        if std == "none":
            advantage = "rloo"
        else:
            reason = "the mean includes the sample itself where the deviation is divided by"
            t.mark_approximated(f"{_ACTOR}reward_norm.mean_leave1out", reason, f"{_OBJECTIVE}advantage")
    for section in ("reward_norm", "adv_norm"):
        if not t.read_flag(f"{_ACTOR}{section}.std_unbiased"):
            reason = "the deviation is the unbiased one"
            t.mark_approximated(f"{_ACTOR}{section}.std_unbiased", reason, f"{_OBJECTIVE}advantage")

    norm = "none" if levels == ("none", "none") else "batch"
    if mean == "batch" and norm == "none":
        t.mark_approximated(
            key, "over the tokens of the batch, and mean and deviation together", f"{_OBJECTIVE}advantage"
        )
        norm = "batch"
    if levels not in (("none", "none"), ("batch", "batch")):
        reason = "mean and deviation are those of the tokens of the batch"
        t.mark_approximated(f"{_ACTOR}adv_norm.mean_level", reason, f"{_OBJECTIVE}advantage_norm")
        t.mark_approximated(f"{_ACTOR}adv_norm.std_level", reason, f"{_OBJECTIVE}advantage_norm")
    t.set(f"{_OBJECTIVE}preset", "areal")
    t.set(f"{_OBJECTIVE}advantage", advantage)
    t.set(f"{_OBJECTIVE}advantage_norm", norm)
    t.set(f"{_OBJECTIVE}aggregation", "token_mean")


def _read_levels(t: Translation, section: str) -> tuple[str, str]:
    """Return the levels of mean and deviation: batch, group or none."""
    prefix = f"{_ACTOR}{section}."
    if not t.given.has_section(prefix):
        return "none", "none"
    return _read_level(t, f"{prefix}mean_level"), _read_level(t, f"{prefix}std_level")


def _read_level(t: Translation, key: str) -> str:
    return "none" if t.is_null(key) else str(t.get(key)).lower()


def _set_loss(t: Translation) -> None:
    is_decoupled = t.read_flag(f"{_ACTOR}use_decoupled_loss")
    by_sequence = t.get(f"{_ACTOR}importance_sampling_level") == "sequence"
    if is_decoupled:
        prox = "loglinear" if t.get(f"{_ACTOR}prox_logp_method") == "loglinear" else "recompute"
        t.get(f"{_ACTOR}recompute_logprob")  # without effect: the decoupled loss needs it
    else:
        prox = "recompute" if t.read_flag(f"{_ACTOR}recompute_logprob") else "behaviour"

    loss = "gspo" if by_sequence else "ppo_clip"
    if t.read_flag(f"{_ACTOR}use_sapo_loss"):
        loss = "sapo"
    corrections = _read_corrections(t) if is_decoupled else []
    if loss == "ppo_clip" and len(corrections) == 1 and _is_decoupled(corrections[0]):
        # The same loss under the name that AReaL gave it, which also reads better in the run's config.yaml.
        [weight] = corrections
        loss = "decoupled"
        corrections = []
        t.set(f"{_OBJECTIVE}behaviour_cap", weight["high"])
        t.set(f"{_OBJECTIVE}behaviour_cap_mode", weight["action"])
    if prox == "loglinear" and any(correction["kind"] == "reject" for correction in corrections):
        reason = "by the weights before the step, and not by their loglinear approximation"
        t.mark_approximated(f"{_REJECTION}metric", reason, _CORRECTIONS)
    if t.has(f"{_ACTOR}m2_threshold"):
        corrections.append({"kind": "m2po", "limit": t.read_number(f"{_ACTOR}m2_threshold")})
        reason = "over the whole batch before the step; there over each micro-batch"
        t.mark_approximated(f"{_ACTOR}m2_threshold", reason, _CORRECTIONS)

    t.set(f"{_OBJECTIVE}loss", loss)
    t.set(f"{_OBJECTIVE}prox", prox)
    t.set(_CORRECTIONS, corrections)
    if by_sequence and loss == "gspo":
        t.set(f"{_OBJECTIVE}aggregation", "seq_mean_token_mean")
        reason = "averaged over sequences, and there over tokens"
        t.mark_approximated(f"{_ACTOR}importance_sampling_level", reason, f"{_OBJECTIVE}aggregation")
    _set_clip_range(t, loss)


def _set_clip_range(t: Translation, loss: str) -> None:
    if loss == "sapo":
        t.set(f"{_OBJECTIVE}sapo_tau_positive", t.read_number(f"{_ACTOR}sapo_tau_pos"))
        t.set(f"{_OBJECTIVE}sapo_tau_negative", t.read_number(f"{_ACTOR}sapo_tau_neg"))
        return
    low = t.read_number(f"{_ACTOR}eps_clip")
    high = t.read_number(f"{_ACTOR}eps_clip_higher") if t.has(f"{_ACTOR}eps_clip_higher") else low
    if low > 0:
        t.set(f"{_OBJECTIVE}clip_low", low)
        t.set(f"{_OBJECTIVE}clip_high", high)
    else:
        t.mark_unsupported(f"{_ACTOR}eps_clip", "a range of 0 would clip every token", f"{_OBJECTIVE}clip_low")
    if loss in ("ppo_clip", "decoupled") and t.has(f"{_ACTOR}c_clip"):
        t.set(f"{_OBJECTIVE}dual_clip", t.read_number(f"{_ACTOR}c_clip"))


def _read_corrections(t: Translation) -> list[dict[str, Any]]:
    """Return the corrections of `rejection_sampling` (apply_rejection_sampling, areal/utils/functional/functional.py).

    Without the section, AReaL has no importance weight at all. With it, the weight is w per token; with metric ratio
    and level sequence it is the geometric mean of w, and the metric is aggregated in the logarithm.
    """
    if t.given.has_section(_REJECTION):
        level = str(t.get(f"{_REJECTION}level"))
        action = str(t.get(f"{_REJECTION}action"))
        upper = t.read_number(f"{_REJECTION}upper")
    elif t.has(cap := t.first_present(f"{_ACTOR}behave_imp_weight_cap", f"{_ACTOR}behav_imp_weight_cap")):
        mode = str(t.get(f"{_ACTOR}behave_imp_weight_mode"))
        if mode not in t.source.choices["old_modes"]:
            return []
        level, action = t.source.choices["old_modes"][mode]
        upper = t.read_number(cap)
    else:
        return []

    metric = str(t.get(f"{_REJECTION}metric"))
    level = "token" if level == "token" else f"seq_{t.get(f'{_REJECTION}agg')}"
    low = t.read_number(f"{_REJECTION}lower") if t.has(f"{_REJECTION}lower") else None
    if metric != "ratio":
        return [
            {"kind": "weight", "level": "token", "high": _UNBOUNDED},
            _make_divergence_rejection(t, level, metric, low, upper),
        ]

    bounds = {"low": low, "high": upper} if low else {"high": upper}
    if level in ("token", "seq_mean"):
        return [{"kind": "weight", "level": "token" if level == "token" else "geo", "action": action, **bounds}]
    if action == "clamp":
        # Only sequences whose sum or maximum is outside are clamped there. With `sum` the others are inside anyway.
        if level == "seq_max" and low:
            reason = "the mean of every sequence is clamped, and not only where its maximum is outside"
            t.mark_approximated(f"{_REJECTION}agg", reason, _CORRECTIONS)
        return [{"kind": "weight", "level": "geo", "action": "clamp", **bounds}]
    rejection = {"kind": "reject", "level": level, "estimator": "k1", **bounds}
    return [{"kind": "weight", "level": "geo", "high": _UNBOUNDED}, rejection]


def _make_divergence_rejection(
    t: Translation, level: str, metric: str, low: float | None, upper: float
) -> dict[str, Any]:
    """Return the rejection of the metrics kl_k1, kl_k2 and kl_k3. AReaL bounds k1 = log w; here the bounds are of w."""
    estimator = metric.removeprefix("kl_")
    rule: dict[str, Any] = {"kind": "reject", "level": level, "estimator": estimator}
    if estimator == "k1":
        if low is not None:
            rule["low"] = float(f"{math.exp(low):.10g}")
        rule["high"] = float(f"{math.exp(upper):.10g}")
        return rule
    if low is not None:
        t.mark_approximated(f"{_REJECTION}lower", f"{estimator} has an upper bound only", _CORRECTIONS)
    if estimator == "k3":
        # KLEstimator(prox, behaviour) in areal/utils/data.py; both are d^2 / 2 near d = 0.
        t.mark_approximated(f"{_REJECTION}metric", "e^d - 1 - d, and there e^-d - 1 + d, with d = log w", _CORRECTIONS)
    return {**rule, "high": upper}


def _is_decoupled(correction: dict[str, Any]) -> bool:
    return correction["level"] == "token" and "low" not in correction and correction["high"] < _UNBOUNDED


def _set_kl(t: Translation) -> None:
    """Set the KL term. AReaL subtracts it from the rewards of all tokens."""
    beta = t.read_number(f"{_ACTOR}kl_ctl")
    if beta <= 0:
        return
    if not t.given.has_section("ref."):
        t.mark_unsupported(
            f"{_ACTOR}kl_ctl", "the file has no ref, from which the policy could diverge", f"{_OBJECTIVE}kl_beta"
        )
        return
    set_kl(t, beta, str(t.get(f"{_ACTOR}kl_estimator")), in_reward=True)
    if t.has("ref.path") and t.get("ref.path") != t.get(f"{_ACTOR}path"):
        t.set("trainer.reference.path", str(t.get("ref.path")))
    if t.settings[f"{_OBJECTIVE}advantage"].value != "reinforce_pp":
        reason = "subtracted from the reward of a sample before its advantage; there from each token after reward_norm"
        t.mark_approximated(f"{_ACTOR}kl_ctl", reason, f"{_OBJECTIVE}kl_beta, {_OBJECTIVE}kl_in")


def _set_rewards(t: Translation) -> None:
    advantage = t.settings[f"{_OBJECTIVE}advantage"].value
    is_normalised = advantage in ("grpo", "lite_ppo") or t.settings[f"{_OBJECTIVE}advantage_norm"].value == "batch"
    weight = 1.0 if is_normalised else t.read_number(f"{_ACTOR}reward_scaling")
    is_centred = is_normalised or advantage in ("dr_grpo", "rloo")
    if not is_centred and t.read_number(f"{_ACTOR}reward_bias"):
        t.mark_unsupported(f"{_ACTOR}reward_bias", "nothing is added to rewards", "rewards.functions")

    name = "gsm8k" if "gsm8k" in str(t.get("train_dataset.path")) else "math_verify"
    comment = f"{CHANGE_ME}: the reward function is in the script there"
    t.set("rewards.functions", [{"name": name, "weight": weight}], comment)
    set_overlong(t, f"{_ACTOR}overlong_reward_penalty", f"{_ACTOR}overlong_tokens", f"{_ACTOR}overlong_penalty_factor")


def _set_devices(t: Translation) -> None:
    trainer = _read_parallel_sizes(t, f"{_ACTOR}backend", last=True)
    engines = _read_parallel_sizes(t, f"{_ROLLOUT}backend", last=False)
    for size, key in (("t", "tensor"), ("p", "pipeline"), ("c", "context"), ("e", "expert")):
        if trainer[size] > 1:
            t.set(f"trainer.{key}_parallel", trainer[size])
    ranks = trainer["d"] * trainer["p"] * trainer["t"] * trainer["c"]
    servers = engines["d"] * engines["p"]

    per_node = t.read_integer("cluster.n_gpus_per_node")
    platform = "npu" if "npu" in t.given.file_name else "cuda"
    if per_node == 0:
        platform = "cpu"
    nodes = math.ceil(ranks / per_node) if per_node else 1
    per_machine = math.ceil(ranks / nodes)
    set_devices(t, DeviceCount(platform, nodes, per_machine, engines["t"], servers * engines["t"]))
    if nodes == 1 and t.read_integer("cluster.n_nodes") > 1 and ranks + servers * engines["t"] > per_node:
        t.set("rollout.servers", 1, f"{servers} in all: async-grpo rollout on the other machines, with redis.url")

    admitted = t.read_integer(f"{_ROLLOUT}max_concurrent_rollouts") or t.settings["groups_per_step"].value
    samples = math.ceil(admitted * t.settings["group_size"].value / servers)
    t.set("rollout.max_concurrency", samples, f"{admitted} groups of all {servers} servers")
    if platform != "cpu":
        set_engine_memory(t, t.read_number("vllm.gpu_memory_utilization"))


def _read_parallel_sizes(t: Translation, key: str, *, last: bool) -> dict[str, int]:
    """Return the parallel sizes of a backend such as megatron:d4p1t2 or megatron:(attn:d4p4t2|ffn:d2p4e4).

    Older files have both in `allocation_mode`: the engines before the + and the trainer after it.
    """
    text = str(t.get(key) or "")
    if not text and t.has("allocation_mode"):
        engines, _, trainer = str(t.get("allocation_mode")).partition("+")
        text = trainer if last else engines
    if text.startswith("sglang"):
        t.mark_approximated(key, "the engine is vLLM", "rollout.engine")

    if "(" not in text:
        text = text.rpartition(":")[2]
    attention, _, experts = text.partition("|")
    sizes = dict.fromkeys("dptce", 1)
    sizes.update({name: int(size) for name, size in re.findall(r"([dptce])(\d+)", attention)})
    if experts:
        sizes.update({name: int(size) for name, size in re.findall(r"(e)(\d+)", experts)})
    return sizes


AREAL = load_system("areal", translate)
