"""State of the policy in a checkpoint, and the traits of the model and the ranks in its manifest."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch import Tensor
from transformers import PretrainedConfig

from trainer.checkpoint.manifest import RankLayout
from trainer.model.lora import Adapters
from trainer.model.optimizer_state import load_optimizer_state, parameter_states, prepare_for_checkpoint
from trainer.model.policy import Policy

_TRAITS = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "tie_word_embeddings",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
)
"""Keys of a Hugging Face configuration in which the models of a run must agree. `num_experts_per_tok` changes no shape,
so without it a model that computes something else would load without an error."""


def metadata() -> dict[str, Any]:
    """Return the format of the stored state. A new dict per call, because Megatron adds its process groups to it."""
    return {"distrib_optim_sharding_type": "fully_reshardable"}


def policy_state(policy: Policy, *, written_by: RankLayout | None = None) -> dict[str, Any]:
    """Return the state as Megatron's sharded tensors of this rank.

    To save it, omit `written_by`; to load a checkpoint into it, pass the layout of the ranks that wrote the checkpoint.
    The random state belongs to a (pipeline, tensor) rank. It is not loaded into another layout of these; no step draws
    from it, so the steps are the same.
    """
    prepare_for_checkpoint(policy.optimizer)
    is_loading = written_by is not None
    model = policy.sharded_state(metadata())
    optimizer = policy.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata())
    state = {"model": model, "optimizer": optimizer}
    own = current_layout()
    if written_by is None or (written_by.pipeline, written_by.tensor) == (own.pipeline, own.tensor):
        state["random"] = _random_state()
    return state


def load_into_policy(policy: Policy, loaded: dict[str, Any]) -> None:
    """Copy a loaded state into the policy."""
    policy.load_sharded_state(loaded["model"])
    load_optimizer_state(policy.optimizer, loaded["optimizer"])
    if policy.offload is not None:
        policy.offload.move_to_host()
    if "random" in loaded:
        torch.cuda.set_rng_state(loaded["random"]["device"])
        torch.set_rng_state(loaded["random"]["torch"])
        tensor_parallel.get_cuda_rng_tracker().set_states(loaded["random"]["tracker"])


def live_tensors(policy: Policy) -> list[Tensor]:
    """Return all tensors that a step changes in place."""
    weights = [*policy.model.parameters(), *policy.model.buffers()]
    states = [
        tensor
        for parameter, state in parameter_states(policy.optimizer)
        for tensor in (parameter.data, *state.values())
    ]
    return [tensor for tensor in (*weights, *states) if isinstance(tensor, Tensor)]


def model_traits(
    hf: PretrainedConfig, dtype: torch.dtype, adapters: Adapters | None = None
) -> dict[str, str | int | bool | None]:
    """Return the values in which another model, or other adapters of this one, would differ."""
    traits = {name: getattr(hf, name) for name in _TRAITS if hasattr(hf, name)}
    traits["precision"] = str(dtype).removeprefix("torch.")
    if adapters is not None:
        traits |= adapters.traits
    return traits


def current_layout() -> RankLayout:
    """Return the current number of ranks of each kind."""
    return RankLayout(
        tensor=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline=parallel_state.get_pipeline_model_parallel_world_size(),
        context=parallel_state.get_context_parallel_world_size(),
        expert=parallel_state.get_expert_model_parallel_world_size(),
        data=parallel_state.get_data_parallel_world_size(),
    )


def _random_state() -> ShardedObject:
    """Return the random state of this (pipeline, tensor) rank; data- and context-parallel ranks share it."""
    return ShardedObject(
        "random",
        {
            "torch": torch.get_rng_state(),
            "device": torch.cuda.get_rng_state(),
            "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
        },
        (
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_world_size(),
        ),
        (parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()),
        replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )
