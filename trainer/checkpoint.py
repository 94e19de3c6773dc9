"""Checkpoints that a trainer resumes from exactly, and the final weights for everybody else.

    checkpoints/00000010/   Megatron distributed checkpoint of policy version 10
    checkpoints/latest      the folder to resume from
    checkpoints/hf/         Hugging Face export

Written into a draft folder, renamed when whole, and only then named by `latest`: a trainer killed
at any moment leaves a checkpoint to resume from. The optimizer's state is stored in a form that
does not depend on the number of data-parallel ranks.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import torch as megatron_strategies
from torch import Tensor

from async_grpo.errors import TrainingError
from trainer.model.hf_folder import write_folder
from trainer.parallel import is_leader, share_ints
from trainer.policy import Policy
from trainer.retention import superfluous

METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}
_LATEST = "latest"


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """The checkpoints of one run. All calls are collective: every rank makes them."""

    path: Path
    keep: int

    def newest(self) -> int | None:
        """The version to resume from; None before the first checkpoint."""
        marker = self.path / _LATEST
        found = int(marker.read_text()) if is_leader() and marker.exists() else -1
        (version,) = share_ints([found] if is_leader() else None, 1)
        return version if version >= 0 else None

    def save(self, policy: Policy, version: int, epoch: int) -> None:
        """Write the checkpoint of `version`; then only it and the `keep` - 1 before it stay."""
        draft, target = self.path / f"draft-{version:08d}", self._folder(version)
        if is_leader():
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
        dist.barrier()
        state = _state(policy, loading=False) | {"version": version, "epoch": epoch}
        dist_checkpointing.save(state, str(draft), _InProcessSave("torch_dist", 1), content_metadata=METADATA)
        dist.barrier()
        if is_leader():
            shutil.rmtree(target, ignore_errors=True)
            draft.rename(target)
            self._mark(version)
            self._prune(version)

    def load(self, policy: Policy, version: int) -> None:
        """Bring back weights, optimizer and random state of `version`. Raises TrainingError."""
        _allocate_optimizer_state(policy)
        state = dist_checkpointing.load(_state(policy, loading=True), str(self._folder(version)))
        if state["version"] != version:
            raise TrainingError(
                f"{self._folder(version)} holds version {state['version']}. It was renamed; restore its name"
            )
        policy.model.load_state_dict(state["model"])
        for optimizer in _distributed_optimizers(policy):
            optimizer._set_main_param_and_optimizer_states = MethodType(_set_states, optimizer)
        policy.optimizer.load_state_dict(state["optimizer"])
        _separate_step_counters(policy)
        _set_random_state(state["random"])

    def export(self, policy: Policy, source: Path) -> Path:
        """The present weights as checkpoints/hf, with configuration and tokenizer from `source`."""
        tensors = {name: tensor.clone() for name, tensor in policy.export()}
        target = self.path / "hf"
        if is_leader():
            write_folder(target, source, tensors)
        return target

    def _folder(self, version: int) -> Path:
        return self.path / f"{version:08d}"

    def _mark(self, version: int) -> None:
        draft = self.path / f"{_LATEST}.part"
        draft.write_text(f"{version}\n")
        draft.replace(self.path / _LATEST)

    def _prune(self, saved: int) -> None:
        versions = [int(path.name) for path in self.path.iterdir() if path.name.isdigit()]
        for version in superfluous(versions, saved=saved, keep=self.keep):
            shutil.rmtree(self._folder(version))


class _InProcessSave(megatron_strategies.TorchDistSaveShardedStrategy):
    """Writes the same files from this very process.

    Megatron's writer forks workers around a manager process that stays: seconds for a first, small
    checkpoint, and a SIGTERM to the process group would take it away under the last one.
    """

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> None:
        """One file a rank, on disk when this returns."""
        renamed, _, _ = megatron_strategies._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        torch_checkpoint.save(
            megatron_strategies.mcore_to_pyt_state_dict(renamed, False),
            storage_writer=torch_checkpoint.FileSystemWriter(checkpoint_dir),
            planner=megatron_strategies.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def _state(policy: Policy, *, loading: bool) -> dict[str, Any]:
    """What a checkpoint holds, as Megatron's sharded tensors of this rank."""
    model = policy.model.sharded_state_dict(metadata=METADATA)
    return {
        "model": model,
        "optimizer": policy.optimizer.sharded_state_dict(model, is_loading=loading, metadata=METADATA),
        "random": _random_state(),
        "version": 0,
        "epoch": 0,
    }


def _random_state() -> ShardedObject:
    """Of each (pipeline, tensor) rank; data-parallel ranks have the same."""
    return ShardedObject(
        "random",
        {"torch": torch.get_rng_state(), "tracker": tensor_parallel.get_cuda_rng_tracker().get_states()},
        (
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_world_size(),
        ),
        (parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()),
        replica_id=parallel_state.get_data_parallel_rank(),
    )


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])


def _distributed_optimizers(policy: Policy) -> list[Any]:
    return list(getattr(policy.optimizer, "chained_optimizers", [policy.optimizer]))


def _parameter_states(policy: Policy) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """(parameter shard, its AdamW state) of this rank."""
    for optimizer in _distributed_optimizers(policy):
        for group in optimizer.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, optimizer.optimizer.state[parameter]


def _allocate_optimizer_state(policy: Policy) -> None:
    """torch's AdamW makes its state in the first step; loading needs it before."""
    for parameter, state in _parameter_states(policy):
        if not state:
            state.update(
                step=torch.tensor(0.0),
                exp_avg=torch.zeros_like(parameter),
                exp_avg_sq=torch.zeros_like(parameter),
            )


@torch.no_grad()
def _set_states(optimizer: Any, model_parameter: Tensor, tensors: dict[str, Tensor]) -> None:
    """Megatron's method of this name, for torch's AdamW: its `step` is not among the stored tensors."""
    group, order = optimizer.model_param_group_index_map[model_parameter]
    parameter = optimizer.optimizer.param_groups[group]["params"][order]
    for name, target in {"param": parameter, **optimizer.optimizer.state[parameter]}.items():
        if name in tensors:
            target.copy_(tensors[name])


def _separate_step_counters(policy: Policy) -> None:
    """Loading gives all parameters one `step` tensor, which AdamW would then raise once per parameter."""
    for _, state in _parameter_states(policy):
        state["step"] = state["step"].clone()
