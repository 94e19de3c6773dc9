"""verl: YAML, and launch scripts whose overrides follow `python3 -m verl...` (github.com/verl-project/verl).

The keys and defaults are those of verl/trainer/config and of verl/experimental/fully_async_policy. `train_batch_size`
and `ppo_mini_batch_size` count prompts. In the fully asynchronous recipe one synchronisation of the weights follows
`require_batches * trigger_parameter_sync_step` mini-batches; that is one step here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

from async_grpo.config.rollout import OURS
from async_grpo.lab.importers.parts import (
    KL_ESTIMATORS,
    DeviceCount,
    block_of,
    set_data,
    set_devices,
    set_eager,
    set_engine_memory,
    set_group_size,
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
from async_grpo.lab.importers.shell import LaunchScript
from async_grpo.lab.importers.translation import (
    GivenKeys,
    LeftOut,
    SourceSystem,
    Translation,
    parse_value,
    read_text,
    read_yaml,
)
from async_grpo.lab.importers.verl_keys import ACTOR, ALGORITHM, ASYNC, DATA, REWARD, ROLLOUT, ROWS

ADVANTAGES = {
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "opo": "opo",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}
LOSSES = {
    "vanilla": "ppo_clip",
    "gspo": "gspo",
    "sapo": "sapo",
    "geo_mean": "gmpo",
    "cispo": "cispo",
    "dppo_tv": "dppo_tv",
}
_PROGRAM = re.compile(r"(recipe|verl)\.[\w.]+|.*main_ppo\.py")
_MEGATRON = f"{ACTOR}megatron."
_CORRECTION = f"{ALGORITHM}rollout_correction."


def read(file: Path, given: Mapping[str, str]) -> GivenKeys:
    """A YAML file or, by its name, a launch script. Raises ConfigError."""
    if file.suffix in (".yaml", ".yml"):
        return read_yaml(file, given)
    script = LaunchScript(given)
    program, words = script.words(read_text(file), _PROGRAM)
    values, left_out = {}, []
    for word in words:
        key, equals, text = word.lstrip("+~").partition("=")
        if reason := script.reason(key, text):
            left_out.append(LeftOut(key, "$...", reason))
        elif equals:
            values[key] = parse_value(text)
    doubts = [
        LeftOut(name, script.variables[name], "an if, a case or a loop may change it; --set says what holds for you")
        for name in script.doubtful()
    ]
    return GivenKeys(
        {**values, **{k: parse_value(v) for k, v in given.items() if "." in k}}, left_out + doubts, program
    )


def translate(t: Translation) -> None:
    """Translate a whole verl configuration."""
    set_name(t, "trainer.experiment_name", "from-verl")
    _batches(t)
    set_model(t, t.get("actor_rollout_ref.model.path"))
    set_precision(t, f"{ROLLOUT}dtype", t.get(f"{ROLLOUT}dtype"))
    _data_and_lengths(t)
    set_sampling(t, f"{ROLLOUT}top_p", f"{ROLLOUT}top_k", f"{ROLLOUT}temperature")
    _optimizer(t)
    _objective(t)
    _corrections(t)
    _devices(t)
    _engine(t)
    _run(t)


def is_fully_async(t: Translation) -> bool:
    """Whether the file is for the fully asynchronous recipe."""
    return any(key.startswith(ASYNC) for key in t.given.values) or "fully_async" in t.given.entry


def _batches(t: Translation) -> None:
    mini = t.integer(f"{ACTOR}ppo_mini_batch_size")
    if is_fully_async(t):
        updates = t.integer(f"{ASYNC}require_batches") * t.integer(f"{ASYNC}trigger_parameter_sync_step")
        groups, fraction = mini * updates, t.number(f"{ASYNC}staleness_threshold")
        t.drop(f"{DATA}train_batch_size", "the fully asynchronous recipe ignores it", "groups_per_step")
        t.set(
            "max_staleness",
            math.ceil(fraction),
            f"there (1 + {fraction:g}) * {groups} prompts between two updates of the servers",
        )
        if t.integer("rollout.total_rollout_steps"):
            t.set("steps", max(1, t.integer("rollout.total_rollout_steps") // groups), f"prompts in all / {groups}")
        t.set("rollout.interruption", "recompute" if t.flag(f"{ASYNC}partial_rollout") else "drain")
    else:
        groups = t.integer(f"{DATA}train_batch_size")
        updates = max(1, math.ceil(groups / mini))
        one_step_off = "one_step_off" in t.given.entry
        t.set(
            "max_staleness",
            int(one_step_off),
            "" if one_step_off else "on policy, as there; 1 or 2 lets both sides work at once",
        )
        if t.has("trainer.total_training_steps"):
            t.set("steps", t.integer("trainer.total_training_steps"))
            t.drop("trainer.total_epochs", "trainer.total_training_steps decides", "steps")
    t.set("groups_per_step", groups, "prompts")
    if updates > 1:
        t.set("trainer.mini_batches", updates, f"updates of {mini} prompts")
    if "steps" not in t.settings:
        set_steps(t, "trainer.total_epochs", groups)
    set_group_size(t, f"{ROLLOUT}n")
    if t.integer(f"{ACTOR}ppo_epochs") > 1:
        t.set("trainer.num_iterations", t.integer(f"{ACTOR}ppo_epochs"))


def _data_and_lengths(t: Translation) -> None:
    prompt, completion = t.integer(f"{DATA}max_prompt_length"), t.integer(f"{DATA}max_response_length")
    files = str(t.get(f"{DATA}train_files"))
    held_out = f" --held-out-from {t.get(f'{DATA}val_files')}" if t.has(f"{DATA}val_files") else ""
    set_data(t, files, f"FILE.parquet --format dapo --max-prompt-tokens {prompt} --model MODEL{held_out}", prompt)
    t.set("data.shuffle", t.flag(f"{DATA}shuffle"))
    if t.has(f"{DATA}seed"):
        t.set("seed", t.integer(f"{DATA}seed"))
    micro = 0
    if t.flag(f"{ACTOR}use_dynamic_bsz"):
        micro = t.integer(f"{ACTOR}ppo_max_token_len_per_gpu")
    elif t.has(f"{ACTOR}ppo_micro_batch_size_per_gpu"):
        micro = t.integer(f"{ACTOR}ppo_micro_batch_size_per_gpu") * (prompt + completion)
    set_lengths(t, prompt, completion, longest=t.integer(f"{ROLLOUT}max_model_len"), micro_tokens=micro)


def _optimizer(t: Translation) -> None:
    optim, keys = f"{ACTOR}optim.", "trainer.optimizer."
    t.set(f"{keys}lr", t.number(f"{optim}lr"))
    t.set(f"{keys}weight_decay", t.number(f"{optim}weight_decay"))
    betas = t.get(f"{optim}betas")
    t.set(f"{keys}beta1", float(betas[0]))
    t.set(f"{keys}beta2", float(betas[1]))
    t.set(f"{keys}clip_grad", t.number(t.first(f"{ACTOR}grad_clip", f"{optim}clip_grad")))
    style = t.first(f"{optim}lr_decay_style", f"{optim}warmup_style", f"{optim}lr_scheduler_type")
    lowest = t.number(f"{optim}min_lr") or t.number(f"{optim}min_lr_ratio") * t.number(f"{optim}lr")
    warmup = max(t.number(f"{optim}lr_warmup_steps"), 0) or t.number(f"{optim}lr_warmup_steps_ratio")
    set_schedule(t, str(t.get(style)), warmup, key=style, min_lr=lowest)
    if t.flag(f"{optim}override_optimizer_config.optimizer_cpu_offload"):
        t.set(f"{keys}offload", True)


def _objective(t: Translation) -> None:
    keys = "trainer.objective."
    estimator = str(t.get(f"{ALGORITHM}adv_estimator"))
    advantage = ADVANTAGES.get(estimator, "grpo")
    if estimator not in ("grpo", *ADVANTAGES):
        t.drop(
            f"{ALGORITHM}adv_estimator",
            "this project trains with group-relative advantages, without a critic",
            f"{keys}advantage",
        )
    if advantage == "grpo" and not t.flag(f"{ALGORITHM}norm_adv_by_std_in_grpo"):
        advantage = "dr_grpo"
    mode = str(t.get(f"{ACTOR}policy_loss.loss_mode"))
    if mode not in LOSSES:
        t.drop(f"{ACTOR}policy_loss.loss_mode", f"there is no loss {mode} here; ppo_clip is taken", f"{keys}loss")
    loss = LOSSES.get(mode, "ppo_clip")
    t.set(f"{keys}preset", "grpo")
    t.set(f"{keys}advantage", advantage)
    t.set(f"{keys}loss", loss)
    _aggregation(t, loss)
    _clip(t, loss)
    t.set(f"{keys}entropy_coef", t.number(f"{ACTOR}entropy_coeff"))
    if t.flag(f"{ALGORITHM}use_kl_in_reward"):
        _kl(t, f"{ALGORITHM}kl_ctrl.kl_coef", f"{ALGORITHM}kl_penalty", in_reward=True)
    elif t.flag(f"{ACTOR}use_kl_loss"):
        _kl(t, f"{ACTOR}kl_loss_coef", f"{ACTOR}kl_loss_type", in_reward=False)


def _aggregation(t: Translation, loss: str) -> None:
    key = f"{ACTOR}loss_agg_mode"
    mode = str(t.get(key)).replace("-", "_")
    if loss in ("gspo", "gmpo") and mode != "seq_mean_token_mean":
        t.drop(key, f"{loss} has one ratio a sequence and is averaged over sequences", "trainer.objective.aggregation")
        mode = "seq_mean_token_mean"
    t.set("trainer.objective.aggregation", mode)
    scale = f"{ACTOR}loss_scale_factor"
    if (
        mode == "seq_mean_token_sum_norm"
        and t.has(scale)
        and t.number(scale) != t.settings["sampling.max_tokens"].value
    ):
        t.drop(
            scale,
            "the divisor is sampling.max_tokens; scale the learning rate instead",
            "trainer.objective.aggregation",
        )
    elif t.has(scale):
        t.get(scale)


def _clip(t: Translation, loss: str) -> None:
    keys = "trainer.objective."
    if loss == "sapo":
        t.set(f"{keys}sapo_tau_positive", t.number(f"{ACTOR}tau_pos"))
        t.set(f"{keys}sapo_tau_negative", t.number(f"{ACTOR}tau_neg"))
        return
    t.set(f"{keys}clip_low", t.number(f"{ACTOR}clip_ratio_low"))
    t.set(f"{keys}clip_high", t.number(f"{ACTOR}clip_ratio_high"))
    if loss == "ppo_clip":
        t.set(f"{keys}dual_clip", t.number(f"{ACTOR}clip_ratio_c"))
    elif loss == "dppo_tv":
        t.set(f"{keys}behaviour_cap", t.number(f"{ACTOR}clip_ratio_c") if t.has(f"{ACTOR}clip_ratio_c") else 20.0)


def _kl(t: Translation, weight: str, estimator: str, *, in_reward: bool) -> None:
    name = str(t.get(estimator))
    base = KL_ESTIMATORS.get(name.removesuffix("+"), "")
    if name.endswith("+"):
        base = {"k3": "k3+", "k2": "k2"}.get(base, "")
    if not base and t.number(weight) > 0:
        t.drop(estimator, "estimators are k1, k2, k3 and k3+; k3 is taken", "trainer.objective.kl_estimator")
    if str(t.get(f"{ALGORITHM}kl_ctrl.type")) != "fixed":
        t.drop(f"{ALGORITHM}kl_ctrl.type", "the weight is fixed", "trainer.objective.kl_beta")
    set_kl(t, t.number(weight), base or "k3", in_reward=in_reward)


def _corrections(t: Translation) -> None:
    key, loss = "trainer.objective.prox", t.settings["trainer.objective.loss"].value
    bypass = t.flag(f"{_CORRECTION}bypass_mode") if t.has(f"{_CORRECTION}bypass_mode") else is_fully_async(t)
    if bypass and t.get(f"{_CORRECTION}loss_type") == "reinforce":
        t.drop(f"{_CORRECTION}loss_type", "the ratio is clipped here", "trainer.objective.loss")
    t.set(
        key,
        "behaviour" if bypass or loss == "dppo_tv" else "recompute",
        "bypass_mode" if bypass else "verl's old_log_prob",
    )
    found: list[dict[str, object]] = []
    level, threshold = t.get(f"{_CORRECTION}rollout_is"), str(t.get(f"{_CORRECTION}rollout_is_threshold"))
    if level and (bypass or loss == "dppo_tv"):
        t.drop(
            f"{_CORRECTION}rollout_is", "the ratio already is the importance weight", "trainer.objective.corrections"
        )
    elif level == "token" and "_" in threshold:
        low, high = map(float, threshold.split("_"))
        found.append({"kind": "icepop", "low": low, "high": high})
    elif level:
        found.append({"kind": "token_tis" if level == "token" else "seq_tis", "cap": float(threshold.split("_")[-1])})
    rejection = {"seq_sum_k1": "seq_mis", "seq_mean_k1": "geo_rs"}.get(str(t.get(f"{_CORRECTION}rollout_rs")))
    if rejection:
        low_text, _, high_text = str(t.get(f"{_CORRECTION}rollout_rs_threshold")).rpartition("_")
        high = float(high_text)
        found.append({"kind": rejection, "low": float(low_text) if low_text else 1 / high, "high": high})
    else:
        t.drop(
            f"{_CORRECTION}rollout_rs",
            "sequences are rejected by seq_sum_k1 (seq_mis) or seq_mean_k1 (geo_rs)",
            "trainer.objective.corrections",
        )
    if found:
        t.set("trainer.objective.corrections", found)


def _devices(t: Translation) -> None:
    platform = str(t.get("trainer.device"))
    tp, pp = (t.integer(f"{_MEGATRON}{kind}_model_parallel_size") for kind in ("tensor", "pipeline"))
    megatron = any(key.startswith(_MEGATRON) for key in t.given.values)
    context_key = f"{_MEGATRON}context_parallel_size"
    if not megatron:
        context_key = t.first(
            f"{ACTOR}fsdp_config.ulysses_sequence_parallel_size", f"{ACTOR}ulysses_sequence_parallel_size"
        )
    cp, ep = t.integer(context_key) or 1, t.integer(f"{_MEGATRON}expert_model_parallel_size")
    sizes = {"tensor_parallel": tp, "pipeline_parallel": pp, "context_parallel": cp, "expert_parallel": ep}
    for name, size in sizes.items():
        if size > 1:
            t.set(f"trainer.{name}", size)
    if megatron and tp > 1:
        t.set("trainer.sequence_parallel", t.flag(f"{_MEGATRON}sequence_parallel"))
    recompute = f"{_MEGATRON}override_transformer_config.recompute_granularity"
    checkpointing = t.flag("actor_rollout_ref.model.enable_gradient_checkpointing")
    set_recompute(t, str(t.get(recompute) or "none") if megatron else "full" if checkpointing else "none")
    nodes, per_node = t.integer("trainer.nnodes"), t.integer("trainer.n_gpus_per_node")
    generating = 0
    if is_fully_async(t) or t.has("rollout.n_gpus_per_node"):
        generating = t.integer("rollout.nnodes") * t.integer("rollout.n_gpus_per_node")
    block, engine = block_of(tp, pp, cp, ep), t.integer(f"{ROLLOUT}tensor_model_parallel_size")
    known = platform if platform in ("cuda", "npu", "cpu") else "cuda"
    set_devices(t, DeviceCount(known, nodes, per_node, block, engine, generating))


def _engine(t: Translation) -> None:
    keys = "rollout.vllm."
    if t.get(f"{ROLLOUT}name") != "vllm":
        t.drop(f"{ROLLOUT}name", "the engine is vLLM", "rollout.engine")
    set_engine_memory(t, t.number(f"{ROLLOUT}gpu_memory_utilization"))
    t.set("rollout.max_concurrency", t.integer(f"{ROLLOUT}max_num_seqs"), "samples in flight in one engine")
    set_eager(t, t.flag(f"{ROLLOUT}enforce_eager"))
    if t.has(f"{ROLLOUT}max_num_batched_tokens"):
        t.set(f"{keys}extra.max_num_batched_tokens", t.integer(f"{ROLLOUT}max_num_batched_tokens"))
    prefix = f"{ROLLOUT}engine_kwargs.vllm."
    for key in [key for key in t.given.values if key.startswith(prefix)]:
        name, *below = key.removeprefix(prefix).split(".")
        if name in OURS or below:
            t.drop(key, "it has a key of its own here, or is a section", "rollout.vllm.extra")
        else:
            t.set(f"{keys}extra.{name}", t.get(key))


def _run(t: Translation) -> None:
    if t.integer("trainer.save_freq") > 0:
        t.set("trainer.checkpoint.every_steps", t.integer("trainer.save_freq"))
    else:
        t.drop(
            "trainer.save_freq",
            "a run always has checkpoints, every 10 steps unless told",
            "trainer.checkpoint.every_steps",
        )
    t.set("eval.every_steps", max(0, t.integer("trainer.test_freq")))
    t.set("eval.samples", max(1, t.integer(f"{ROLLOUT}val_kwargs.n")))
    if t.integer("trainer.max_actor_ckpt_to_keep"):
        t.set("trainer.checkpoint.keep", t.integer("trainer.max_actor_ckpt_to_keep"))
    set_trackers(t, "trainer.logger", t.get("trainer.logger"))
    t.set("telemetry.project", str(t.get("trainer.project_name")))
    if t.flag(f"{ALGORITHM}filter_groups.enable"):
        t.set("rollout.dynamic_sampling", True, "groups whose rewards are all equal are replaced")
    files = str(t.get(f"{DATA}train_files"))
    name = "gsm8k" if "gsm8k" in files and "math" not in files.replace("gsm8k", "") else "math_verify"
    set_rewards(t, f"{DATA}reward_fn_key", [name], [1.0], {name: name})
    t.set(
        "rewards.functions",
        [{"name": name, "weight": 1.0}],
        "verl chooses by data_source; docs/verifiers.md has the rules",
    )
    for place in REWARD:
        if t.flag(f"{place}enable") and t.integer(f"{place}len"):
            t.set("rewards.overlong", "soft")
            t.set("rewards.soft_overlong_tokens", t.integer(f"{place}len"))
            t.set("rewards.soft_overlong_factor", t.number(f"{place}penalty_factor") or 1.0)


VERL = SourceSystem(
    "verl",
    "verl",
    "https://github.com/verl-project/verl",
    ROWS,
    read,
    translate,
)
