"""The keys of verl, their defaults (verl/trainer/config/_generated_ppo_trainer.yaml) and their counterparts here."""

from __future__ import annotations

from async_grpo.lab.importers.translation import ADAPTERS, KeyRow, renamed

DATA, ALGORITHM, ASYNC = "data.", "algorithm.", "async_training."
ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
REWARD = tuple(
    f"{section}.overlong_buffer_cfg."
    for section in ("reward.reward_kwargs", "reward_model.reward_kwargs", "custom_reward_function.reward_kwargs")
)
_LAYOUT = "verl's own engine; ranks and layout are trainer.processes, tensor_parallel and the like"
_TEXT_ONLY = "models read text only"
_OBJECTIVE = "trainer.objective."

_DATA = [
    KeyRow("train_batch_size", "groups_per_step", "prompts of a step", 1024),
    KeyRow(
        "train_files", "data.path", "a folder that async-grpo prepare makes of them", "~/data/rlhf/gsm8k/train.parquet"
    ),
    KeyRow("val_files", "data.path", "async-grpo prepare --held-out-from"),
    KeyRow("max_prompt_length", "data.max_prompt_tokens", "", 512),
    KeyRow("max_response_length", "sampling.max_tokens", "", 512),
    KeyRow("shuffle", "data.shuffle", "", True),
    KeyRow("seed", "seed"),
    KeyRow("prompt_key", note="async-grpo prepare --prompt-field", near="data.path"),
    KeyRow("reward_fn_key", note="rewards are the same for all rows", near="rewards.functions"),
    KeyRow(
        "filter_overlong_prompts*",
        note="longer prompts are always left out by async-grpo prepare",
        near="data.max_prompt_tokens",
    ),
    KeyRow("truncation", note="prompts are never cut; longer ones are left out", near="data.max_prompt_tokens"),
    KeyRow("gen_batch_size", note="servers ask for prompts one at a time", near="rollout.max_concurrency"),
    KeyRow("val_batch_size", note="evaluations share the engine with training", near="eval.prompts"),
    KeyRow("image_key", note=_TEXT_ONLY),
    KeyRow("video_key", note=_TEXT_ONLY),
    KeyRow("custom_cls.*", note="data is prepared once, as rows", near="data.path"),
    KeyRow("*", note="how verl's loader reads rows; async-grpo prepare does it once", near="data.path"),
]

_ACTOR = [
    KeyRow("ppo_mini_batch_size", "trainer.mini_batches", "prompts of an update; here updates of a step", 256),
    KeyRow("ppo_epochs", "trainer.num_iterations", "", 1),
    KeyRow("ppo_micro_batch_size_per_gpu", "trainer.micro_batch_tokens", "samples there, tokens here"),
    KeyRow("use_dynamic_bsz", "trainer.micro_batch_tokens", "sequences are always packed by tokens", False),
    KeyRow("ppo_max_token_len_per_gpu", "trainer.micro_batch_tokens", "", 16384),
    KeyRow(
        "clip_ratio",
        note="clip_ratio_low and clip_ratio_high decide; their default 0.2 hides it",
        near=f"{_OBJECTIVE}clip_low",
    ),
    KeyRow("clip_ratio_low", f"{_OBJECTIVE}clip_low", "", 0.2),
    KeyRow("clip_ratio_high", f"{_OBJECTIVE}clip_high", "", 0.2),
    KeyRow("clip_ratio_c", f"{_OBJECTIVE}dual_clip", "behaviour_cap for dppo_tv", 3.0),
    KeyRow("tau_pos", f"{_OBJECTIVE}sapo_tau_positive", "", 1.0),
    KeyRow("tau_neg", f"{_OBJECTIVE}sapo_tau_negative", "", 1.05),
    KeyRow("loss_agg_mode", f"{_OBJECTIVE}aggregation", "the same names, with underscores", "token-mean"),
    KeyRow("loss_scale_factor", f"{_OBJECTIVE}aggregation", "seq_mean_token_sum_norm divides by sampling.max_tokens"),
    KeyRow("policy_loss.loss_mode", f"{_OBJECTIVE}loss", "vanilla is ppo_clip, geo_mean is gmpo", "vanilla"),
    KeyRow("policy_loss.*", note="a dial of a loss that is not here", near=f"{_OBJECTIVE}loss"),
    KeyRow("entropy_coeff", f"{_OBJECTIVE}entropy_coef", "", 0.0),
    KeyRow("use_kl_loss", f"{_OBJECTIVE}kl_in", "true: loss, with trainer.reference.source frozen", False),
    KeyRow("kl_loss_coef", f"{_OBJECTIVE}kl_beta", "counts if use_kl_loss is true", 0.001),
    KeyRow(
        "kl_loss_type",
        f"{_OBJECTIVE}kl_estimator",
        "kl is k1, mse is k2, low_var_kl is k3; + is the gradient of k2",
        "low_var_kl",
    ),
    KeyRow("grad_clip", "trainer.optimizer.clip_grad"),
    KeyRow("optim.lr", "trainer.optimizer.lr", "", 1e-6),
    KeyRow("optim.weight_decay", "trainer.optimizer.weight_decay", "", 0.01),
    KeyRow("optim.betas", "trainer.optimizer.beta1, beta2", "", (0.9, 0.999)),
    KeyRow("optim.clip_grad", "trainer.optimizer.clip_grad", "", 1.0),
    KeyRow("optim.lr_warmup_steps", "trainer.optimizer.warmup_steps", "", -1),
    KeyRow("optim.lr_warmup_steps_ratio", "trainer.optimizer.warmup_steps", "a share of the steps", 0.0),
    KeyRow("optim.lr_scheduler_type", "trainer.optimizer.schedule", "", "constant"),
    KeyRow("optim.warmup_style", "trainer.optimizer.schedule", "the older name"),
    KeyRow("optim.lr_decay_style", "trainer.optimizer.schedule", "Megatron's name"),
    KeyRow("optim.min_lr", "trainer.optimizer.min_lr", "", 0.0),
    KeyRow("optim.min_lr_ratio", "trainer.optimizer.min_lr", "times lr", 0.0),
    KeyRow("optim.lr_decay_steps", note="the rate falls over all steps of the run", near="steps"),
    KeyRow("optim.total_training_steps", note="the rate falls over all steps of the run", near="steps"),
    KeyRow("optim.override_optimizer_config.optimizer_cpu_offload", "trainer.optimizer.offload", "", False),
    KeyRow("optim.*", note="the optimizer is AdamW with fp32 masters", near="trainer.optimizer"),
    KeyRow("ulysses_sequence_parallel_size", "trainer.context_parallel", "", 1),
    KeyRow("fsdp_config.ulysses_sequence_parallel_size", "trainer.context_parallel", "", 1),
    KeyRow("megatron.tensor_model_parallel_size", "trainer.tensor_parallel", "", 1),
    KeyRow("megatron.pipeline_model_parallel_size", "trainer.pipeline_parallel", "", 1),
    KeyRow("megatron.context_parallel_size", "trainer.context_parallel", "", 1),
    KeyRow("megatron.expert_model_parallel_size", "trainer.expert_parallel", "", 1),
    KeyRow("megatron.sequence_parallel", "trainer.sequence_parallel", "with tensor_parallel above 1", True),
    KeyRow("megatron.override_transformer_config.recompute_granularity", "trainer.recompute"),
    KeyRow(
        "megatron.override_transformer_config.recompute_*", note="full recomputes every layer", near="trainer.recompute"
    ),
    KeyRow(
        "megatron.param_offload",
        note="devices are shared only where they are few",
        near="launch.share_devices",
    ),
    KeyRow(
        "megatron.grad_offload",
        note="devices are shared only where they are few",
        near="launch.share_devices",
    ),
    KeyRow(
        "megatron.optimizer_offload",
        note="devices are shared only where they are few",
        near="trainer.optimizer.offload",
    ),
    KeyRow("megatron.*", note=_LAYOUT, near="trainer"),
    KeyRow(
        "fsdp_config.param_offload",
        note="devices are shared only where they are few",
        near="launch.share_devices",
    ),
    KeyRow(
        "fsdp_config.optimizer_offload",
        note="devices are shared only where they are few",
        near="trainer.optimizer.offload",
    ),
    KeyRow("fsdp_config.*", note=_LAYOUT, near="trainer"),
    KeyRow("strategy", note="the trainer is Megatron-core", near="trainer"),
    KeyRow("checkpoint.*", note="a checkpoint has all that a resumed run needs", near="trainer.checkpoint"),
    KeyRow("shuffle", note="every pass deals out the groups again", near="trainer.mini_batches"),
    KeyRow("freeze_vision_tower", note=_TEXT_ONLY),
    KeyRow("*", note="a detail of verl's worker", near="trainer"),
]

_ALGORITHM = [
    KeyRow("adv_estimator", f"{_OBJECTIVE}advantage", "grpo without norm_adv_by_std_in_grpo is dr_grpo", "gae"),
    KeyRow("norm_adv_by_std_in_grpo", f"{_OBJECTIVE}advantage", "", True),
    KeyRow("use_kl_in_reward", f"{_OBJECTIVE}kl_in", "true: reward", False),
    KeyRow("kl_ctrl.kl_coef", f"{_OBJECTIVE}kl_beta", "counts if use_kl_in_reward is true", 0.001),
    KeyRow("kl_ctrl.type", f"{_OBJECTIVE}kl_beta", "only fixed", "fixed"),
    KeyRow("kl_ctrl.*", note="the weight is fixed", near=f"{_OBJECTIVE}kl_beta"),
    KeyRow("kl_penalty", f"{_OBJECTIVE}kl_estimator", "", "kl"),
    KeyRow("filter_groups.enable", "rollout.dynamic_sampling", "", False),
    KeyRow(
        "filter_groups.metric",
        note="groups with equal rewards are filtered, whatever the reward",
        near="rollout.dynamic_sampling",
    ),
    KeyRow("filter_groups.*", note="new groups are admitted until the batch is full", near="rollout.dynamic_sampling"),
    KeyRow(
        "rollout_correction.rollout_is", f"{_OBJECTIVE}corrections", "token: token_tis or icepop; sequence: seq_tis"
    ),
    KeyRow("rollout_correction.rollout_is_threshold", f"{_OBJECTIVE}corrections", "cap; low_high is icepop", 2.0),
    KeyRow("rollout_correction.rollout_rs", f"{_OBJECTIVE}corrections", "seq_sum_k1: seq_mis; seq_mean_k1: geo_rs"),
    KeyRow("rollout_correction.rollout_rs_threshold", f"{_OBJECTIVE}corrections", "low and high", 2.0),
    KeyRow("rollout_correction.bypass_mode", f"{_OBJECTIVE}prox", "true: behaviour; false: recompute", False),
    KeyRow("rollout_correction.loss_type", f"{_OBJECTIVE}loss", "ppo_clip", "ppo_clip"),
    KeyRow("rollout_correction.*", note="weights are used as they are", near=f"{_OBJECTIVE}corrections"),
    KeyRow("gamma", note="a completion has one reward, and every token its advantage", near=f"{_OBJECTIVE}advantage"),
    KeyRow("lam", note="there is no critic", near=f"{_OBJECTIVE}advantage"),
    KeyRow("*", note="not a part of GRPO", near="trainer.objective"),
]

_ROLLOUT = [
    KeyRow("name", "rollout.engine", "only vllm", "vllm"),
    KeyRow("n", "group_size", "", 1),
    KeyRow("temperature", "sampling.temperature", "", 1.0),
    KeyRow("top_p", "sampling.top_p", "only 1", 1.0),
    KeyRow("top_k", "sampling.top_k", "only all tokens: -1 there, 0 here", -1),
    KeyRow("dtype", "model.precision", "", "bfloat16"),
    KeyRow("tensor_model_parallel_size", "rollout.vllm.tensor_parallel", "", 2),
    KeyRow("gpu_memory_utilization", "rollout.vllm.gpu_memory_utilization", "", 0.5),
    KeyRow("max_model_len", "rollout.vllm.max_model_len", "else prompt + completion"),
    KeyRow("max_num_seqs", "rollout.max_concurrency", "", 256),
    KeyRow("max_num_batched_tokens", "rollout.vllm.extra.max_num_batched_tokens"),
    KeyRow("enforce_eager", "rollout.vllm.enforce_eager", "", False),
    KeyRow("engine_kwargs.vllm.*", "rollout.vllm.extra"),
    KeyRow("engine_kwargs.*", note="for another engine", near="rollout.vllm.extra"),
    KeyRow("val_kwargs.n", "eval.samples", "", 1),
    KeyRow(
        "val_kwargs.*", note="evaluations sample at temperature 1 and, with eval.greedy, once at 0", near="eval.greedy"
    ),
    KeyRow("over_sample_rate", note="over-sampling is a number of samples of a group here", near="rollout.oversample"),
    KeyRow("multi_turn.*", note="conversations with tools are a workflow", near="rollout.workflow"),
    KeyRow("agent.*", note="how a sample is generated is a workflow", near="rollout.workflow"),
    KeyRow(
        "free_cache_engine",
        note="devices are shared only where they are few",
        near="launch.share_devices",
    ),
    KeyRow("calculate_log_probs", note="log-probabilities of the engine are always kept"),
    KeyRow("enable_chunked_prefill", note="vLLM's default holds", near="rollout.vllm.extra"),
    KeyRow("enable_prefix_caching", note="vLLM's default holds", near="rollout.vllm.extra"),
    KeyRow("mode", note="servers always generate without pause"),
    KeyRow(
        "log_prob_*",
        note="log-probabilities are computed in the packed micro-batches",
        near="trainer.micro_batch_tokens",
    ),
    KeyRow("checkpoint_engine.*", note="weights travel over ZMQ in chunks", near="weights.chunk_bytes"),
    KeyRow("data_parallel_size", note="more servers take its place", near="rollout.servers"),
    KeyRow("expert_parallel_size", note="vLLM's enable_expert_parallel", near="rollout.vllm.extra"),
    KeyRow("seed", note="one seed for all", near="seed"),
    KeyRow("*", note="a detail of verl's rollout worker", near="rollout.vllm.extra"),
]

_TRAINER = [
    KeyRow("total_epochs", "steps", "epochs * rows / groups_per_step, with --rows", 30),
    KeyRow("total_training_steps", "steps"),
    KeyRow("project_name", "telemetry.project", "", "verl_examples"),
    KeyRow("experiment_name", "name", "", "gsm8k"),
    KeyRow("logger", "telemetry.trackers", "", ("console", "wandb")),
    KeyRow("nnodes", "trainer.nodes", "", 1),
    KeyRow("n_gpus_per_node", "trainer.processes", "", 8),
    KeyRow("device", "trainer.platform", "also rollout.vllm.platform; npu is ascend there", "cuda"),
    KeyRow("save_freq", "trainer.checkpoint.every_steps", "", -1),
    KeyRow("test_freq", "eval.every_steps", "", -1),
    KeyRow("max_actor_ckpt_to_keep", "trainer.checkpoint.keep"),
    KeyRow("val_before_train", note="a run is always evaluated before and after", near="eval.every_steps"),
    KeyRow("val_only", note="async-grpo eval", near="eval.prompts"),
    KeyRow("default_local_dir", note="a run writes into runs_dir/name", near="runs_dir"),
    KeyRow("resume_mode", note="the same command resumes; --fresh starts over"),
    KeyRow("resume_from_path", note="the same command resumes"),
    KeyRow("critic_warmup", note="there is no critic"),
    KeyRow("balance_batch", note="sequences are dealt out to ranks by their tokens"),
    KeyRow("log_val_generations", note="every eighth group is written to samples/", near="telemetry.samples_every"),
    KeyRow("rollout_data_dir", note="samples are in the run's folder", near="telemetry.samples_every"),
    KeyRow(
        "v1.sampler.max_off_policy_threshold", note="the bound on the age is for all selectors", near="max_staleness"
    ),
    KeyRow("v1.*", note="the loop is asynchronous; one bound rules it", near="max_staleness"),
    KeyRow("*", note="a detail of verl's driver"),
]

_ASYNC = [
    KeyRow("staleness_threshold", "max_staleness", "a share of a step's prompts, rounded up to whole steps", 0.1),
    KeyRow("trigger_parameter_sync_step", "groups_per_step, trainer.mini_batches", "times require_batches", 4),
    KeyRow("require_batches", "groups_per_step, trainer.mini_batches", "", 1),
    KeyRow("partial_rollout", "rollout.interruption", "true: recompute; false: drain", True),
    KeyRow("*", note="samples in flight have one bound, and devices are not moved", near="rollout.max_concurrency"),
]

ROWS = (
    *renamed(_DATA, DATA),
    *renamed(_ACTOR, ACTOR),
    *renamed(_ALGORITHM, ALGORITHM),
    *renamed(_ROLLOUT, ROLLOUT),
    *renamed(_TRAINER, "trainer."),
    *renamed(_ASYNC, ASYNC),
    KeyRow("rollout.n_gpus_per_node", "rollout.servers", "devices that only generate / tensor_parallel", 8),
    KeyRow("rollout.nnodes", "rollout.servers", "", 1),
    KeyRow("rollout.total_rollout_steps", "steps", "prompts in all / groups_per_step", 0),
    KeyRow("rollout.*", note="a detail of the asynchronous recipe", near="rollout"),
    KeyRow("actor_rollout_ref.model.path", "model.path", "", "~/models/deepseek-llm-7b-chat"),
    KeyRow("actor_rollout_ref.model.enable_gradient_checkpointing", "trainer.recompute", "true: full (FSDP)", True),
    KeyRow("actor_rollout_ref.model.lora_*", note=ADAPTERS, near="model.lora"),
    KeyRow("actor_rollout_ref.model.use_remove_padding", note="sequences are always packed"),
    KeyRow("actor_rollout_ref.model.*", note="how verl builds the model", near="model"),
    KeyRow("actor_rollout_ref.ref.*", note="the reference runs in the trainer's own layout", near="trainer.reference"),
    KeyRow(
        "actor_rollout_ref.hybrid_engine",
        note="devices are shared only where they are few",
        near="launch.share_devices",
    ),
    KeyRow(
        "actor_rollout_ref.nccl_timeout",
        note="a step that hangs ends with its own error",
        near="trainer.take_timeout_s",
    ),
    *(
        row
        for place in REWARD
        for row in (
            KeyRow(f"{place}enable", "rewards.overlong", "true: soft", False),
            KeyRow(f"{place}len", "rewards.soft_overlong_tokens"),
            KeyRow(f"{place}penalty_factor", "rewards.soft_overlong_factor", "", 1.0),
            KeyRow(f"{place}*", note="a detail of the punishment", near="rewards.overlong"),
        )
    ),
    KeyRow(
        "custom_reward_function.*",
        note="name your function as module:attribute; its arguments differ",
        near="rewards.functions",
    ),
    KeyRow("reward.*", note="how verl runs rewards; here they are processes with a deadline", near="rewards"),
    KeyRow("reward_model.*", note="a model that judges is reached over HTTP", near="rewards.functions"),
    KeyRow("critic.*", note="there is no critic"),
    KeyRow("distillation.*", note="there is no distillation"),
    KeyRow("model_engine", note="the trainer is Megatron-core", near="trainer"),
    KeyRow("actor@*", note="the trainer is Megatron-core", near="trainer"),
    KeyRow("hydra.*", note="Hydra's own"),
    KeyRow("defaults", note="files that Hydra adds are not read; verl's defaults are taken"),
    KeyRow("global_profiler.*", note="see docs/operations.md", near="telemetry"),
    KeyRow("ray_kwargs.*", note="there is no Ray"),
    KeyRow("transfer_queue.*", note="the replay buffer takes its place", near="buffer"),
    KeyRow("--config-path", note="files that Hydra adds are not read; verl's defaults are taken"),
    KeyRow("--config-name", note="files that Hydra adds are not read; verl's defaults are taken"),
)
