"""MindRLHF: grpo_config.yaml, and scripts that start its main.py (github.com/mindspore-lab/mindrlhf).

One step there makes `chunk_size * num_rollouts * (data_parallel of generation)` prompts (grpo_experience_maker.py), and
trains them in updates of `batch_size * data_parallel * micro_batch_num` packed rows (train_worker.py). The defaults are
those of mindrlhf/configs/grpo_configs.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from async_grpo.errors import ConfigError
from async_grpo.lab.importers.parts import (
    set_data,
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
from async_grpo.lab.importers.shell import LaunchScript, options
from async_grpo.lab.importers.translation import (
    GivenKeys,
    KeyRow,
    LeftOut,
    SourceSystem,
    Translation,
    parse_value,
    read_text,
    read_yaml,
    renamed,
)
from async_grpo.rewards.registry import BUILTIN

_RL, _ACTOR, _REF, _GENERATE, _REWARD = (
    "rl_config.",
    "actor_config.",
    "ref_config.",
    "generate_config.",
    "reward_config.",
)
_SAMPLING, _LAYOUT = f"{_GENERATE}sampling_config.", "parallel_config."
_OBJECTIVE, _MINDSPORE = "trainer.objective.", "MindSpore's own; there is no graph mode here"
_ARGUMENTS = {
    "tokenizer_dir": f"{_RL}tokenizer_dir",
    "dataset_file": f"{_RL}dataset_file",
    "verifier_function": f"{_REWARD}verifier_function",
    "verifier_weight": f"{_REWARD}verifier_weight",
    "model_name": f"{_RL}model_name",
    "tensorboard": f"{_RL}tensorboard",
    "actor_checkpoint_path": f"{_ACTOR}load",
    "ref_checkpoint_path": f"{_REF}load",
    "generate_checkpoint_path": f"{_GENERATE}load",
    "save_checkpoint_dir": f"{_ACTOR}save",
}

ROWS = (
    *renamed(
        [
            KeyRow("num_rollouts", "groups_per_step", "chunk_size * num_rollouts * data_parallel of generation", 4),
            KeyRow("chunk_size", "groups_per_step", "prompts of a round of generation, for each of its replicas", 1),
            KeyRow("num_generations", "group_size", "", 8),
            KeyRow("batch_size", "trainer.mini_batches", "packed rows of an update; here updates of a step", 1),
            KeyRow("pack_num", "trainer.mini_batches", "samples of a packed row", 1),
            KeyRow("num_iterations", "trainer.num_iterations", "", 1),
            KeyRow("beta", f"{_OBJECTIVE}kl_beta", "estimated by k3", 0.01),
            KeyRow("epsilon_low", f"{_OBJECTIVE}clip_low", "", 0.2),
            KeyRow("epsilon_high", f"{_OBJECTIVE}clip_high", "", 0.2),
            KeyRow("enable_oldpolicy", f"{_OBJECTIVE}prox", "recompute; without it nothing is clipped there", True),
            KeyRow("seed", "seed", "", 0),
            KeyRow("epochs", "steps", "epochs * rows / groups_per_step, with --rows", 10),
            KeyRow("tokenizer_dir", "model.path", "the Hugging Face folder"),
            KeyRow("dataset_file", "data.path", "async-grpo prepare reads the original JSON"),
            KeyRow("seq_length", "trainer.micro_batch_tokens", "", 4096),
            KeyRow("save_ckpt_interval", "trainer.checkpoint.every_steps", "", 1),
            KeyRow("save_max_ckpt_num", "trainer.checkpoint.keep", "", 5),
            KeyRow("tensorboard", "telemetry.trackers", "", False),
            KeyRow(
                "model_name", "rewards.functions", "with qwen in it, accuracy_reward is qwen_accuracy_reward", "qwen2.5"
            ),
            KeyRow("packing", note="sequences are always packed", near="trainer.micro_batch_tokens"),
            KeyRow("tensorboard_*", note="a run's folder has them", near="telemetry.trackers"),
            KeyRow(
                "save_prompt_completions_*",
                note="every eighth group is written to samples/",
                near="telemetry.samples_every",
            ),
            KeyRow(
                "save_ckpt_format",
                note="checkpoints are Megatron's; async-grpo export makes safetensors",
                near="trainer.checkpoint",
            ),
            KeyRow("load_ckpt_format", note="Hugging Face safetensors are read", near="model.path"),
            KeyRow("tokenizer_type", note="the tokenizer of model.path is taken", near="model.path"),
            KeyRow("calculate_entropy", note="the entropy is always measured"),
            KeyRow("performance_stats", note="every run has its times in report.md and timeline.json"),
            KeyRow("reshard*", note="trainer and engines have devices of their own", near="launch.share_devices"),
            KeyRow("*", note=_MINDSPORE),
        ],
        _RL,
    ),
    *renamed(
        [
            KeyRow("parallel_config.model_parallel", "trainer.tensor_parallel", "", 4),
            KeyRow("parallel_config.pipeline_stage", "trainer.pipeline_parallel", "", 2),
            KeyRow("parallel_config.data_parallel", "trainer.processes", "times the other sizes", 1),
            KeyRow("parallel_config.context_parallel", "trainer.context_parallel", "", 1),
            KeyRow("parallel_config.expert_parallel", "trainer.expert_parallel", "", 1),
            KeyRow("parallel_config.use_seq_parallel", "trainer.sequence_parallel", "", True),
            KeyRow("parallel_config.micro_batch_num", "trainer.mini_batches", "counts with pipeline_stage above 1", 4),
            KeyRow("parallel_config.*", note=_MINDSPORE, near="trainer"),
            KeyRow("recompute_config.recompute", "trainer.recompute", "true: full", False),
            KeyRow("recompute_config.select_recompute", "trainer.recompute", "true: selective", False),
            KeyRow("recompute_config.*", note="full or selective", near="trainer.recompute"),
            KeyRow("optimizer.adam_beta1", "trainer.optimizer.beta1", "", 0.9),
            KeyRow("optimizer.adam_beta2", "trainer.optimizer.beta2", "", 0.95),
            KeyRow("optimizer.eps", "trainer.optimizer.eps", "", 1e-8),
            KeyRow("optimizer.weight_decay", "trainer.optimizer.weight_decay", "", 0.01),
            KeyRow("optimizer.opt_offload", "trainer.optimizer.offload", "", False),
            KeyRow("optimizer.type", note="the optimizer is AdamW", near="trainer.optimizer"),
            KeyRow("lr_schedule.lr", "trainer.optimizer.lr", "", 5e-7),
            KeyRow("lr_schedule.min_lr", "trainer.optimizer.min_lr", "", 1e-10),
            KeyRow("lr_schedule.lr_decay_style", "trainer.optimizer.schedule", "", "cosine"),
            KeyRow("lr_schedule.warmup_step", "trainer.optimizer.warmup_steps", "updates there", 10),
            KeyRow("lr_schedule.decay_steps", note="the rate falls over all steps of the run", near="steps"),
            KeyRow(
                "model_config", note="the layers are read from the checkpoint's config.json", near="model.architecture"
            ),
            KeyRow("load", note="model.path is the Hugging Face folder of both sides", near="model.path"),
            KeyRow("save", note="a run writes into runs_dir/name", near="runs_dir"),
            KeyRow("*", note=_MINDSPORE, near="trainer"),
        ],
        _ACTOR,
    ),
    KeyRow(f"{_REF}sync_ref_model", "trainer.reference.source", "true: synced; false: frozen", False),
    KeyRow(f"{_REF}ref_model_sync_steps", "trainer.reference.sync_every", "", 50),
    KeyRow(f"{_REF}load", note="the first policy of the run is the reference", near="trainer.reference.path"),
    KeyRow(f"{_REF}*", note="the reference runs in the trainer's own layout", near="trainer.reference"),
    KeyRow(f"{_REWARD}verifier_function", "rewards.functions", "the same names, but see model_name", ()),
    KeyRow(f"{_REWARD}verifier_weight", "rewards.functions", "", ()),
    *renamed(
        [
            KeyRow("parallel_config.model_parallel", "rollout.vllm.tensor_parallel", "", 4),
            KeyRow("parallel_config.data_parallel", "rollout.servers", "also a factor of groups_per_step", 1),
            KeyRow("parallel_config.*", note="engines have tensor_parallel alone", near="rollout.vllm.tensor_parallel"),
            KeyRow(
                "max_model_len", note="prompt + completion are the longest sequence", near="rollout.vllm.max_model_len"
            ),
            KeyRow("max_num_batched_tokens", "rollout.vllm.extra.max_num_batched_tokens"),
            KeyRow("max_num_seqs", "rollout.max_concurrency", "", 1024),
            KeyRow("max_prompt_length", "data.max_prompt_tokens", "", 2048),
            KeyRow("gpu_memory_utilization", "rollout.vllm.gpu_memory_utilization", "", 0.8),
            KeyRow("block_size", "rollout.vllm.extra.block_size"),
            KeyRow("sampling_config.max_tokens", "sampling.max_tokens", "", 512),
            KeyRow("sampling_config.temperature", "sampling.temperature", "", 0.8),
            KeyRow("sampling_config.top_p", "sampling.top_p", "only 1", 0.8),
            KeyRow("sampling_config.top_k", "sampling.top_k", "only all tokens", 20),
            KeyRow("sampling_config.repetition_penalty", note="the distribution is never changed", near="sampling"),
            KeyRow("sampling_config.min_p", note="the distribution is never truncated", near="sampling.top_p"),
            KeyRow("sampling_config.min_tokens", note="a completion may end at once", near="sampling.max_tokens"),
            KeyRow("sampling_config.*token_id", note="they are read from the tokenizer", near="model.path"),
            KeyRow("sampling_config.bos_token_id", note="it is read from the tokenizer", near="model.path"),
            KeyRow("sampling_config.eos_token_id", note="it is read from the tokenizer", near="model.path"),
            KeyRow("sampling_config.pad_token_id", note="it is read from the tokenizer", near="model.path"),
            KeyRow("sampling_config.*", note="a detail of the engine", near="sampling"),
            KeyRow("load", note="model.path is the Hugging Face folder of both sides", near="model.path"),
            KeyRow("use_vllm", note="the engine is vLLM", near="rollout.engine"),
            KeyRow("*", note="a detail of the engine", near="rollout.vllm.extra"),
        ],
        _GENERATE,
    ),
    KeyRow("context.*", note=_MINDSPORE, near="trainer.platform"),
    KeyRow("monitor_config.*", note="memory is bounded by launch and redis settings", near="redis.max_memory_bytes"),
    KeyRow("profiler_config.*", note="timeline.json of every run", near="telemetry"),
    KeyRow("resume_training", note="the same command resumes"),
)


def read(file: Path, given: Mapping[str, str]) -> GivenKeys:
    """grpo_config.yaml, or a script that starts main.py with `--config` and other arguments. Raises ConfigError."""
    if file.suffix in (".yaml", ".yml"):
        return read_yaml(file, given)
    script = LaunchScript({key: value for key, value in given.items() if "." not in key})
    _, words = script.words(read_text(file), re.compile(r".*\.py"))
    arguments = options(words)
    named = Path(arguments.pop("config", ""))
    config = next((path for path in (named, file.parent / named, file.parent / named.name) if path.is_file()), None)
    if config is None:
        raise ConfigError(
            f"{file} names the configuration {named}, which is neither there nor beside it. Put it beside"
        )
    left_out = [
        LeftOut(key, "$...", reason)
        for key, text in arguments.items()
        if (reason := script.reason(_ARGUMENTS.get(key, key), text))
    ]
    unknown = {item.key for item in left_out}
    values = {_ARGUMENTS.get(key, key): parse_value(text) for key, text in arguments.items() if key not in unknown}
    found = read_yaml(config, {key: value for key, value in given.items() if "." in key})
    return GivenKeys({**found.values, **values}, left_out)


def translate(t: Translation) -> None:
    """Translate a whole MindRLHF configuration."""
    set_name(t, f"{_RL}none", "from-mindrlhf")
    replicas = t.integer(f"{_GENERATE}{_LAYOUT}data_parallel")
    groups = t.integer(f"{_RL}num_rollouts") * t.integer(f"{_RL}chunk_size") * replicas
    t.set("groups_per_step", groups, "chunk_size * num_rollouts * data_parallel of generation")
    set_group_size(t, f"{_RL}num_generations")
    t.set("max_staleness", 0, "on policy, as there; 1 or 2 lets both sides work at once")
    t.set("seed", t.integer(f"{_RL}seed"))
    set_steps(t, f"{_RL}epochs", groups)
    _updates(t, groups)
    set_model(t, t.get(f"{_RL}tokenizer_dir"))
    set_precision(t, "", "bfloat16")
    prompt, completion = t.integer(f"{_GENERATE}max_prompt_length"), t.integer(f"{_SAMPLING}max_tokens")
    set_data(
        t,
        f"what {t.get(f'{_RL}dataset_file')} was made of",
        f"FILE.json --max-prompt-tokens {prompt} --model MODEL",
        prompt,
    )
    set_lengths(t, prompt, completion, micro_tokens=t.integer(f"{_RL}seq_length"))
    set_sampling(t, f"{_SAMPLING}top_p", f"{_SAMPLING}top_k", f"{_SAMPLING}temperature")
    _optimizer(t)
    _objective(t)
    _rewards(t)
    _devices(t, replicas)
    if t.integer(f"{_RL}num_iterations") > 1:
        t.set("trainer.num_iterations", t.integer(f"{_RL}num_iterations"))
    t.set("trainer.checkpoint.every_steps", t.integer(f"{_RL}save_ckpt_interval"))
    t.set("trainer.checkpoint.keep", t.integer(f"{_RL}save_max_ckpt_num"))
    set_trackers(t, f"{_RL}tensorboard", ["tensorboard"] if t.flag(f"{_RL}tensorboard") else [])


def _updates(t: Translation, groups: int) -> None:
    layout = f"{_ACTOR}{_LAYOUT}"
    micro = t.integer(f"{layout}micro_batch_num") if t.integer(f"{layout}pipeline_stage") > 1 else 1
    rows = t.integer(f"{_RL}batch_size") * t.integer(f"{layout}data_parallel") * micro
    samples = rows * max(1, t.integer(f"{_RL}pack_num"))
    updates = max(1, groups * t.settings["group_size"].value // samples)
    t.updates_per_step = updates * t.integer(f"{_RL}num_iterations")
    if updates > 1:
        fewer = (
            f"; there {updates} of {samples} samples, here no update has less than a group" if updates > groups else ""
        )
        t.set("trainer.mini_batches", min(updates, groups), f"updates of a step{fewer}")


def _optimizer(t: Translation) -> None:
    optimizer, schedule, keys = f"{_ACTOR}optimizer.", f"{_ACTOR}lr_schedule.", "trainer.optimizer."
    t.set(f"{keys}lr", t.number(f"{schedule}lr"))
    for theirs, ours in (
        ("adam_beta1", "beta1"),
        ("adam_beta2", "beta2"),
        ("eps", "eps"),
        ("weight_decay", "weight_decay"),
    ):
        t.set(f"{keys}{ours}", t.number(f"{optimizer}{theirs}"))
    style = f"{schedule}lr_decay_style"
    set_schedule(
        t, str(t.get(style)), t.steps(f"{schedule}warmup_step"), key=style, min_lr=t.number(f"{schedule}min_lr")
    )
    if t.flag(f"{optimizer}opt_offload"):
        t.set(f"{keys}offload", True)


def _objective(t: Translation) -> None:
    t.set(f"{_OBJECTIVE}preset", "grpo")
    t.set(
        f"{_OBJECTIVE}prox",
        "recompute",
        "" if t.flag(f"{_RL}enable_oldpolicy") else "enable_oldpolicy is false there, and nothing is clipped",
    )
    t.set(f"{_OBJECTIVE}clip_low", t.number(f"{_RL}epsilon_low"))
    t.set(f"{_OBJECTIVE}clip_high", t.number(f"{_RL}epsilon_high"))
    if t.number(f"{_RL}beta") > 0 and t.flag(f"{_REF}sync_ref_model"):
        t.set("trainer.reference.source", "synced")
        t.set("trainer.reference.sync_every", t.integer(f"{_REF}ref_model_sync_steps"))
    set_kl(t, t.number(f"{_RL}beta"), "k3")


def _rewards(t: Translation) -> None:
    known = {name: name for name in BUILTIN}
    if "qwen" in str(t.get(f"{_RL}model_name")):
        known["accuracy_reward"] = "qwen_accuracy_reward"
    names, weights = (t.get(f"{_REWARD}verifier_{kind}") for kind in ("function", "weight"))
    names = names.split(",") if isinstance(names, str) else list(names)
    weights = weights.split(",") if isinstance(weights, str) else list(weights)
    set_rewards(t, f"{_REWARD}verifier_function", names, [float(weight) for weight in weights], known)


def _devices(t: Translation, replicas: int) -> None:
    names = {
        "model_parallel": "tensor",
        "pipeline_stage": "pipeline",
        "context_parallel": "context",
        "expert_parallel": "expert",
    }
    sizes = {ours: t.integer(f"{_ACTOR}{_LAYOUT}{theirs}") for theirs, ours in names.items()}
    for name, size in sizes.items():
        if size > 1:
            t.set(f"trainer.{name}_parallel", size)
    if sizes["tensor"] > 1:
        t.set("trainer.sequence_parallel", t.flag(f"{_ACTOR}{_LAYOUT}use_seq_parallel"))
    selective = t.flag(f"{_ACTOR}recompute_config.select_recompute")
    whole = t.flag(f"{_ACTOR}recompute_config.recompute")
    set_recompute(t, "selective" if selective else "full" if whole else "none")
    ranks = t.integer(f"{_ACTOR}{_LAYOUT}data_parallel") * sizes["tensor"] * sizes["pipeline"] * sizes["context"]
    engine = t.integer(f"{_GENERATE}{_LAYOUT}model_parallel")
    t.set("trainer.platform", "npu")
    t.set("trainer.processes", ranks, "data * model * pipeline * context parallel")
    t.set("rollout.vllm.platform", "ascend")
    t.set("rollout.vllm.tensor_parallel", engine)
    t.set(
        "rollout.servers",
        replicas,
        f"{replicas * engine} devices beside the trainer's; there both sides took turns on them",
    )
    t.set("rollout.max_concurrency", t.integer(f"{_GENERATE}max_num_seqs"), "samples in flight in one engine")
    t.set("rollout.vllm.gpu_memory_utilization", t.number(f"{_GENERATE}gpu_memory_utilization"))
    for name in ("max_num_batched_tokens", "block_size"):
        if t.has(f"{_GENERATE}{name}"):
            t.set(f"rollout.vllm.extra.{name}", t.integer(f"{_GENERATE}{name}"))


MINDRLHF = SourceSystem("mindrlhf", "MindRLHF", "https://github.com/mindspore-lab/mindrlhf", ROWS, read, translate)
