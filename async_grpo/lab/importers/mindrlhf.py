"""MindRLHF: conversions of several keys. Those of one key are in tables/mindrlhf.toml.

One step there samples `chunk_size * num_rollouts * (data_parallel of generation)` prompts (grpo_experience_maker.py),
and trains on them in updates of `batch_size * data_parallel * micro_batch_num` packed rows (train_worker.py).
"""

from __future__ import annotations

import math
from typing import Any

from async_grpo.lab.importers.conversions import (
    ON_POLICY,
    convert_keys,
    set_data,
    set_kl,
    set_lengths,
    set_precision,
    set_rewards,
    set_sampling,
    set_schedule,
    set_steps,
    set_trackers,
)
from async_grpo.lab.importers.devices import parallel_size
from async_grpo.lab.importers.table import load_system
from async_grpo.lab.importers.translation import Translation
from async_grpo.rewards.registry import BUILTIN

_RL = "rl_config."
_ACTOR = "actor_config."
_REF = "ref_config."
_GENERATE = "generate_config."
_REWARD = "reward_config.verifier_"
_TRAIN_LAYOUT = f"{_ACTOR}parallel_config."
_GENERATE_LAYOUT = f"{_GENERATE}parallel_config."
_OBJECTIVE = "trainer.objective."


def translate(t: Translation) -> None:
    """Translate a whole MindRLHF configuration."""
    t.set("name", "from-mindrlhf")
    set_precision(t, "", "bfloat16")
    replicas = t.read_integer(f"{_GENERATE_LAYOUT}data_parallel")
    groups = t.read_integer(f"{_RL}num_rollouts") * t.read_integer(f"{_RL}chunk_size") * replicas
    t.set("groups_per_step", groups, "chunk_size * num_rollouts * data_parallel of generation")
    t.set("max_staleness", 0, ON_POLICY)
    set_steps(t, f"{_RL}epochs", groups)
    convert_keys(t)
    set_sampling(t, f"{_GENERATE}sampling_config.")
    _set_updates(t, groups)

    prompt = t.settings["data.max_prompt_tokens"].value
    described = f"what {t.get(f'{_RL}dataset_file')} was made of"
    set_data(t, described, f"FILE.json --max-prompt-tokens {prompt} --model MODEL")
    set_lengths(t, micro_tokens=t.read_integer(f"{_RL}seq_length"))
    _set_schedule(t)
    _set_objective(t)
    _set_rewards(t)
    _set_devices(t, replicas)
    set_trackers(t, f"{_RL}tensorboard", ["tensorboard"] if t.read_flag(f"{_RL}tensorboard") else [])


def _set_updates(t: Translation, groups: int) -> None:
    micro = (
        t.read_integer(f"{_TRAIN_LAYOUT}micro_batch_num") if t.read_integer(f"{_TRAIN_LAYOUT}pipeline_stage") > 1 else 1
    )
    rows = t.read_integer(f"{_RL}batch_size") * t.read_integer(f"{_TRAIN_LAYOUT}data_parallel") * micro
    samples = rows * max(1, t.read_integer(f"{_RL}pack_num"))
    updates = max(1, groups * t.settings["group_size"].value // samples)
    t.updates_per_step = updates * t.read_integer(f"{_RL}num_iterations")
    if updates > 1:
        t.set("trainer.mini_batches", min(updates, groups), "updates of a step")
    if updates > groups:
        fewer = f"{updates} updates of {samples} samples there, {groups} here: no update has less than a group"
        t.mark_approximated(f"{_RL}batch_size", fewer, "trainer.mini_batches")


def _set_schedule(t: Translation) -> None:
    """Set the learning-rate schedule.

    There the rate falls over `decay_steps` updates, regardless of the length of the run. Here it falls over the run, so
    the minimum is set to the rate that a run of this length would reach there.
    """
    section = f"{_ACTOR}lr_schedule."
    style = str(t.get(f"{section}lr_decay_style"))
    lr = t.read_number(f"{section}lr")
    lowest = t.read_number(f"{section}min_lr")
    decay = t.read_integer(f"{section}decay_steps")
    updates = t.settings["steps"].value * t.updates_per_step
    fallen = min(1.0, updates / decay) if decay else 1.0
    if fallen < 1 and style in ("linear", "cosine"):
        remaining = 1 - fallen if style == "linear" else (1 + math.cos(math.pi * fallen)) / 2
        lowest += (lr - lowest) * remaining
        reason = f"{updates} updates of the run are {fallen:.2%} of the decay; the rate falls to {lowest:.3g}"
        t.mark_approximated(f"{section}decay_steps", reason, "trainer.optimizer.min_lr")
    set_schedule(t, f"{section}lr_decay_style", style, t.read_steps(f"{section}warmup_step"), lowest)


def _set_objective(t: Translation) -> None:
    clips = t.read_flag(f"{_RL}enable_oldpolicy")
    comment = "" if clips else "enable_oldpolicy is false there, and nothing is clipped"
    t.set(f"{_OBJECTIVE}preset", "grpo")
    t.set(f"{_OBJECTIVE}prox", "recompute", comment)
    if t.read_number(f"{_RL}beta") > 0 and t.read_flag(f"{_REF}sync_ref_model"):
        t.set("trainer.reference.source", "synced")
        t.set("trainer.reference.sync_every", t.read_integer(f"{_REF}ref_model_sync_steps"))
    set_kl(t, t.read_number(f"{_RL}beta"), "k3")


def _set_rewards(t: Translation) -> None:
    known = {name: name for name in BUILTIN}
    if "qwen" in str(t.get(f"{_RL}model_name")):
        known["accuracy_reward"] = "qwen_accuracy_reward"
    names = _split_list(t.get(f"{_REWARD}function"))
    weights = [float(weight) for weight in _split_list(t.get(f"{_REWARD}weight"))]
    set_rewards(t, f"{_REWARD}function", names, weights, known)


def _split_list(value: Any) -> list[Any]:
    """Return the items of a list, or of a text with commas."""
    return value.split(",") if isinstance(value, str) else list(value)


def _set_devices(t: Translation, replicas: int) -> None:
    if parallel_size(t, "tensor") > 1:
        t.set("trainer.sequence_parallel", t.read_flag(f"{_TRAIN_LAYOUT}use_seq_parallel"))
    if t.read_flag(f"{_ACTOR}recompute_config.select_recompute"):
        t.set("trainer.recompute", "selective")
    elif t.read_flag(f"{_ACTOR}recompute_config.recompute"):
        t.set("trainer.recompute", "full")

    ranks = t.read_integer(f"{_TRAIN_LAYOUT}data_parallel")
    for kind in ("tensor", "pipeline", "context"):
        ranks *= parallel_size(t, kind)
    devices = replicas * t.read_integer(f"{_GENERATE_LAYOUT}model_parallel")
    t.set("trainer.platform", "npu")
    t.set("trainer.processes", ranks, "data * model * pipeline * context parallel")
    t.set("rollout.vllm.platform", "ascend")
    t.set(
        "rollout.servers",
        replicas,
        f"{devices} devices in addition to the trainer's; there both sides took turns on them",
    )


MINDRLHF = load_system("mindrlhf", translate)
