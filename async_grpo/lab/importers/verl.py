"""verl: conversions of several keys. Those of one key are in tables/verl.toml.

`train_batch_size` and `ppo_mini_batch_size` count prompts. In the fully asynchronous recipe the weights are
synchronised after every `require_batches * trigger_parameter_sync_step` mini-batches; that is one step here.
"""

from __future__ import annotations

import math

from async_grpo.config.presets import LEVELS
from async_grpo.config.rollout import RESERVED_ENGINE_ARGUMENTS
from async_grpo.lab.importers.conversions import (
    ON_POLICY,
    convert_keys,
    convert_kl,
    set_data,
    set_lengths,
    set_overlong,
    set_sampling,
    set_schedule,
    set_steps,
)
from async_grpo.lab.importers.devices import DeviceCount, parallel_size, set_devices, set_engine_memory
from async_grpo.lab.importers.table import load_system
from async_grpo.lab.importers.translation import Translation

_ACTOR = "actor_rollout_ref.actor."
_ROLLOUT = "actor_rollout_ref.rollout."
_MEGATRON = f"{_ACTOR}megatron."
_ASYNC = "async_training."
_CORRECTION = "algorithm.rollout_correction."
_OBJECTIVE = "trainer.objective."


def translate(t: Translation) -> None:
    """Translate a whole verl configuration."""
    convert_keys(t)
    set_sampling(t, _ROLLOUT)
    _set_batches(t)
    _set_data_and_lengths(t)
    _set_optimizer(t)
    _set_objective(t)
    _set_corrections(t)
    _set_devices(t)
    _set_engine(t)
    _set_run_options(t)


def is_fully_async(t: Translation) -> bool:
    """True if the file is for the fully asynchronous recipe."""
    return t.given.has_section(_ASYNC) or "fully_async" in t.given.program


def _set_batches(t: Translation) -> None:
    mini = t.read_integer(f"{_ACTOR}ppo_mini_batch_size")
    if is_fully_async(t):
        updates = t.read_integer(f"{_ASYNC}require_batches") * t.read_integer(f"{_ASYNC}trigger_parameter_sync_step")
        groups = mini * updates
        fraction = t.read_number(f"{_ASYNC}staleness_threshold")
        t.mark_unsupported("data.train_batch_size", "the fully asynchronous recipe ignores it", "groups_per_step")
        comment = f"there (1 + {fraction:g}) * {groups} prompts between two updates of the servers"
        t.set("max_staleness", math.ceil(fraction), comment)
        if t.read_integer("rollout.total_rollout_steps"):
            t.set(
                "steps", max(1, t.read_integer("rollout.total_rollout_steps") // groups), f"prompts in all / {groups}"
            )
        t.set("rollout.interruption", "recompute" if t.read_flag(f"{_ASYNC}partial_rollout") else "drain")
    else:
        groups = t.read_integer("data.train_batch_size")
        updates = max(1, math.ceil(groups / mini))
        one_step_off = "one_step_off" in t.given.program
        t.set("max_staleness", int(one_step_off), "" if one_step_off else ON_POLICY)
        if t.has("trainer.total_training_steps"):
            t.set("steps", t.read_integer("trainer.total_training_steps"))
            t.mark_unsupported("trainer.total_epochs", "trainer.total_training_steps decides", "steps")
    t.set("groups_per_step", groups, "prompts")
    if updates > 1:
        t.set("trainer.mini_batches", updates, f"updates of {mini} prompts")
    if "steps" not in t.settings:
        set_steps(t, "trainer.total_epochs", groups)


def _set_data_and_lengths(t: Translation) -> None:
    prompt = t.settings["data.max_prompt_tokens"].value
    completion = t.settings["sampling.max_tokens"].value
    held_out = f" --held-out-from {t.get('data.val_files')}" if t.has("data.val_files") else ""
    command = f"FILE.parquet --format dapo --max-prompt-tokens {prompt} --model MODEL{held_out}"
    set_data(t, t.get("data.train_files"), command)
    micro = 0
    if t.read_flag(f"{_ACTOR}use_dynamic_bsz"):
        micro = t.read_integer(f"{_ACTOR}ppo_max_token_len_per_gpu")
    elif t.has(f"{_ACTOR}ppo_micro_batch_size_per_gpu"):
        micro = t.read_integer(f"{_ACTOR}ppo_micro_batch_size_per_gpu") * (prompt + completion)
    set_lengths(t, longest=t.read_integer(f"{_ROLLOUT}max_model_len"), micro_tokens=micro)


def _set_optimizer(t: Translation) -> None:
    optim = f"{_ACTOR}optim."
    for ours, beta in zip(("beta1", "beta2"), t.get(f"{optim}betas"), strict=False):
        t.set(f"trainer.optimizer.{ours}", float(beta))
    style = t.first_present(f"{optim}lr_decay_style", f"{optim}warmup_style", f"{optim}lr_scheduler_type")
    lowest = t.read_number(f"{optim}min_lr") or t.read_number(f"{optim}min_lr_ratio") * t.read_number(f"{optim}lr")
    warmup = max(t.read_number(f"{optim}lr_warmup_steps"), 0) or t.read_number(f"{optim}lr_warmup_steps_ratio")
    set_schedule(t, style, str(t.get(style)), warmup, lowest)


def _set_objective(t: Translation) -> None:
    reason = "this project trains with group-relative advantages, without a critic"
    advantage = t.choose_name("algorithm.adv_estimator", "advantages", "grpo", reason, f"{_OBJECTIVE}advantage")
    if advantage == "grpo" and not t.read_flag("algorithm.norm_adv_by_std_in_grpo"):
        advantage = "dr_grpo"
    reason = "there is no loss {} here; ppo_clip is taken"
    loss = t.choose_name(f"{_ACTOR}policy_loss.loss_mode", "losses", "ppo_clip", reason, f"{_OBJECTIVE}loss")
    t.set(f"{_OBJECTIVE}preset", "grpo")
    t.set(f"{_OBJECTIVE}advantage", advantage)
    if advantage in ("reinforce_pp", "gdpo"):
        t.set(f"{_OBJECTIVE}advantage_norm", "batch")
    if advantage == "gdpo":
        reason = "each function of rewards.functions is normalised by itself: name those of gdpo_reward_keys"
        t.mark_approximated("algorithm.adv_estimator", reason, f"{_OBJECTIVE}advantage, rewards.functions")
    t.set(f"{_OBJECTIVE}loss", loss)
    _set_aggregation(t, loss)
    _set_clip_range(t, loss)
    control = "algorithm.kl_ctrl.type"
    if t.read_flag("algorithm.use_kl_in_reward"):
        convert_kl(t, "algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty", control, in_reward=True)
    elif t.read_flag(f"{_ACTOR}use_kl_loss"):
        convert_kl(t, f"{_ACTOR}kl_loss_coef", f"{_ACTOR}kl_loss_type", control)


def _set_aggregation(t: Translation, loss: str) -> None:
    key = f"{_ACTOR}loss_agg_mode"
    scale = f"{_ACTOR}loss_scale_factor"
    ours = f"{_OBJECTIVE}aggregation"
    mode = str(t.get(key)).replace("-", "_")
    if loss in ("gspo", "gmpo") and mode != "seq_mean_token_mean":
        t.mark_unsupported(key, f"{loss} has one ratio a sequence and is averaged over sequences", ours)
        mode = "seq_mean_token_mean"
    t.set(ours, mode)
    if t.get(scale) is None or mode != "seq_mean_token_sum_norm":
        return
    if t.read_number(scale) != t.settings["sampling.max_tokens"].value:
        t.mark_unsupported(scale, "the divisor is sampling.max_tokens; scale the learning rate instead", ours)


def _set_clip_range(t: Translation, loss: str) -> None:
    if loss == "sapo":
        t.set(f"{_OBJECTIVE}sapo_tau_positive", t.read_number(f"{_ACTOR}tau_pos"))
        t.set(f"{_OBJECTIVE}sapo_tau_negative", t.read_number(f"{_ACTOR}tau_neg"))
        return
    t.set(f"{_OBJECTIVE}clip_low", t.read_number(f"{_ACTOR}clip_ratio_low"))
    t.set(f"{_OBJECTIVE}clip_high", t.read_number(f"{_ACTOR}clip_ratio_high"))
    bound = f"{_ACTOR}clip_ratio_c"
    if loss == "ppo_clip":
        t.set(f"{_OBJECTIVE}dual_clip", t.read_number(bound))
    elif loss == "dppo_tv":
        t.set(f"{_OBJECTIVE}behaviour_cap", t.read_number(bound) if t.has(bound) else 20.0)


def _set_corrections(t: Translation) -> None:
    ours = f"{_OBJECTIVE}corrections"
    loss = t.settings[f"{_OBJECTIVE}loss"].value
    bypass = t.read_flag(f"{_CORRECTION}bypass_mode") if t.has(f"{_CORRECTION}bypass_mode") else is_fully_async(t)
    if bypass and t.get(f"{_CORRECTION}loss_type") == "reinforce":
        t.mark_unsupported(f"{_CORRECTION}loss_type", "the ratio is clipped here", f"{_OBJECTIVE}loss")
    is_weighted = bypass or loss == "dppo_tv"
    comment = "bypass_mode" if bypass else "verl's old_log_prob"
    t.set(f"{_OBJECTIVE}prox", "behaviour" if is_weighted else "recompute", comment)

    corrections = [*_read_importance_weights(t, is_included=is_weighted), *_read_rejections(t)]
    if corrections:
        t.set(ours, corrections)


def _read_importance_weights(t: Translation, *, is_included: bool) -> list[dict[str, object]]:
    """Return the correction of `rollout_is`. `is_included`: the loss already contains the importance weight.

    A single threshold is the upper bound to which weights are clamped. LOW_HIGH are bounds; weights outside become 0.
    """
    key = f"{_CORRECTION}rollout_is"
    level = t.get(key)
    if not level or t.is_null(f"{key}_threshold"):
        return []
    if level not in ("token", "sequence"):
        t.mark_unsupported(key, "weights are per token or per sequence", f"{_OBJECTIVE}corrections")
        return []
    if is_included:
        t.mark_unsupported(key, "the ratio already is the importance weight", f"{_OBJECTIVE}corrections")
        return []

    low, _, high = str(t.get(f"{key}_threshold")).rpartition("_")
    if not low:
        return [{"kind": "token_tis" if level == "token" else "seq_tis", "cap": float(high)}]
    bounds = {"low": float(low), "high": float(high)}
    if level == "token":
        return [{"kind": "icepop", **bounds}]
    return [{"kind": "weight", "level": "seq", "action": "mask", **bounds}]


def _read_rejections(t: Translation) -> list[dict[str, object]]:
    """Return the corrections of `rollout_rs`, such as "token_k1,seq_mean_k3", with one threshold for each or for all.

    verl's k1 is -log rho (compute_rollout_rejection_mask), so its bounds LOW_HIGH are those of 1 / rho. Here the bounds
    are those of rho: 1 / HIGH and 1 / LOW. A single threshold is HIGH, and LOW is 1 / HIGH.
    """
    key = f"{_CORRECTION}rollout_rs"
    ours = f"{_OBJECTIVE}corrections"
    options = dict.fromkeys(filter(None, str(t.get(key) or "").replace(" ", "").split(",")))
    if not options:
        return []
    thresholds = str(t.get(f"{key}_threshold") or "").replace(" ", "").split(",")
    if len(thresholds) == 1:
        thresholds *= len(options)
    if len(thresholds) != len(options) or not all(thresholds):
        t.mark_unsupported(key, "verl needs a rollout_rs_threshold for each, or one for all", ours)
        return []

    corrections: list[dict[str, object]] = []
    unknown = []
    for option, threshold in zip(options, thresholds, strict=True):
        level, _, estimator = option.rpartition("_")
        if level not in LEVELS["reject"] or estimator not in ("k1", "k2", "k3"):
            unknown.append(option)
        elif estimator == "k1":
            low, _, high = threshold.rpartition("_")
            lowest = 1 / float(high)
            highest = 1 / float(low) if low else float(high)
            kind = {"seq_sum": "seq_mis", "seq_mean": "geo_rs"}.get(level)
            rule = {"kind": kind} if kind else {"kind": "reject", "level": level, "estimator": "k1"}
            corrections.append({**rule, "low": float(f"{lowest:.10g}"), "high": float(f"{highest:.10g}")})
        else:
            corrections.append({"kind": "reject", "level": level, "estimator": estimator, "high": float(threshold)})

    if unknown:
        t.mark_unsupported(key, f"rejections are LEVEL_ESTIMATOR, such as seq_mean_k3, not {', '.join(unknown)}", ours)
    if corrections:
        t.mark_approximated(key, "rejected tokens stay in the denominator of the loss here, and leave it there", ours)
    return corrections


def _set_devices(t: Translation) -> None:
    checkpointing = t.read_flag("actor_rollout_ref.model.enable_gradient_checkpointing")
    if t.given.has_section(_MEGATRON):
        context = t.read_integer(f"{_MEGATRON}context_parallel_size")
        recompute = str(t.get(f"{_MEGATRON}override_transformer_config.recompute_granularity") or "none")
        if parallel_size(t, "tensor") > 1:
            t.set("trainer.sequence_parallel", t.read_flag(f"{_MEGATRON}sequence_parallel"))
    else:
        size = "ulysses_sequence_parallel_size"
        context = t.read_integer(t.first_present(f"{_ACTOR}fsdp_config.{size}", f"{_ACTOR}{size}"))
        recompute = "full" if checkpointing else "none"
    if context > 1:
        t.set("trainer.context_parallel", context)
    if recompute != "none":
        t.set("trainer.recompute", recompute)

    platform = str(t.get("trainer.device"))
    generating = 0
    if is_fully_async(t) or t.has("rollout.n_gpus_per_node"):
        generating = t.read_integer("rollout.nnodes") * t.read_integer("rollout.n_gpus_per_node")
    count = DeviceCount(
        platform=platform if platform in ("cuda", "npu", "cpu") else "cuda",
        nodes=t.read_integer("trainer.nnodes"),
        per_node=t.read_integer("trainer.n_gpus_per_node"),
        engine=t.read_integer(f"{_ROLLOUT}tensor_model_parallel_size"),
        rollout_devices=generating,
    )
    set_devices(t, count)


def _set_engine(t: Translation) -> None:
    if t.get(f"{_ROLLOUT}name") != "vllm":
        t.mark_unsupported(f"{_ROLLOUT}name", "the engine is vLLM", "rollout.engine")
    set_engine_memory(t, t.read_number(f"{_ROLLOUT}gpu_memory_utilization"))
    prefix = f"{_ROLLOUT}engine_kwargs.vllm."
    for key in [key for key in t.given.values if key.startswith(prefix)]:
        name, *below = key.removeprefix(prefix).split(".")
        if name in RESERVED_ENGINE_ARGUMENTS or below:
            t.mark_unsupported(key, "it has a key of its own here, or is a section", "rollout.vllm.extra")
        else:
            t.set(f"rollout.vllm.extra.{name}", t.get(key))


def _set_run_options(t: Translation) -> None:
    every = "trainer.checkpoint.every_steps"
    if t.read_integer("trainer.save_freq") > 0:
        t.set(every, t.read_integer("trainer.save_freq"))
    else:
        t.mark_unsupported("trainer.save_freq", "a run always has checkpoints, every 10 steps unless told", every)
    t.set("eval.every_steps", max(0, t.read_integer("trainer.test_freq")))
    t.set("eval.samples", max(1, t.read_integer(f"{_ROLLOUT}val_kwargs.n")))
    files = str(t.get("data.train_files"))
    name = "gsm8k" if "gsm8k" in files and "math" not in files.replace("gsm8k", "") else "math_verify"
    comment = "verl chooses by data_source; docs/verifiers.md has the rules"
    t.set("rewards.functions", [{"name": name, "weight": 1.0}], comment)
    for section in ("reward", "reward_model", "custom_reward_function"):
        buffer = f"{section}.reward_kwargs.overlong_buffer_cfg."
        set_overlong(t, f"{buffer}enable", f"{buffer}len", f"{buffer}penalty_factor")


VERL = load_system("verl", translate)
