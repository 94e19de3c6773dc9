"""MindSpeed-RL: conversions of several keys. Those of one key are in tables/mindspeed_rl.toml."""

from __future__ import annotations

import math

from async_grpo.config.launch import EvalConfig
from async_grpo.lab.importers.conversions import (
    ON_POLICY,
    convert_keys,
    convert_kl,
    set_data,
    set_lengths,
    set_overlong,
    set_rewards,
    set_sampling,
    set_schedule,
    set_trackers,
)
from async_grpo.lab.importers.devices import DeviceCount, parallel_size, set_devices, set_engine_memory
from async_grpo.lab.importers.table import load_system
from async_grpo.lab.importers.translation import Translation
from async_grpo.rewards.registry import BUILTIN

_TRAINING = "megatron_training."
_ACTOR = "actor_config."
_RL = "rl_config."
_GENERATE = "generate_config."
_OBJECTIVE = "trainer.objective."


def translate(t: Translation) -> None:
    """Translate a whole MindSpeed-RL configuration."""
    convert_keys(t)
    set_sampling(t, f"{_GENERATE}sampling_config.")
    _set_batches(t)
    _set_optimizer(t)
    _set_objective(t)
    _set_rewards(t)
    _set_devices(t)
    prompts = EvalConfig().prompts
    t.set("eval.prompts", prompts, "held-out prompts of an evaluation before and after, which the file lacks")


def _find_key(t: Translation, name: str) -> str:
    """Return the key in `actor_config` if the file has it, else that in `megatron_training`."""
    return t.first_present(f"{_ACTOR}{name}", f"{_TRAINING}{name}")


def _set_batches(t: Translation) -> None:
    groups = t.read_integer(f"{_TRAINING}global_batch_size")
    mini = t.read_integer(f"{_RL}mini_batch_size")
    if mini < groups:
        t.set("trainer.mini_batches", math.ceil(groups / mini), f"updates of {mini} prompts")
    age = t.read_integer(f"{_RL}partial_rollout_max_split") - 1
    t.set("max_staleness", age, "" if age else ON_POLICY)

    prompt = t.settings["data.max_prompt_tokens"].value
    completion = t.settings["sampling.max_tokens"].value
    path = t.get(f"{_TRAINING}data_path") or "the original JSON"
    set_data(t, f"what {path} was made of", f"FILE.json --max-prompt-tokens {prompt} --model MODEL")
    micro = t.read_integer(_find_key(t, "micro_batch_size")) * (prompt + completion)
    if t.read_flag(f"{_RL}use_dynamic_bsz") and t.has(f"{_RL}update_max_packing_token_size"):
        micro = t.read_integer(f"{_RL}update_max_packing_token_size")
    set_lengths(t, longest=t.read_integer(f"{_GENERATE}max_model_len"), micro_tokens=micro)


def _set_optimizer(t: Translation) -> None:
    style = _find_key(t, "lr_decay_style")
    warmup = t.read_number(_find_key(t, "lr_warmup_fraction"))
    min_lr = t.read_number(_find_key(t, "min_lr"))
    set_schedule(t, style, str(t.get(style)), warmup, min_lr)


def _set_objective(t: Translation) -> None:
    stage = str(t.get(f"{_TRAINING}stage"))
    low = f"{_RL}clip_ratio"
    high = f"{_RL}clip_ratio"
    if stage not in ("ray_grpo", "ray_dapo"):
        reason = "only ray_grpo and ray_dapo have a counterpart; ray_grpo is taken"
        t.mark_unsupported(f"{_TRAINING}stage", reason, f"{_OBJECTIVE}preset")
    is_dapo = stage == "ray_dapo"
    if is_dapo and t.read_flag(f"{_RL}clip_higher_enable"):
        low = f"{_RL}clip_ratio_low"
        high = f"{_RL}clip_ratio_high"
    by_sequence = is_dapo and not t.read_flag(f"{_RL}token_level_loss")
    if str(t.get(f"{_RL}adv_estimator")) != "group_norm":
        t.mark_unsupported(f"{_RL}adv_estimator", "there is no critic; grpo is taken", f"{_OBJECTIVE}advantage")
    aggregation = "seq_mean_token_mean" if by_sequence else "token_mean"

    t.set(f"{_OBJECTIVE}preset", "dapo" if is_dapo else "grpo")
    t.set(f"{_OBJECTIVE}loss", "ppo_clip")
    t.set(f"{_OBJECTIVE}aggregation", aggregation, "over the whole batch; there over a micro-batch")
    t.set(f"{_OBJECTIVE}prox", "recompute", "old_log_prob there")
    t.set(f"{_OBJECTIVE}clip_low", t.read_number(low))
    t.set(f"{_OBJECTIVE}clip_high", t.read_number(high))
    if is_dapo:
        t.mark_unsupported(f"{_RL}init_kl_coef", "the loss of ray_dapo has no KL term", f"{_OBJECTIVE}kl_beta")
        return
    in_reward = t.read_flag(f"{_RL}use_kl_in_reward")
    convert_kl(t, f"{_RL}init_kl_coef", f"{_RL}kl_penalty", f"{_RL}kl_ctrl_type", in_reward=in_reward)


def _set_rewards(t: Translation) -> None:
    names = t.get(f"{_RL}verifier_function")
    weights = t.get(f"{_RL}verifier_weight")
    set_rewards(t, f"{_RL}verifier_function", list(names), list(weights), {name: name for name in BUILTIN})
    buffer = f"{_RL}overlong_buffer"
    set_overlong(t, f"{buffer}_enable", buffer, f"{buffer}_penalty_factor")
    trackers = [name for name in ("tensorboard", "wandb", "swanlab") if t.read_flag(f"{_RL}use_{name}")]
    set_trackers(t, f"{_RL}use_tensorboard", trackers)


def _set_devices(t: Translation) -> None:
    if parallel_size(t, "tensor") > 1:
        t.set("trainer.sequence_parallel", t.read_flag(_find_key(t, "sequence_parallel")))
    devices = t.read_integer(f"{_RL}actor_resource.num_npus")
    engine = t.read_integer(f"{_GENERATE}infer_tensor_parallel_size")
    # A file has the devices of the whole Ray cluster; how many a machine has is in the launch script, and in its own
    # name: grpo_qwen25_32b_A2.yaml is for Atlas A2 machines.
    per_node = t.read_integer("NPUS_PER_NODE") or (8 if "_A2" in t.given.file_name else 16)
    nodes = max(1, math.ceil(devices / per_node))
    set_devices(t, DeviceCount("npu", nodes, devices // nodes, engine))
    if nodes > 1 and not t.has("NPUS_PER_NODE"):
        ranks = t.settings["trainer.processes"]
        assumed = f"{nodes} machines of {per_node}, or --set NPUS_PER_NODE=N"
        t.set("trainer.processes", ranks.value, f"{ranks.comment}; {assumed}")
    set_engine_memory(t, t.read_number(f"{_GENERATE}gpu_memory_utilization"))


MINDSPEED_RL = load_system("mindspeed-rl", translate)
