"""MindSpeed-RL: configs/grpo_*.yaml and configs/dapo_*.yaml (github.com/Ascend/MindSpeed-RL).

`global_batch_size` and `mini_batch_size` count prompts (cli/train_grpo.py and config_cls/rl_config.py multiply both by
`n_samples_per_prompt`). `actor_config` takes what it does not say from `megatron_training`. The defaults are those of
mindspeed_rl/config_cls.
"""

from __future__ import annotations

import math

from async_grpo.config.launch import EvalConfig
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
    set_trackers,
)
from async_grpo.lab.importers.translation import ADAPTERS, KeyRow, SourceSystem, Translation, read_yaml, renamed
from async_grpo.rewards.registry import BUILTIN

_TRAINING, _ACTOR, _RL, _GENERATE = "megatron_training.", "actor_config.", "rl_config.", "generate_config."
_SAMPLING = f"{_GENERATE}sampling_config."
_OBJECTIVE = "trainer.objective."
_KERNELS = "a detail of MindSpeed; checkpoint and platform choose layers and kernels"
_COLOCATED = "devices are shared only where they are few"

_SHARED = [
    KeyRow("micro_batch_size", "trainer.micro_batch_tokens", "samples there, tokens here", 1),
    KeyRow("tensor_model_parallel_size", "trainer.tensor_parallel", "", 1),
    KeyRow("pipeline_model_parallel_size", "trainer.pipeline_parallel", "", 1),
    KeyRow("expert_model_parallel_size", "trainer.expert_parallel", "", 1),
    KeyRow("context_parallel_size", "trainer.context_parallel", "", 1),
    KeyRow("sequence_parallel", "trainer.sequence_parallel", "with tensor_parallel above 1", False),
    KeyRow("lr", "trainer.optimizer.lr", "", 1e-6),
    KeyRow("min_lr", "trainer.optimizer.min_lr", "", 0.0),
    KeyRow("lr_decay_style", "trainer.optimizer.schedule", "", "linear"),
    KeyRow("lr_warmup_fraction", "trainer.optimizer.warmup_steps", "a share of the steps", 0.0),
    KeyRow("weight_decay", "trainer.optimizer.weight_decay", "", 0.01),
    KeyRow("clip_grad", "trainer.optimizer.clip_grad", "", 1.0),
    KeyRow("adam_beta1", "trainer.optimizer.beta1", "", 0.9),
    KeyRow("adam_beta2", "trainer.optimizer.beta2", "", 0.999),
    KeyRow("swap_optimizer", "trainer.optimizer.offload", "", False),
    KeyRow("recompute_granularity", "trainer.recompute"),
    KeyRow("recompute_*", note="full recomputes every layer", near="trainer.recompute"),
    KeyRow("bf16", "model.precision", "true: bfloat16; false: float32", True),
    KeyRow("num_layer_list", note="every stage has the same number of layers", near="trainer.pipeline_parallel"),
    KeyRow("load", note="a Megatron checkpoint; the Hugging Face folder is read directly", near="model.path"),
    KeyRow("save", note="a run writes into runs_dir/name", near="runs_dir"),
    KeyRow("no_load_*", note="a resumed run takes all of its state", near="trainer.checkpoint"),
    KeyRow("no_save_*", note="a checkpoint has all that a resumed run needs", near="trainer.checkpoint"),
    KeyRow("finetune", note="a run starts at policy version 0"),
    KeyRow("lora_*", note=ADAPTERS, near="model.lora"),
    KeyRow("model", note="the layers are read from the checkpoint's config.json", near="model.architecture"),
    KeyRow("attention_dropout", note="there is no dropout"),
    KeyRow("hidden_dropout", note="there is no dropout"),
    KeyRow("reset_attention_mask", note="sequences are always packed and never see each other"),
    KeyRow("no_pad_to_seq_lengths", note="sequences are always packed"),
    KeyRow("*", note=_KERNELS, near="trainer"),
]

ROWS = (
    KeyRow(f"{_TRAINING}global_batch_size", "groups_per_step", "prompts of a step", 32),
    KeyRow(f"{_TRAINING}train_iters", "steps", "", 100),
    KeyRow(f"{_TRAINING}save_interval", "trainer.checkpoint.every_steps"),
    KeyRow(f"{_TRAINING}tokenizer_name_or_path", "model.path", "the Hugging Face folder"),
    KeyRow(f"{_TRAINING}data_path", "data.path", "async-grpo prepare reads the original JSON"),
    KeyRow(f"{_TRAINING}no_shuffle", "data.shuffle", "the opposite", False),
    KeyRow(f"{_TRAINING}seed", "seed", "", 1234),
    KeyRow(
        f"{_TRAINING}stage", f"{_OBJECTIVE}loss, {_OBJECTIVE}aggregation", "ray_grpo and ray_dapo: ppo_clip", "ray_grpo"
    ),
    KeyRow(f"{_TRAINING}seq_length", note="max_prompt_length and max_tokens decide", near="rollout.vllm.max_model_len"),
    KeyRow(f"{_TRAINING}dataset_additional_keys", note="async-grpo prepare --keep-field", near="data.path"),
    KeyRow(f"{_TRAINING}tokenizer_*", note="the tokenizer of model.path is taken", near="model.path"),
    KeyRow(f"{_TRAINING}split", note="async-grpo prepare --held-out", near="data.eval_path"),
    KeyRow(f"{_TRAINING}full_shuffle_instruction_dataset", note="async-grpo prepare --shuffle", near="data.shuffle"),
    KeyRow(
        f"{_TRAINING}no_shared_storage", note="every machine of the trainer needs the run's folder", near="runs_dir"
    ),
    KeyRow(f"{_TRAINING}distributed_backend", note="the platform decides", near="trainer.platform"),
    *renamed(_SHARED, _TRAINING),
    *renamed(_SHARED, _ACTOR),
    *renamed(
        [
            KeyRow("mini_batch_size", "trainer.mini_batches", "prompts of an update; here updates of a step", 1),
            KeyRow("n_samples_per_prompt", "group_size", "", 1),
            KeyRow("max_prompt_length", "data.max_prompt_tokens", "", 512),
            KeyRow("clip_ratio", f"{_OBJECTIVE}clip_low, {_OBJECTIVE}clip_high", "unless clip_higher_enable", 0.2),
            KeyRow("clip_higher_enable", f"{_OBJECTIVE}clip_low, {_OBJECTIVE}clip_high", "ray_dapo only", False),
            KeyRow("clip_ratio_low", f"{_OBJECTIVE}clip_low", "with clip_higher_enable", 0.1),
            KeyRow("clip_ratio_high", f"{_OBJECTIVE}clip_high", "with clip_higher_enable", 0.1),
            KeyRow("token_level_loss", f"{_OBJECTIVE}aggregation", "ray_dapo only; false: seq_mean_token_mean", True),
            KeyRow("entropy_coeff", f"{_OBJECTIVE}entropy_coef", "", 0.0),
            KeyRow("adv_estimator", f"{_OBJECTIVE}advantage", "group_norm is grpo", "group_norm"),
            KeyRow("init_kl_coef", f"{_OBJECTIVE}kl_beta", "ray_dapo has no KL term", 0.01),
            KeyRow("kl_penalty", f"{_OBJECTIVE}kl_estimator", "kl is k1, mse is k2, low_var_kl is k3", "low_var_kl"),
            KeyRow("kl_ctrl_type", f"{_OBJECTIVE}kl_beta", "only fixed", "fixed"),
            KeyRow("use_kl_in_reward", f"{_OBJECTIVE}kl_in", "true: reward", False),
            KeyRow("verifier_function", "rewards.functions", "the same names", ("base_acc",)),
            KeyRow("verifier_weight", "rewards.functions", "", (1.0,)),
            KeyRow("verifier_parallel", "rewards.workers", "", 1),
            KeyRow("verifier_timeout", "rewards.deadline_s", "", 30),
            KeyRow("filter_groups_enable", "rollout.dynamic_sampling", "", False),
            KeyRow(
                "filter_groups_*",
                note="new groups are admitted until the batch is full",
                near="rollout.dynamic_sampling",
            ),
            KeyRow("overlong_buffer_enable", "rewards.overlong", "true: soft", False),
            KeyRow("overlong_buffer", "rewards.soft_overlong_tokens", "", 0),
            KeyRow("overlong_buffer_penalty_factor", "rewards.soft_overlong_factor", "", 1.0),
            KeyRow(
                "rollout_max_tokens",
                note="sampling.max_tokens is the end of the punished range",
                near="sampling.max_tokens",
            ),
            KeyRow("partial_rollout_max_split", "max_staleness", "N rounds of generation are an age of N - 1", 1),
            KeyRow(
                "actor_resource.num_npus",
                "trainer.processes, rollout.servers",
                "half each, or all for both",
                8,
            ),
            KeyRow("use_tensorboard", "telemetry.trackers", "", False),
            KeyRow("use_wandb", "telemetry.trackers", "", False),
            KeyRow("use_swanlab", "telemetry.trackers", "", False),
            KeyRow("wandb_project", "telemetry.project"),
            KeyRow("wandb_exp_name", "name"),
            KeyRow("wandb_*", note="the tracker's own environment variables", near="telemetry.trackers"),
            KeyRow("swanlab_*", note="the tracker's own environment variables", near="telemetry.trackers"),
            KeyRow("epochs", note="a run is counted in steps (train_iters)", near="steps"),
            KeyRow("shuffle_mini_batch", note="every pass deals out the groups again", near="trainer.mini_batches"),
            KeyRow("actor_forward_micro_batch_size", note="packed by tokens", near="trainer.micro_batch_tokens"),
            KeyRow("ref_forward_micro_batch_size", note="packed by tokens", near="trainer.micro_batch_tokens"),
            KeyRow("use_remove_padding", note="sequences are always packed"),
            KeyRow("*packing_token_size", note="packed by tokens", near="trainer.micro_batch_tokens"),
            KeyRow("max_packing_token_size", note="packed by tokens", near="trainer.micro_batch_tokens"),
            KeyRow("update_max_packing_token_size", "trainer.micro_batch_tokens", "with use_dynamic_bsz"),
            KeyRow("use_dynamic_bsz", "trainer.micro_batch_tokens", "sequences are always packed by tokens", False),
            KeyRow("use_integrated_worker", note=_COLOCATED, near="launch.share_devices"),
            KeyRow("blocking", note="the loop is asynchronous; one bound rules it", near="max_staleness"),
            KeyRow("async_engine", note="the engine is always asynchronous", near="rollout.max_concurrency"),
            KeyRow(
                "guarantee_order", note="groups are taken in the order of their tickets", near="buffer.selector.kind"
            ),
            KeyRow("gamma", note="a completion has one reward", near=f"{_OBJECTIVE}advantage"),
            KeyRow("lam", note="there is no critic", near=f"{_OBJECTIVE}advantage"),
            KeyRow("rule_reward", note="rewards are functions", near="rewards.functions"),
            KeyRow("multi_turn_enable", note="conversations with tools are a workflow", near="rollout.workflow"),
            KeyRow("tool_*", note="conversations with tools are a workflow", near="rollout.multi_turn.tools"),
            KeyRow("max_tool_calls", note="with rollout.workflow multi_turn", near="rollout.multi_turn.max_calls"),
            KeyRow(
                "*", note="how MindSpeed-RL's workers pass data; the replay buffer takes their place", near="buffer"
            ),
        ],
        _RL,
    ),
    *renamed(
        [
            KeyRow("infer_tensor_parallel_size", "rollout.vllm.tensor_parallel", "", 8),
            KeyRow(
                "infer_pipeline_parallel_size", note="engines have no pipeline", near="rollout.vllm.tensor_parallel"
            ),
            KeyRow(
                "infer_expert_parallel_size", note="experts are spread over tensor_parallel", near="rollout.vllm.extra"
            ),
            KeyRow("enable_expert_parallel", "rollout.vllm.extra.enable_expert_parallel", "", False),
            KeyRow("max_num_seqs", "rollout.max_concurrency", "", 1),
            KeyRow("max_model_len", "rollout.vllm.max_model_len", "", 2048),
            KeyRow("max_num_batched_tokens", "rollout.vllm.extra.max_num_batched_tokens"),
            KeyRow("gpu_memory_utilization", "rollout.vllm.gpu_memory_utilization", "", 0.5),
            KeyRow("enforce_eager", "rollout.vllm.enforce_eager", "", True),
            KeyRow("dtype", "model.precision", "one for both sides"),
            KeyRow("offload_train_*", note=_COLOCATED, near="launch.share_devices"),
            KeyRow("enable_prefix_caching", note="vLLM's default holds", near="rollout.vllm.extra"),
            KeyRow("sampling_config.max_tokens", "sampling.max_tokens", "", 128),
            KeyRow("sampling_config.temperature", "sampling.temperature", "", 0.2),
            KeyRow("sampling_config.top_p", "sampling.top_p", "only 1", 1.0),
            KeyRow("sampling_config.top_k", "sampling.top_k", "only all tokens: -1 there, 0 here", 50),
            KeyRow("sampling_config.min_p", "sampling.top_p", "only 0", 0.0),
            KeyRow("sampling_config.seed", note="one seed for all", near="seed"),
            KeyRow("sampling_config.logprobs", note="log-probabilities are always kept"),
            KeyRow("sampling_config.detokenize", note="texts are always made, for verifiers"),
            KeyRow("*", note="a detail of the engine", near="rollout.vllm.extra"),
        ],
        _GENERATE,
    ),
    KeyRow("defaults.*", note="the layers are read from the checkpoint's config.json", near="model.architecture"),
    KeyRow("defaults", note="the layers are read from the checkpoint's config.json", near="model.architecture"),
    KeyRow("critic_config.*", note="there is no critic"),
    KeyRow("ref_config.*", note="the reference runs in the trainer's own layout", near="trainer.reference"),
    KeyRow("reward_config.*", note="a model that judges is reached over HTTP", near="rewards.functions"),
)


def translate(t: Translation) -> None:
    """Translate a whole MindSpeed-RL configuration."""
    set_name(t, f"{_RL}wandb_exp_name", "from-mindspeed-rl")
    groups, mini = t.integer(f"{_TRAINING}global_batch_size"), t.integer(f"{_RL}mini_batch_size")
    t.set("groups_per_step", groups, "prompts")
    set_group_size(t, f"{_RL}n_samples_per_prompt")
    if mini < groups:
        t.set("trainer.mini_batches", math.ceil(groups / mini), f"updates of {mini} prompts")
    t.set("steps", t.integer(f"{_TRAINING}train_iters"))
    age = t.integer(f"{_RL}partial_rollout_max_split") - 1
    t.set("max_staleness", age, "" if age else "on policy, as there; 1 or 2 lets both sides work at once")
    t.set("seed", t.integer(f"{_TRAINING}seed"))
    set_model(t, t.get(f"{_TRAINING}tokenizer_name_or_path"))
    set_precision(t, f"{_GENERATE}dtype", t.get(f"{_GENERATE}dtype") or "bfloat16")
    t.flag(t.first(f"{_ACTOR}bf16", f"{_TRAINING}bf16"))
    _lengths(t)
    _optimizer(t)
    _objective(t)
    _rewards(t)
    _devices(t)
    _engine(t)
    prompts = EvalConfig().prompts
    t.set("eval.prompts", prompts, "held-out prompts of an evaluation before and after, which the file lacks")


def _either(t: Translation, name: str) -> str:
    """The value of the key in `actor_config`, or else in `megatron_training`."""
    return t.first(f"{_ACTOR}{name}", f"{_TRAINING}{name}")


def _lengths(t: Translation) -> None:
    prompt, completion = t.integer(f"{_RL}max_prompt_length"), t.integer(f"{_SAMPLING}max_tokens")
    path = t.get(f"{_TRAINING}data_path") or "the original JSON"
    set_data(t, f"what {path} was made of", f"FILE.json --max-prompt-tokens {prompt} --model MODEL", prompt)
    t.set("data.shuffle", not t.flag(f"{_TRAINING}no_shuffle"))
    micro = t.integer(_either(t, "micro_batch_size")) * (prompt + completion)
    if t.flag(f"{_RL}use_dynamic_bsz") and t.has(f"{_RL}update_max_packing_token_size"):
        micro = t.integer(f"{_RL}update_max_packing_token_size")
    set_lengths(t, prompt, completion, longest=t.integer(f"{_GENERATE}max_model_len"), micro_tokens=micro)
    set_sampling(t, f"{_SAMPLING}top_p", f"{_SAMPLING}top_k", f"{_SAMPLING}temperature")
    if t.number(f"{_SAMPLING}min_p"):
        t.drop(f"{_SAMPLING}min_p", "the distribution is never truncated", "sampling.top_p")


def _optimizer(t: Translation) -> None:
    names = {
        "lr": "lr",
        "weight_decay": "weight_decay",
        "clip_grad": "clip_grad",
        "adam_beta1": "beta1",
        "adam_beta2": "beta2",
    }
    for theirs, ours in names.items():
        t.set(f"trainer.optimizer.{ours}", t.number(_either(t, theirs)))
    style = _either(t, "lr_decay_style")
    warmup = t.number(_either(t, "lr_warmup_fraction"))
    set_schedule(t, str(t.get(style)), warmup, key=style, min_lr=t.number(_either(t, "min_lr")))
    if t.flag(_either(t, "swap_optimizer")):
        t.set("trainer.optimizer.offload", True)


def _objective(t: Translation) -> None:
    stage, low, high = str(t.get(f"{_TRAINING}stage")), f"{_RL}clip_ratio", f"{_RL}clip_ratio"
    if stage not in ("ray_grpo", "ray_dapo"):
        t.drop(
            f"{_TRAINING}stage",
            "only ray_grpo and ray_dapo have a counterpart; ray_grpo is taken",
            _OBJECTIVE + "preset",
        )
    dapo = stage == "ray_dapo"
    if dapo and t.flag(f"{_RL}clip_higher_enable"):
        low, high = f"{_RL}clip_ratio_low", f"{_RL}clip_ratio_high"
    by_sequence = dapo and not t.flag(f"{_RL}token_level_loss")
    if str(t.get(f"{_RL}adv_estimator")) != "group_norm":
        t.drop(f"{_RL}adv_estimator", "there is no critic; grpo is taken", _OBJECTIVE + "advantage")
    t.set(f"{_OBJECTIVE}preset", "dapo" if dapo else "grpo")
    t.set(f"{_OBJECTIVE}loss", "ppo_clip")
    t.set(
        f"{_OBJECTIVE}aggregation",
        "seq_mean_token_mean" if by_sequence else "token_mean",
        "over the whole batch; there over a micro-batch",
    )
    t.set(f"{_OBJECTIVE}prox", "recompute", "old_log_prob there")
    t.set(f"{_OBJECTIVE}clip_low", t.number(low))
    t.set(f"{_OBJECTIVE}clip_high", t.number(high))
    t.set(f"{_OBJECTIVE}entropy_coef", t.number(f"{_RL}entropy_coeff"))
    if dapo:
        t.drop(f"{_RL}init_kl_coef", "the loss of ray_dapo has no KL term", _OBJECTIVE + "kl_beta")
        return
    name = str(t.get(f"{_RL}kl_penalty"))
    if name not in KL_ESTIMATORS:
        t.drop(f"{_RL}kl_penalty", "estimators are k1, k2 and k3; k3 is taken", _OBJECTIVE + "kl_estimator")
    if str(t.get(f"{_RL}kl_ctrl_type")) != "fixed":
        t.drop(f"{_RL}kl_ctrl_type", "the weight is fixed", _OBJECTIVE + "kl_beta")
    set_kl(t, t.number(f"{_RL}init_kl_coef"), KL_ESTIMATORS.get(name, "k3"), in_reward=t.flag(f"{_RL}use_kl_in_reward"))


def _rewards(t: Translation) -> None:
    known = {name: name for name in BUILTIN}
    names, weights = t.get(f"{_RL}verifier_function"), t.get(f"{_RL}verifier_weight")
    set_rewards(t, f"{_RL}verifier_function", list(names), list(weights), known)
    if t.has(f"{_RL}verifier_parallel"):
        t.set("rewards.workers", t.integer(f"{_RL}verifier_parallel"))
    if t.has(f"{_RL}verifier_timeout"):
        t.set("rewards.deadline_s", t.number(f"{_RL}verifier_timeout"))
    if t.flag(f"{_RL}filter_groups_enable"):
        t.set("rollout.dynamic_sampling", True, "groups whose rewards are all equal are replaced")
    if t.flag(f"{_RL}overlong_buffer_enable") and t.integer(f"{_RL}overlong_buffer"):
        t.set("rewards.overlong", "soft")
        t.set("rewards.soft_overlong_tokens", t.integer(f"{_RL}overlong_buffer"))
        t.set("rewards.soft_overlong_factor", t.number(f"{_RL}overlong_buffer_penalty_factor"))
    uses = [name for name in ("tensorboard", "wandb", "swanlab") if t.flag(f"{_RL}use_{name}")]
    set_trackers(t, f"{_RL}use_tensorboard", uses)
    if t.has(f"{_RL}wandb_project"):
        t.set("telemetry.project", str(t.get(f"{_RL}wandb_project")))
    if t.integer(f"{_TRAINING}save_interval"):
        t.set("trainer.checkpoint.every_steps", t.integer(f"{_TRAINING}save_interval"))


def _devices(t: Translation) -> None:
    names = {"tensor": "tensor_parallel", "pipeline": "pipeline_parallel", "expert": "expert_parallel"}
    sizes = {ours: t.integer(_either(t, f"{kind}_model_parallel_size")) for kind, ours in names.items()}
    sizes["context_parallel"] = t.integer(_either(t, "context_parallel_size"))
    for name, size in sizes.items():
        if size > 1:
            t.set(f"trainer.{name}", size)
    if sizes["tensor_parallel"] > 1:
        t.set("trainer.sequence_parallel", t.flag(_either(t, "sequence_parallel")))
    set_recompute(t, str(t.get(_either(t, "recompute_granularity")) or "none"))
    block = block_of(*(sizes[f"{kind}_parallel"] for kind in ("tensor", "pipeline", "context", "expert")))
    devices = t.integer(f"{_RL}actor_resource.num_npus")
    set_devices(t, DeviceCount("npu", 1, devices, block, t.integer(f"{_GENERATE}infer_tensor_parallel_size")))


def _engine(t: Translation) -> None:
    keys = "rollout.vllm."
    set_engine_memory(t, t.number(f"{_GENERATE}gpu_memory_utilization"))
    t.set("rollout.max_concurrency", t.integer(f"{_GENERATE}max_num_seqs"), "samples in flight in one engine")
    set_eager(t, t.flag(f"{_GENERATE}enforce_eager"))
    if t.flag(f"{_GENERATE}enable_expert_parallel"):
        t.set(f"{keys}extra.enable_expert_parallel", True)
    if t.has(f"{_GENERATE}max_num_batched_tokens"):
        t.set(f"{keys}extra.max_num_batched_tokens", t.integer(f"{_GENERATE}max_num_batched_tokens"))


MINDSPEED_RL = SourceSystem(
    "mindspeed-rl", "MindSpeed-RL", "https://github.com/Ascend/MindSpeed-RL", ROWS, read_yaml, translate
)
