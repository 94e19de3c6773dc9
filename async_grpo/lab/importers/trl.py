"""TRL: what depends on several keys. tables/trl.toml has the others.

With B = `per_device_train_batch_size * num_processes`, a round of generation makes `B * steps_per_generation`
completions there, and an optimizer update takes `B * gradient_accumulation_steps`. One step here is the larger of the
two: a round, trained in several updates, or an update that takes several rounds, which one policy has generated. Its
groups are its completions / `num_generations`.
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
    _batches(t)
    convert_keys(t)
    set_sampling(t, "")
    _data(t)
    set_lengths(t, longest=t.integer("vllm_max_model_length"))
    _optimizer(t)
    _objective(t)
    _corrections(t)
    _rewards(t)
    _run(t)


def _batches(t: Translation) -> None:
    group, processes = t.integer("num_generations"), t.integer("num_processes")
    update = t.integer("per_device_train_batch_size") * processes
    per_step = t.integer("gradient_accumulation_steps")
    rounds = t.integer("steps_per_generation") or per_step
    if t.has("generation_batch_size"):
        rounds = t.integer("generation_batch_size") // update
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
    passes = t.integer("num_iterations")
    if passes > 1:
        repeated = "CHANGE ME: there a round is repeated within an update, and an update has fewer prompts than here"
        t.set("trainer.num_iterations", passes, repeated if rounds < per_step else "")
    t.updates_per_step = updates * passes
    if t.integer("max_steps") > 0:
        t.set("steps", t.steps("max_steps"), f"{t.integer('max_steps')} updates" if updates * passes > 1 else "")
        t.drop("num_train_epochs", "max_steps decides", "steps")
    else:
        set_steps(t, "num_train_epochs", groups)


def _data(t: Translation) -> None:
    field = ""
    if t.has("dataset_prompt_column"):
        field = f"--format generic --prompt-field {t.get('dataset_prompt_column')} --answer-field ANSWER "
    name, model = str(t.get("dataset_name")), t.settings["model.path"].value
    is_id = hub_repo(Path(name), "dataset", "huggingface", "dataset_name") is not None
    source = f"--dataset {name}" if is_id else "FILE"
    prompt = t.settings["data.max_prompt_tokens"].value
    set_data(t, name, f"{source} {field}--max-prompt-tokens {prompt} --model {model}")


def _optimizer(t: Translation) -> None:
    lowest = t.number("lr_scheduler_kwargs.min_lr")
    lowest = lowest or t.number("lr_scheduler_kwargs.min_lr_rate") * t.number("learning_rate")
    warmup = t.steps("warmup_steps") or t.number("warmup_ratio")
    name = str(t.get("lr_scheduler_type"))
    set_schedule(t, "lr_scheduler_type", t.source.choices["schedules"].get(name, name), warmup, lowest)
    if t.flag("gradient_checkpointing"):
        t.set("trainer.recompute", "full")


def _objective(t: Translation) -> None:
    kind, by_sequence = str(t.get("loss_type")), t.get("importance_sampling_level") == "sequence"
    reason = "there is no loss {} here; dapo's is taken"
    aggregation = t.choose("loss_type", "aggregations", "token_mean", reason, f"{_OBJECTIVE}loss")
    loss = "gspo" if by_sequence else kind if kind in ("cispo", "sapo") else "ppo_clip"
    if by_sequence and kind != "grpo":
        t.drop("loss_type", "gspo is averaged over sequences", f"{_OBJECTIVE}aggregation")
    scale = {"true": "group", "false": "none"}.get(text := str(t.get("scale_rewards")).lower(), text)
    t.set(f"{_OBJECTIVE}preset", "grpo")
    t.set(f"{_OBJECTIVE}advantage", {"none": "dr_grpo", "batch": "lite_ppo"}.get(scale, "grpo"))
    if t.get("multi_objective_aggregation") == "normalize_then_sum":
        t.set(f"{_OBJECTIVE}advantage", "gdpo")
        t.set(f"{_OBJECTIVE}advantage_norm", "batch")
        reason = "normalised over the samples of the batch there, over its tokens here"
        t.approximate("multi_objective_aggregation", reason, f"{_OBJECTIVE}advantage_norm")
    t.set(f"{_OBJECTIVE}loss", loss)
    t.set(f"{_OBJECTIVE}aggregation", "seq_mean_token_mean" if by_sequence else aggregation)
    t.set(f"{_OBJECTIVE}prox", "recompute", "TRL's old_per_token_logps")
    high = t.number("epsilon_high") or t.number("epsilon")
    if loss == "sapo":
        t.set(f"{_OBJECTIVE}sapo_tau_positive", t.number("sapo_temperature_pos"))
        t.set(f"{_OBJECTIVE}sapo_tau_negative", t.number("sapo_temperature_neg"))
    elif loss == "cispo":
        t.set(f"{_OBJECTIVE}clip_high", high - 1 if high > 1 else high, "the ratio is at most 1 + clip_high")
    else:
        t.set(f"{_OBJECTIVE}clip_low", t.number("epsilon"))
        t.set(f"{_OBJECTIVE}clip_high", high)
    if t.has("delta") and loss == "ppo_clip":
        t.set(f"{_OBJECTIVE}dual_clip", t.number("delta"))
    if t.number("beta") > 0 and t.flag("sync_ref_model"):
        if t.number("ref_model_mixup_alpha") == 1:
            t.set("trainer.reference.source", "synced")
            t.set("trainer.reference.sync_every", t.integer("ref_model_sync_steps"))
        else:
            reason = "the reference is replaced, not mixed; it stays frozen"
            t.drop("sync_ref_model", reason, "trainer.reference.sync_every")
    set_kl(t, t.number("beta"), "unbiased_k3" if t.flag("use_bias_correction_kl") else "k3")


def _corrections(t: Translation) -> None:
    corrections: list[dict[str, Any]] = []
    mode, high = str(t.get(f"{_IS}mode")), t.number(f"{_IS}clip_max")
    rule = t.source.choices["corrections"].get(mode)
    is_on = t.flag(f"{_IS}correction") and high > 0
    if is_on and rule is None:
        t.drop(f"{_IS}mode", "weights are clamped or masked, per token or sequence", f"{_OBJECTIVE}corrections")
    elif is_on and rule is not None:
        low = {"low": t.number(f"{_IS}clip_min")} if t.number(f"{_IS}clip_min") > 0 else {}
        corrections.append({"kind": "weight", **rule, **low, "high": high})
    if t.has("off_policy_mask_threshold"):
        corrections.append({"kind": "opsm", "limit": t.number("off_policy_mask_threshold")})
    if corrections:
        t.set(f"{_OBJECTIVE}corrections", corrections, f"{mode} there")


def _rewards(t: Translation) -> None:
    names = t.get("reward_funcs") or []
    names = names if isinstance(names, list) else [names]
    soft = "get_soft_overlong_punishment"
    if soft in names:
        t.set("rewards.overlong", "soft", "there counted from 1280 tokens, here from sampling.max_tokens")
        t.set("rewards.soft_overlong_tokens", min(256, t.settings["sampling.max_tokens"].value - 1))
    elif t.flag("mask_truncated_completions"):
        t.set("rewards.overlong", "filter")
    weights = dict(zip(names, t.get("reward_weights") or [], strict=False))
    kept = [name for name in names if name != soft]
    set_rewards(t, "reward_funcs", kept, [weights.get(name, 1.0) for name in kept], t.source.choices["rewards"])


def _run(t: Translation) -> None:
    platform = "cpu" if t.flag("use_cpu") else "cuda"
    t.set("trainer.platform", platform)
    t.set("rollout.vllm.platform", platform)
    comment = "" if t.has("num_processes") else "as many as accelerate starts"
    t.set("trainer.processes", t.integer("num_processes"), comment)
    t.set("rollout.servers", 1, "with devices of its own, beside those of the trainer")
    share = "vllm_gpu_memory_utilization"
    if t.has(share) and platform != "cpu":
        t.set("rollout.vllm.gpu_memory_utilization", t.number(share), "0.8 or more is usual on devices of its own")
    if t.get("save_strategy") in (None, "steps") and t.number("save_steps") >= 1:
        t.set("trainer.checkpoint.every_steps", t.steps("save_steps"))


TRL = load_system("trl", translate)
