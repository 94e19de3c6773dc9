"""Translations that several sources share: model, lengths, objective, devices, rewards, trackers, number of steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, get_args

from async_grpo.config.launch import TelemetryConfig
from async_grpo.config.trainer import VLLM_PLATFORMS
from async_grpo.lab.importers.translation import Translation
from async_grpo.models.hub import hub_repo
from async_grpo.models.shapes import SHAPES

KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3", "k3+": "k3+"}
"""Names of verl and MindSpeed-RL; `low_var_kl+` is `k3+`."""
SHARED_CACHE_BYTES = 4 << 30
"""KV cache of an engine that shares its devices with the trainer: no file has such a number."""
_TRACKERS = get_args(get_args(TelemetryConfig.model_fields["trackers"].annotation)[0])
NO_TRUNCATION = "here the log-probabilities are of the whole distribution; a truncated one would make the weights wrong"


def set_name(t: Translation, key: str, fallback: str) -> None:
    """Set the run's name from a name or a folder of the other system."""
    raw = PurePosixPath(str(t.get(key) or fallback)).name
    kept = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in raw).strip("-._")[:64]
    t.set("name", kept if kept.isascii() and kept else fallback)


def set_model(t: Translation, path: Any) -> None:
    """Set the policy, and its architecture if the name reveals it."""
    shown = str(Path(str(path)).expanduser()) if str(path or "").startswith("~") else str(path or "models/CHANGE-ME")
    folder = "yours to check: a Hugging Face folder with its tokenizer"
    is_id = hub_repo(Path(shown), "model", "huggingface", "model.path") is not None
    t.set("model.path", shown, "an id of Hugging Face; model.hub names the other hub" if is_id else folder)
    name = str(path or "").rstrip("/").rpartition("/")[2].lower().replace("_", "-").replace("qwen25", "qwen2.5")
    for suffix in ("-instruct", "-chat", "-base"):
        name = name.removesuffix(suffix)
    if name in SHAPES:
        t.set("model.architecture", name, "so that --dry-run can plan before the folder is there")


def set_data(t: Translation, described: Any, command: str, prompt_tokens: int) -> None:
    """Set the data to a folder that `async-grpo prepare` makes, because the formats differ."""
    t.set("data.kind", "jsonl")
    t.set("data.path", "data/prepared", f"make it of {described}: async-grpo prepare {command} --out data/prepared")
    t.set("data.max_prompt_tokens", prompt_tokens)


def set_lengths(t: Translation, prompt: int, completion: int, *, longest: int = 0, micro_tokens: int = 0) -> None:
    """Set the lengths of completion, sequence and micro-batch in tokens; 0 means not given. A micro-batch must hold the
    longest sequence."""
    t.set("sampling.max_tokens", completion)
    length = max(longest, completion + 1) if longest else prompt + completion
    t.set("rollout.vllm.max_model_len", length, "" if longest else f"prompt {prompt} + completion {completion}")
    tokens = micro_tokens or length
    raised = "raised to the longest sequence" if tokens < length else "tokens of one packed micro-batch"
    t.set("trainer.micro_batch_tokens", max(tokens, length), raised)


def set_sampling(t: Translation, top_p: str, top_k: str, temperature: str) -> None:
    """Set the temperature. Truncations of the distribution (top-p, top-k) are listed, because they have no
    counterpart."""
    if t.number(temperature) <= 0:
        t.drop(temperature, "completions for training are sampled, and greedy ones have no log-probability", "sampling")
    else:
        t.set("sampling.temperature", t.number(temperature))
    if t.has(top_p) and t.number(top_p) != 1:
        t.drop(top_p, NO_TRUNCATION, "sampling.top_p")
    if t.has(top_k) and t.integer(top_k) > 0:
        t.drop(top_k, NO_TRUNCATION, "sampling.top_k")


def set_kl(t: Translation, beta: float, estimator: str, *, in_reward: bool = False) -> None:
    """Set the KL term and the reference model that it needs; a weight of 0 sets nothing."""
    if beta <= 0:
        return
    t.set("trainer.objective.kl_beta", beta)
    t.set("trainer.objective.kl_estimator", estimator)
    t.set("trainer.objective.kl_in", "reward" if in_reward else "loss")
    if "trainer.reference.source" not in t.settings:
        t.set("trainer.reference.source", "frozen", "the first policy")


def set_schedule(t: Translation, style: str, warmup: float, *, key: str, min_lr: float = 0.0) -> None:
    """Set the learning-rate schedule. `warmup`: number of steps, or a share of all steps if below 1."""
    if style in ("constant", "linear", "cosine"):
        t.set("trainer.optimizer.schedule", style)
    else:
        t.drop(key, "the schedules are constant, linear and cosine", "trainer.optimizer.schedule")
    if min_lr and style in ("linear", "cosine"):
        t.set("trainer.optimizer.min_lr", float(f"{min_lr:.10g}"))
    if warmup > 0:
        steps = round(warmup * t.settings["steps"].value) if warmup < 1 else int(warmup)
        t.set("trainer.optimizer.warmup_steps", steps, "a share of the steps" if warmup < 1 else "")


def set_group_size(t: Translation, key: str) -> None:
    """Set the samples per prompt: at least 2, because advantages compare the samples of a group."""
    size = t.integer(key)
    t.set("group_size", max(2, size), "" if size >= 2 else f"CHANGE ME: {size} there; a group has at least 2 samples")


def set_steps(t: Translation, epochs: str, groups: int) -> None:
    """Set the steps from epochs if the number of rows is known, else 100 with a note."""
    number = t.number(epochs)
    if t.rows:
        t.set("steps", max(1, int(number * t.rows // groups)), f"{number:g} epochs of {t.rows} rows / {groups}")
        return
    t.set(
        "steps", 100, f"CHANGE ME: {number:g} epochs are {number:g} * rows / {groups} steps; --rows tells the importer"
    )
    t.drop(epochs, "the length of a run is given in steps; pass --rows N (rows of the data) to compute them", "steps")


@dataclass(frozen=True, slots=True)
class DeviceCount:
    """The devices of the other system and how it assigns them."""

    platform: str
    nodes: int
    per_node: int
    block: int
    """The number of ranks is a multiple of this: see `block_of`."""
    engine: int
    """Devices of one engine."""
    rollout_devices: int = 0
    """Devices that only generate; 0 means that trainer and engines take turns on the same devices."""


def block_of(tensor: int, pipeline: int, context: int, expert: int) -> int:
    """The smallest number of ranks that hold the model once with its experts distributed evenly."""
    return math.lcm(tensor * pipeline * context, pipeline * max(1, expert))


def set_devices(t: Translation, count: DeviceCount) -> None:
    """Set platform, ranks and servers. Devices on which both sides took turns are split: half train, half generate.

    On one machine that has too few devices for that, both sides share them (`launch.share_devices`): the run must not
    need more devices than the file has.
    """
    t.set("trainer.platform", count.platform)
    t.set("rollout.vllm.platform", VLLM_PLATFORMS[count.platform])
    if count.engine > 1:
        t.set("rollout.vllm.tensor_parallel", count.engine)
    total = count.nodes * count.per_node
    if count.rollout_devices:
        nodes = count.nodes if total % count.nodes == 0 else 1
        t.set("trainer.processes", total)
        _set_machines(t, nodes, max(1, count.rollout_devices // count.engine), on_other_machines=nodes > 1)
    elif count.nodes > 1:
        _split_machines(t, count)
    elif count.platform != "cpu" and count.block + count.engine > total:
        _share_devices(t, count, total)
    else:
        _split_devices(t, count, total)


def _split_devices(t: Translation, count: DeviceCount, total: int) -> None:
    """Half of the devices of one machine train, but at most as many as leave room for one engine."""
    most_ranks = max((total - count.engine) // count.block, 1) * count.block
    ranks = min(max(total // 2 // count.block, 1) * count.block, most_ranks)
    servers = max(1, (total - ranks) // count.engine)
    generating = servers * count.engine
    t.set(
        "trainer.processes",
        ranks,
        f"all {total} devices took turns there; here {ranks} train and {generating} generate",
    )
    t.set("rollout.servers", servers)


def _share_devices(t: Translation, count: DeviceCount, total: int) -> None:
    """All devices of one machine train, and all of them generate while no step is made."""
    note = ""
    if max(count.block, count.engine) > total:
        note = f"CHANGE ME: the file's parallel sizes need {max(count.block, count.engine)} devices, and it has {total}"
    t.set("trainer.processes", max(total // count.block, 1) * count.block, note)
    t.set("rollout.servers", max(1, total // count.engine))
    apart = (
        f"{count.block} for a trainer and {count.engine} for an engine are more than the {total} devices of the file"
    )
    t.set("launch.share_devices", "sleep", f"both sides take turns, as there: {apart}")
    t.set(
        "rollout.vllm.kv_cache_bytes",
        SHARED_CACHE_BYTES,
        "CHANGE ME: 4 GiB a device; --dry-run shows what a sample takes",
    )


def _split_machines(t: Translation, count: DeviceCount) -> None:
    """Half of the machines train, but at least as many as hold the model once."""
    nodes = max(1, count.nodes // 2)
    ranks = max(nodes * count.per_node // count.block, 1) * count.block
    nodes = max(nodes, math.ceil(ranks / count.per_node))
    if ranks % nodes:
        nodes = 1
    total = count.nodes * count.per_node
    generating = total - ranks
    note = f"all {total} devices took turns there; here {ranks} train and {generating} generate"
    if generating < count.engine:
        note = f"CHANGE ME: a trainer needs {ranks} of the file's {total} devices, which leaves none to generate"
    t.set("trainer.processes", ranks, note)
    _set_machines(t, nodes, max(1, generating // count.engine), on_other_machines=True)


def _set_machines(t: Translation, nodes: int, servers: int, *, on_other_machines: bool) -> None:
    """Set the machines of the trainer and the servers, which `async-grpo run` starts only where they are on its own
    machine."""
    if nodes > 1:
        t.set("trainer.nodes", nodes, "async-grpo trainer --node-rank R on each of them")
        t.set("trainer.rendezvous.address", "node0", "CHANGE ME: how the others reach the first node")
    if on_other_machines:
        how = "async-grpo rollout on the machines that generate, with redis.url"
        t.set("rollout.servers", 1, f"{servers} in all: {how}")
    else:
        t.set("rollout.servers", servers)


def set_engine_memory(t: Translation, share: float) -> None:
    """Set the engine's share of a device's memory; call it after `set_devices`."""
    comment = "the engine has its devices to itself here: 0.8 or more is usual"
    if "launch.share_devices" in t.settings:
        comment = "of a device that it shares with the trainer, as there"
    t.set("rollout.vllm.gpu_memory_utilization", share, comment)


def set_eager(t: Translation, eager: bool) -> None:
    """Set whether the engine runs without captured graphs, and say what that costs."""
    comment = "as there; false captures graphs, which is the default here on accelerators and faster" if eager else ""
    t.set("rollout.vllm.enforce_eager", eager, comment)


def set_rewards(
    t: Translation, key: str, names: Sequence[str], weights: Sequence[float], known: Mapping[str, str]
) -> None:
    """Set the reward functions by name. Unknown ones are listed. There is always at least one."""
    chosen = {}
    for name, weight in zip(names, [*weights, *[1.0] * len(names)], strict=False):
        if name in known:
            chosen[known[name]] = {"name": known[name], "weight": float(weight)}
    unknown = [name for name in names if name not in known]
    if unknown:
        shown = f"there is no verifier {', '.join(unknown)} here; give your own as module:attribute"
        t.drop(key, shown, "rewards.functions")
    comment = (
        "docs/verifiers.md has the exact rules" if chosen else "CHANGE ME: none of the file's functions is known here"
    )
    t.set("rewards.functions", list(chosen.values()) or [{"name": "math_verify", "weight": 1.0}], comment)


def set_trackers(t: Translation, key: str, names: Any) -> None:
    """Set the trackers by name. `console` and its like are ignored: every run does that."""
    given = [str(name) for name in (names if isinstance(names, list) else [names]) if name]
    t.set("telemetry.trackers", [name for name in _TRACKERS if name in given])
    strange = [name for name in given if name not in (*_TRACKERS, "console", "none")]
    if strange:
        t.drop(key, f"there is no tracker {', '.join(strange)}; known: {', '.join(_TRACKERS)}", "telemetry.trackers")


def set_precision(t: Translation, key: str, name: Any) -> None:
    """Set the data type of the weights for both roles."""
    if str(name) in ("bfloat16", "float32"):
        t.set("model.precision", str(name), "weights of both sides; the optimizer keeps fp32 masters")
    else:
        t.set("model.precision", "bfloat16")
        if str(name) != "auto":
            t.drop(key, "weights are bfloat16 or float32", "model.precision")


def set_recompute(t: Translation, kind: str) -> None:
    """Set the recomputation of activations: none, selective or full."""
    if kind != "none":
        t.set("trainer.recompute", kind)
