"""TRL: YAML of `trl grpo --config`, Open R1's recipes, and scripts with `trl grpo --key value`
(github.com/huggingface/trl).

With B = `per_device_train_batch_size * num_processes`, a round of generation makes `B * steps_per_generation`
completions there, and an optimizer update takes `B * gradient_accumulation_steps`. One step here is the larger of the
two: a round, trained in several updates, or an update that takes several rounds, which one policy has generated. Its
groups are its completions / `num_generations`. The defaults are those of GRPOConfig and of transformers'
TrainingArguments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from async_grpo.errors import ConfigError
from async_grpo.lab.importers.parts import (
    set_data,
    set_kl,
    set_lengths,
    set_model,
    set_name,
    set_precision,
    set_recompute,
    set_rewards,
    set_sampling,
    set_schedule,
    set_steps,
    set_trackers,
)
from async_grpo.lab.importers.shell import LaunchScript, options
from async_grpo.lab.importers.translation import (
    ADAPTERS,
    GivenKeys,
    KeyRow,
    LeftOut,
    SourceSystem,
    Translation,
    parse_value,
    read_text,
    read_yaml,
)
from async_grpo.models.hub import hub_repo

_OBJECTIVE, _VLLM = "trainer.objective.", "rollout.vllm."
_IS = "vllm_importance_sampling_"
_HUB = "nothing is uploaded; async-grpo export makes a Hugging Face folder"
_LOGGED = "every step is logged"
_ELSEWHERE = "Megatron-core shares the model out"
REWARDS = {"accuracy_reward": "math_verify", "accuracy": "math_verify", "format": "format"}
"""`accuracy` and `format` are Open R1's."""
AGGREGATIONS = {
    "grpo": "seq_mean_token_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "dr_grpo": "seq_mean_token_sum_norm",
    "cispo": "token_mean",
    "sapo": "seq_mean_token_mean",
}

ROWS = (
    KeyRow("model_name_or_path", "model.path"),
    KeyRow("dtype", "model.precision", "", "bfloat16"),
    KeyRow("torch_dtype", "model.precision", "the older name"),
    KeyRow("model_revision", note="an id takes it: OWNER/NAME@REVISION", near="model.path"),
    KeyRow("dataset_name", "data.path", "a folder that async-grpo prepare makes"),
    KeyRow("dataset_prompt_column", "data.path", "async-grpo prepare --prompt-field"),
    KeyRow("dataset_*", note="async-grpo prepare reads the files of one split", near="data.path"),
    KeyRow("system_prompt", note="async-grpo prepare --template chat --system", near="data.path"),
    KeyRow("chat_template*", note="async-grpo prepare --template FILE", near="data.path"),
    KeyRow("per_device_train_batch_size", "groups_per_step, trainer.mini_batches", "completions of a device", 8),
    KeyRow("gradient_accumulation_steps", "groups_per_step, trainer.mini_batches", "", 1),
    KeyRow("steps_per_generation", "groups_per_step, trainer.mini_batches", "else gradient_accumulation_steps"),
    KeyRow("generation_batch_size", "groups_per_step, trainer.mini_batches", "completions of a round"),
    KeyRow("num_processes", "trainer.processes, groups_per_step", "accelerate's; --set num_processes=N", 1),
    KeyRow("num_generations", "group_size", "", 8),
    KeyRow("num_iterations", "trainer.num_iterations", "", 1),
    KeyRow("max_steps", "steps", "updates there", -1),
    KeyRow("num_train_epochs", "steps", "epochs * rows / groups_per_step, with --rows", 3.0),
    KeyRow("max_completion_length", "sampling.max_tokens", "", 512),
    KeyRow("max_prompt_length", "data.max_prompt_tokens", "an older key; TRL no longer bounds prompts", 512),
    KeyRow("vllm_max_model_length", f"{_VLLM}max_model_len", "else prompt + completion"),
    KeyRow("temperature", "sampling.temperature", "", 1.0),
    KeyRow("top_p", "sampling.top_p", "only 1", 1.0),
    KeyRow("top_k", "sampling.top_k", "only all tokens", 0),
    KeyRow("min_p", note="the distribution is never truncated", near="sampling.top_p"),
    KeyRow("repetition_penalty", note="the distribution is never changed", near="sampling"),
    KeyRow("generation_kwargs*", note="the distribution is never changed", near="sampling"),
    KeyRow("learning_rate", "trainer.optimizer.lr", "", 1e-6),
    KeyRow("lr_scheduler_type", "trainer.optimizer.schedule", "cosine_with_min_lr is cosine", "linear"),
    KeyRow("lr_scheduler_kwargs.min_lr", "trainer.optimizer.min_lr"),
    KeyRow("lr_scheduler_kwargs.min_lr_rate", "trainer.optimizer.min_lr", "times learning_rate"),
    KeyRow("warmup_ratio", "trainer.optimizer.warmup_steps", "a share of the steps", 0.0),
    KeyRow("warmup_steps", "trainer.optimizer.warmup_steps", "updates there", 0),
    KeyRow("weight_decay", "trainer.optimizer.weight_decay", "", 0.0),
    KeyRow("adam_beta1", "trainer.optimizer.beta1", "", 0.9),
    KeyRow("adam_beta2", "trainer.optimizer.beta2", "", 0.999),
    KeyRow("adam_epsilon", "trainer.optimizer.eps", "", 1e-8),
    KeyRow("max_grad_norm", "trainer.optimizer.clip_grad", "", 1.0),
    KeyRow("optim*", note="the optimizer is AdamW with fp32 masters", near="trainer.optimizer"),
    KeyRow("beta", f"{_OBJECTIVE}kl_beta", "estimated by k3, in the loss", 0.0),
    KeyRow("sync_ref_model", "trainer.reference.source", "only with ref_model_mixup_alpha 1", False),
    KeyRow("ref_model_mixup_alpha", "trainer.reference.source", "here the reference becomes the policy", 0.6),
    KeyRow("ref_model_sync_steps", "trainer.reference.sync_every", "", 512),
    KeyRow(
        "loss_type", f"{_OBJECTIVE}aggregation, {_OBJECTIVE}loss", "bnpo is token_mean over the whole batch", "dapo"
    ),
    KeyRow("importance_sampling_level", f"{_OBJECTIVE}loss", "sequence: gspo", "token"),
    KeyRow("epsilon", f"{_OBJECTIVE}clip_low", "", 0.2),
    KeyRow("epsilon_high", f"{_OBJECTIVE}clip_high", "else epsilon; minus 1 with cispo"),
    KeyRow("delta", f"{_OBJECTIVE}dual_clip", "the bound of the ratio where A < 0"),
    KeyRow("scale_rewards", f"{_OBJECTIVE}advantage", "group: grpo; none: dr_grpo; batch: lite_ppo", "group"),
    KeyRow("sapo_temperature_pos", f"{_OBJECTIVE}sapo_tau_positive", "", 1.0),
    KeyRow("sapo_temperature_neg", f"{_OBJECTIVE}sapo_tau_negative", "", 1.05),
    KeyRow("entropy_coef", f"{_OBJECTIVE}entropy_coef", "", 0.0),
    KeyRow(f"{_IS}correction", f"{_OBJECTIVE}corrections", "false: none", True),
    KeyRow(
        f"{_IS}mode", f"{_OBJECTIVE}corrections", "token_tis, icepop, seq_tis, or seq_tis with seq_mis", "sequence_mask"
    ),
    KeyRow(f"{_IS}clip_max", f"{_OBJECTIVE}corrections", "cap or high", 3.0),
    KeyRow(f"{_IS}clip_min", f"{_OBJECTIVE}corrections", "low; weights are not raised to it"),
    KeyRow("off_policy_mask_threshold", f"{_OBJECTIVE}corrections", "opsm"),
    KeyRow("mask_truncated_completions", "rewards.overlong", "true: filter", False),
    KeyRow("reward_funcs", "rewards.functions", "accuracy_reward is math_verify"),
    KeyRow("reward_weights", "rewards.functions"),
    KeyRow("reward_model_name_or_path", note="a model that judges is reached over HTTP", near="rewards.functions"),
    KeyRow("multi_objective_aggregation", note="rewards are summed, then normalised", near="rewards.functions"),
    KeyRow("gradient_checkpointing", "trainer.recompute", "true: full", True),
    KeyRow("gradient_checkpointing_kwargs*", note="full recomputes every layer", near="trainer.recompute"),
    KeyRow("bf16", "model.precision", "", True),
    KeyRow("use_cpu", "trainer.platform, rollout.vllm.platform", "", False),
    KeyRow("vllm_gpu_memory_utilization", f"{_VLLM}gpu_memory_utilization", "", 0.3),
    KeyRow("vllm_tensor_parallel_size", f"{_VLLM}tensor_parallel", "", 1),
    KeyRow("vllm_enable_sleep_mode", note="engines have devices of their own", near="launch.share_devices"),
    KeyRow("use_vllm", note="the engine is vLLM", near="rollout.engine"),
    KeyRow("vllm_*", note="servers are started with the run", near="rollout.servers"),
    KeyRow("seed", "seed", "", 42),
    KeyRow("shuffle_dataset", "data.shuffle", "", True),
    KeyRow("save_steps", "trainer.checkpoint.every_steps", "updates there", 500),
    KeyRow("save_total_limit", "trainer.checkpoint.keep"),
    KeyRow("save_strategy", note="a run always has checkpoints", near="trainer.checkpoint.every_steps"),
    KeyRow("eval_steps", "eval.every_steps", "updates there"),
    KeyRow("num_generations_eval", "eval.samples"),
    KeyRow("do_eval", note="a run is always evaluated before and after", near="eval.every_steps"),
    KeyRow("eval_*", note="a run is always evaluated before and after", near="eval.every_steps"),
    KeyRow("per_device_eval_batch_size", note="evaluations share the engine with training", near="eval.prompts"),
    KeyRow("report_to", "telemetry.trackers"),
    KeyRow("run_name", "name"),
    KeyRow("output_dir", "name", "its last part"),
    KeyRow("overwrite_output_dir", note="--fresh starts over", near="runs_dir"),
    KeyRow("resume_from_checkpoint", note="the same command resumes"),
    KeyRow("log*", note=_LOGGED, near="telemetry"),
    KeyRow(
        "num_completions_to_print", note="every eighth group is written to samples/", near="telemetry.samples_every"
    ),
    KeyRow("push_to_hub*", note=_HUB),
    KeyRow("hub_*", note=_HUB),
    KeyRow("use_peft", note=ADAPTERS, near="model.lora"),
    KeyRow("lora_*", note=ADAPTERS, near="model.lora"),
    KeyRow("load_in_*", note="weights have the precision that they are trained in", near="model.precision"),
    KeyRow("attn_implementation", note="kernels are chosen by the platform"),
    KeyRow("use_liger_kernel", note="kernels are chosen by the platform"),
    KeyRow("deepspeed*", note=_ELSEWHERE, near="trainer.tensor_parallel"),
    KeyRow("fsdp*", note=_ELSEWHERE, near="trainer.tensor_parallel"),
    KeyRow("accelerate_config", note=_ELSEWHERE, near="trainer.processes"),
    KeyRow("wandb_*", note="the tracker's own environment variables", near="telemetry.project"),
    KeyRow("env.*", note="environment variables are set where a run is started", near="rollout.vllm.environment"),
)


def read(file: Path, given: Mapping[str, str]) -> GivenKeys:
    """A YAML file, or a script with `trl grpo --key value`. Raises ConfigError."""
    if file.suffix in (".yaml", ".yml"):
        return read_yaml(file, given)
    script = LaunchScript(given)
    _, words = script.words(read_text(file), re.compile(r"grpo|.*grpo\w*\.py"))
    arguments = options(words)
    left_out = [LeftOut(key, "$...", reason) for key, text in arguments.items() if (reason := script.reason(key, text))]
    unknown = {item.key for item in left_out}
    values = {key: parse_value(text) for key, text in {**arguments, **given}.items() if key not in unknown}
    return GivenKeys(values, left_out)


def translate(t: Translation) -> None:
    """Translate a whole TRL configuration."""
    set_name(t, t.first("run_name", "output_dir"), "from-trl")
    _batches(t)
    set_model(t, t.get("model_name_or_path"))
    t.get("bf16")
    kind = t.first("torch_dtype", "dtype")
    set_precision(t, kind, t.get(kind))
    prompt, completion = t.integer("max_prompt_length"), t.integer("max_completion_length")
    field = (
        f"--format generic --prompt-field {t.get('dataset_prompt_column')} --answer-field ANSWER "
        if t.has("dataset_prompt_column")
        else ""
    )
    name, model = str(t.get("dataset_name")), t.settings["model.path"].value
    rows = "FILE" if hub_repo(Path(name), "dataset", "huggingface", "dataset_name") is None else f"--dataset {name}"
    set_data(t, name, f"{rows} {field}--max-prompt-tokens {prompt} --model {model}", prompt)
    t.set("data.shuffle", t.flag("shuffle_dataset"))
    set_lengths(t, prompt, completion, longest=t.integer("vllm_max_model_length"))
    set_sampling(t, "top_p", "top_k", "temperature")
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
    t.set("max_staleness", 0, "on policy, as there; 1 or 2 lets both sides work at once")
    t.set("group_size", group)
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


def _optimizer(t: Translation) -> None:
    names = {
        "learning_rate": "lr",
        "weight_decay": "weight_decay",
        "adam_beta1": "beta1",
        "adam_beta2": "beta2",
        "adam_epsilon": "eps",
        "max_grad_norm": "clip_grad",
    }
    for theirs, ours in names.items():
        t.set(f"trainer.optimizer.{ours}", t.number(theirs))
    lowest = t.number("lr_scheduler_kwargs.min_lr") or t.number("lr_scheduler_kwargs.min_lr_rate") * t.number(
        "learning_rate"
    )
    style = {"cosine_with_min_lr": "cosine", "constant_with_warmup": "constant"}.get(
        name := str(t.get("lr_scheduler_type")), name
    )
    set_schedule(t, style, t.steps("warmup_steps") or t.number("warmup_ratio"), key="lr_scheduler_type", min_lr=lowest)
    set_recompute(t, "full" if t.flag("gradient_checkpointing") else "none")


def _objective(t: Translation) -> None:
    kind, by_sequence = str(t.get("loss_type")), t.get("importance_sampling_level") == "sequence"
    if kind not in AGGREGATIONS:
        t.drop("loss_type", f"there is no loss {kind} here; dapo's is taken", f"{_OBJECTIVE}loss")
    loss = "gspo" if by_sequence else kind if kind in ("cispo", "sapo") else "ppo_clip"
    if by_sequence and kind != "grpo":
        t.drop("loss_type", "gspo is averaged over sequences", f"{_OBJECTIVE}aggregation")
    scale = {"true": "group", "false": "none"}.get(text := str(t.get("scale_rewards")).lower(), text)
    t.set(f"{_OBJECTIVE}preset", "grpo")
    t.set(f"{_OBJECTIVE}advantage", {"none": "dr_grpo", "batch": "lite_ppo"}.get(scale, "grpo"))
    t.set(f"{_OBJECTIVE}loss", loss)
    t.set(f"{_OBJECTIVE}aggregation", "seq_mean_token_mean" if by_sequence else AGGREGATIONS.get(kind, "token_mean"))
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
    if t.number("entropy_coef"):
        t.set(f"{_OBJECTIVE}entropy_coef", t.number("entropy_coef"))
    if t.number("beta") > 0 and t.flag("sync_ref_model"):
        if t.number("ref_model_mixup_alpha") == 1:
            t.set("trainer.reference.source", "synced")
            t.set("trainer.reference.sync_every", t.integer("ref_model_sync_steps"))
        else:
            t.drop(
                "sync_ref_model",
                "the reference is replaced, not mixed; it stays frozen",
                "trainer.reference.sync_every",
            )
    set_kl(t, t.number("beta"), "k3")


def _corrections(t: Translation) -> None:
    found: list[dict[str, Any]] = []
    mode, high = str(t.get(f"{_IS}mode")), t.number(f"{_IS}clip_max")
    low = t.number(f"{_IS}clip_min") or 1e-9
    if t.flag(f"{_IS}correction") and high > 0:
        found = {
            "token_truncate": [{"kind": "token_tis", "cap": high}],
            "token_mask": [{"kind": "icepop", "low": low, "high": high}],
            "sequence_truncate": [{"kind": "seq_tis", "cap": high}],
            "sequence_mask": [{"kind": "seq_tis", "cap": high}, {"kind": "seq_mis", "low": low, "high": high}],
        }.get(mode, [])
    if t.has("off_policy_mask_threshold"):
        found.append({"kind": "opsm", "limit": t.number("off_policy_mask_threshold")})
    if found:
        t.set("trainer.objective.corrections", found, f"{mode} there")


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
    set_rewards(t, "reward_funcs", kept, [weights.get(name, 1.0) for name in kept], REWARDS)


def _run(t: Translation) -> None:
    t.set("seed", t.integer("seed"))
    platform = "cpu" if t.flag("use_cpu") else "cuda"
    t.set("trainer.platform", platform)
    t.set(
        "trainer.processes",
        t.integer("num_processes"),
        "" if t.has("num_processes") else "as many as accelerate starts",
    )
    t.set("rollout.vllm.platform", platform)
    t.set("rollout.servers", 1, "with devices of its own, beside those of the trainer")
    if t.integer("vllm_tensor_parallel_size") > 1:
        t.set("rollout.vllm.tensor_parallel", t.integer("vllm_tensor_parallel_size"))
    if t.has("vllm_gpu_memory_utilization") and platform != "cpu":
        t.set(
            "rollout.vllm.gpu_memory_utilization",
            t.number("vllm_gpu_memory_utilization"),
            "0.8 or more is usual on devices of its own",
        )
    if t.get("save_strategy") in (None, "steps") and t.number("save_steps") >= 1:
        t.set("trainer.checkpoint.every_steps", t.steps("save_steps"))
    if t.integer("save_total_limit"):
        t.set("trainer.checkpoint.keep", t.integer("save_total_limit"))
    if t.number("eval_steps") >= 1:
        t.set("eval.every_steps", t.steps("eval_steps"))
    if t.integer("num_generations_eval"):
        t.set("eval.samples", t.integer("num_generations_eval"))
    if t.has("report_to"):
        set_trackers(t, "report_to", t.get("report_to"))


TRL = SourceSystem("trl", "TRL", "https://github.com/huggingface/trl", ROWS, read, translate)
