"""TRL: conversions of several keys. Those of one key are in tables/trl.toml.

With B = `per_device_train_batch_size * num_processes`, a round of generation there samples `B * steps_per_generation`
completions, and an optimizer update takes `B * gradient_accumulation_steps`. One step here is the larger of the two: a
round trained in several updates, or an update with several rounds sampled by one policy. The number of its groups is
its completions / `num_generations`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from async_grpo.errors import ConfigError
from async_grpo.lab.importers.conversions import (
    ON_POLICY,
    convert_keys,
    set_data,
    set_kl,
    set_lengths,
    set_rewards,
    set_sampling,
    set_schedule,
    set_steps,
)
from async_grpo.lab.importers.table import load_system
from async_grpo.lab.importers.translation import Translation
from async_grpo.models.hub import hub_repo

_OBJECTIVE = "trainer.objective."
_IS = "vllm_importance_sampling_"


def translate(t: Translation) -> None:
    """Translate a whole TRL configuration."""
    _set_batches(t)
    convert_keys(t)
    set_sampling(t, "")
    _set_data(t)
    set_lengths(t, longest=t.read_integer("vllm_max_model_length"))
    _set_optimizer(t)
    _set_objective(t)
    _set_corrections(t)
    _set_rewards(t)
    _set_run_options(t)


def _set_batches(t: Translation) -> None:
    group = t.read_integer("num_generations")
    processes = t.read_integer("num_processes")
    update = t.read_integer("per_device_train_batch_size") * processes
    per_step = t.read_integer("gradient_accumulation_steps")
    rounds = t.read_integer("steps_per_generation") or per_step
    if t.has("generation_batch_size"):
        rounds = t.read_integer("generation_batch_size") // update
    if update * rounds % group or not rounds:
        raise ConfigError(
            f"a round of generation has {update * rounds} completions (per_device_train_batch_size "
            f"{t.get('per_device_train_batch_size')} * num_processes {processes} * {rounds} steps), which are no whole "
            f"groups of num_generations ({group}). Say how many processes accelerate starts: --set num_processes=N"
        )
    completions = update * max(rounds, per_step)
    groups, rest = divmod(completions, group)
    updates = max(1, rounds // per_step)
    t.set("max_staleness", 0, ON_POLICY)
    shown = f"{completions} completions / {group}"
    if rest or max(rounds, per_step) % min(rounds, per_step):
        shown = (
            f"CHANGE ME: {shown}; there a round of {update * rounds} completions and an update of {update * per_step} "
            "are no multiples of each other"
        )
    elif rounds < per_step:
        shown = f"{shown}, the {per_step // rounds} rounds of generation of an update"
    t.set("groups_per_step", groups, shown)
    if updates > 1:
        t.set("trainer.mini_batches", min(updates, groups), "updates of a round of generation")
    passes = t.read_integer("num_iterations")
    if passes > 1:
        repeated = "CHANGE ME: there a round is repeated within an update, and an update has fewer prompts than here"
        t.set("trainer.num_iterations", passes, repeated if rounds < per_step else "")
    t.updates_per_step = updates * passes
    if t.read_integer("max_steps") > 0:
        t.set(
            "steps", t.read_steps("max_steps"), f"{t.read_integer('max_steps')} updates" if updates * passes > 1 else ""
        )
        t.mark_unsupported("num_train_epochs", "max_steps decides", "steps")
    else:
        set_steps(t, "num_train_epochs", groups)


def _set_data(t: Translation) -> None:
    field = ""
    if t.has("dataset_prompt_column"):
        field = f"--format generic --prompt-field {t.get('dataset_prompt_column')} --answer-field ANSWER "
    name = str(t.get("dataset_name"))
    model = t.settings["model.path"].value
    is_id = hub_repo(Path(name), "dataset", "huggingface", "dataset_name") is not None
    source = f"--dataset {name}" if is_id else "FILE"
    prompt = t.settings["data.max_prompt_tokens"].value
    set_data(t, name, f"{source} {field}--max-prompt-tokens {prompt} --model {model}")


def _set_optimizer(t: Translation) -> None:
    lowest = t.read_number("lr_scheduler_kwargs.min_lr")
    lowest = lowest or t.read_number("lr_scheduler_kwargs.min_lr_rate") * t.read_number("learning_rate")
    warmup = t.read_steps("warmup_steps") or t.read_number("warmup_ratio")
    name = str(t.get("lr_scheduler_type"))
    set_schedule(t, "lr_scheduler_type", t.source.choices["schedules"].get(name, name), warmup, lowest)
    if t.read_flag("gradient_checkpointing"):
        t.set("trainer.recompute", "full")


def _set_objective(t: Translation) -> None:
    kind = str(t.get("loss_type"))
    by_sequence = t.get("importance_sampling_level") == "sequence"
    reason = "there is no loss {} here; dapo's is taken"
    aggregation = t.choose_name("loss_type", "aggregations", "token_mean", reason, f"{_OBJECTIVE}loss")
    loss = "ppo_clip"
    if by_sequence:
        loss = "gspo"
    elif kind in ("cispo", "sapo"):
        loss = kind
    if by_sequence and kind != "grpo":
        t.mark_unsupported("loss_type", "gspo is averaged over sequences", f"{_OBJECTIVE}aggregation")
    scale = str(t.get("scale_rewards")).lower()
    scale = {"true": "group", "false": "none"}.get(scale, scale)
    t.set(f"{_OBJECTIVE}preset", "grpo")
    t.set(f"{_OBJECTIVE}advantage", {"none": "dr_grpo", "batch": "lite_ppo"}.get(scale, "grpo"))
    if t.get("multi_objective_aggregation") == "normalize_then_sum":
        t.set(f"{_OBJECTIVE}advantage", "gdpo")
        t.set(f"{_OBJECTIVE}advantage_norm", "batch")
        reason = "normalised over the samples of the batch there, over its tokens here"
        t.mark_approximated("multi_objective_aggregation", reason, f"{_OBJECTIVE}advantage_norm")
    t.set(f"{_OBJECTIVE}loss", loss)
    t.set(f"{_OBJECTIVE}aggregation", "seq_mean_token_mean" if by_sequence else aggregation)
    t.set(f"{_OBJECTIVE}prox", "recompute", "TRL's old_per_token_logps")
    high = t.read_number("epsilon_high") or t.read_number("epsilon")
    if loss == "sapo":
        t.set(f"{_OBJECTIVE}sapo_tau_positive", t.read_number("sapo_temperature_pos"))
        t.set(f"{_OBJECTIVE}sapo_tau_negative", t.read_number("sapo_temperature_neg"))
    elif loss == "cispo":
        t.set(f"{_OBJECTIVE}clip_high", high - 1 if high > 1 else high, "the ratio is at most 1 + clip_high")
    else:
        t.set(f"{_OBJECTIVE}clip_low", t.read_number("epsilon"))
        t.set(f"{_OBJECTIVE}clip_high", high)
    if t.has("delta") and loss == "ppo_clip":
        t.set(f"{_OBJECTIVE}dual_clip", t.read_number("delta"))
    if t.read_number("beta") > 0 and t.read_flag("sync_ref_model"):
        if t.read_number("ref_model_mixup_alpha") == 1:
            t.set("trainer.reference.source", "synced")
            t.set("trainer.reference.sync_every", t.read_integer("ref_model_sync_steps"))
        else:
            reason = "the reference is replaced, not mixed; it stays frozen"
            t.mark_unsupported("sync_ref_model", reason, "trainer.reference.sync_every")
    set_kl(t, t.read_number("beta"), "unbiased_k3" if t.read_flag("use_bias_correction_kl") else "k3")


def _set_corrections(t: Translation) -> None:
    corrections: list[dict[str, Any]] = []
    mode = str(t.get(f"{_IS}mode"))
    high = t.read_number(f"{_IS}clip_max")
    rule = t.source.choices["corrections"].get(mode)
    is_on = t.read_flag(f"{_IS}correction") and high > 0
    if is_on and rule is None:
        t.mark_unsupported(
            f"{_IS}mode", "weights are clamped or masked, per token or sequence", f"{_OBJECTIVE}corrections"
        )
    elif is_on and rule is not None:
        low = {"low": t.read_number(f"{_IS}clip_min")} if t.read_number(f"{_IS}clip_min") > 0 else {}
        corrections.append({"kind": "weight", **rule, **low, "high": high})
    if t.has("off_policy_mask_threshold"):
        corrections.append({"kind": "opsm", "limit": t.read_number("off_policy_mask_threshold")})
    if corrections:
        t.set(f"{_OBJECTIVE}corrections", corrections, f"{mode} there")


def _set_rewards(t: Translation) -> None:
    names = t.get("reward_funcs") or []
    if not isinstance(names, list):
        names = [names]
    soft = "get_soft_overlong_punishment"
    if soft in names:
        t.set("rewards.overlong", "soft", "there counted from 1280 tokens, here from sampling.max_tokens")
        t.set("rewards.soft_overlong_tokens", min(256, t.settings["sampling.max_tokens"].value - 1))
    elif t.read_flag("mask_truncated_completions"):
        t.set("rewards.overlong", "filter")
    weights = dict(zip(names, t.get("reward_weights") or [], strict=False))
    kept = [name for name in names if name != soft]
    set_rewards(t, "reward_funcs", kept, [weights.get(name, 1.0) for name in kept], t.source.choices["rewards"])


def _set_run_options(t: Translation) -> None:
    platform = "cpu" if t.read_flag("use_cpu") else "cuda"
    t.set("trainer.platform", platform)
    t.set("rollout.vllm.platform", platform)
    comment = "" if t.has("num_processes") else "as many as accelerate starts"
    t.set("trainer.processes", t.read_integer("num_processes"), comment)
    t.set("rollout.servers", 1, "with devices of its own, beside those of the trainer")
    share = "vllm_gpu_memory_utilization"
    if t.has(share) and platform != "cpu":
        t.set("rollout.vllm.gpu_memory_utilization", t.read_number(share), "0.8 or more is usual on devices of its own")
    if t.get("save_strategy") in (None, "steps") and t.read_number("save_steps") >= 1:
        t.set("trainer.checkpoint.every_steps", t.read_steps("save_steps"))


TRL = load_system("trl", translate)
