"""The state of the policy that a checkpoint holds, and its description of the model and the ranks."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch import Tensor
from transformers import PretrainedConfig

from trainer.checkpoint.manifest import RankLayout
from trainer.model.lora import Adapters
from trainer.model.optimizer import load_state, make_storable, parameter_states
from trainer.model.policy import Policy

_TRAITS = (
    *("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "vocab_size", "tie_word_embeddings", "num_experts", "moe_intermediate_size"),
)


def metadata() -> dict[str, Any]:
    """The format of the stored state. New for every call, because Megatron adds its process groups to it."""
    return {"distrib_optim_sharding_type": "fully_reshardable"}


def state_of(policy: Policy, *, written_by: RankLayout | None = None) -> dict[str, Any]:
    """The state as Megatron's sharded tensors of this rank: to save it, or to fill it from a checkpoint of
    `written_by`.

    The random state belongs to a (pipeline, tensor) rank: where these were others, it stays as it
    was seeded. No step draws from it, so the steps are the same.
    """
    make_storable(policy.optimizer)
    loading = written_by is not None
    model = policy.sharded_state(metadata())
    optimizer = policy.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata())
    state = {"model": model, "optimizer": optimizer}
    own = layout_of_ranks()
    if written_by is None or (written_by.pipeline, written_by.tensor) == (own.pipeline, own.tensor):
        state["random"] = _random_state()
    return state


def fill(policy: Policy, loaded: dict[str, Any]) -> None:
    """Put the loaded state into the policy."""
    policy.load_sharded_state(loaded["model"])
    load_state(policy.optimizer, loaded["optimizer"])
    if policy.offload is not None:
        policy.offload.store()
    if "random" in loaded:
        torch.cuda.set_rng_state(loaded["random"]["device"])
        torch.set_rng_state(loaded["random"]["torch"])
        tensor_parallel.get_cuda_rng_tracker().set_states(loaded["random"]["tracker"])


def live_tensors(policy: Policy) -> list[Tensor]:
    """All tensors that a step changes in place."""
    weights = [*policy.model.parameters(), *policy.model.buffers()]
    states = [
        tensor
        for parameter, state in parameter_states(policy.optimizer)
        for tensor in (parameter.data, *state.values())
    ]
    return [tensor for tensor in (*weights, *states) if isinstance(tensor, Tensor)]


def traits_of(
    hf: PretrainedConfig, dtype: torch.dtype, adapters: Adapters | None = None
) -> dict[str, str | int | bool | None]:
    """The values in which another model would differ, or other adapters of it."""
    traits = {name: getattr(hf, name) for name in _TRAITS if hasattr(hf, name)}
    trained = {} if adapters is None else adapters.traits()
    return {**traits, "precision": str(dtype).removeprefix("torch."), **trained}


def layout_of_ranks() -> RankLayout:
    """The present number of ranks of each kind."""
    return RankLayout(
        tensor=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline=parallel_state.get_pipeline_model_parallel_world_size(),
        context=parallel_state.get_context_parallel_world_size(),
        expert=parallel_state.get_expert_model_parallel_world_size(),
        data=parallel_state.get_data_parallel_world_size(),
    )


def _random_state() -> ShardedObject:
    """The random state of a (pipeline, tensor) rank; data- and context-parallel ranks have the same."""
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
