"""This rank's part of a checkpoint: copied in memory by all ranks together, then written by each rank alone.

    RankSnapshot   (all ranks together)   who writes what; copies of the tensors that training goes on changing
    write_part     (each rank's thread)   its file, on disk when this returns, and what lies where in it
    read_part      (rank 0's thread)      waits for the part of another rank
    finish         (rank 0's thread)      the index over the files of all ranks

The threads of the ranks meet in the draft folder, `draft-EPOCH-VERSION`, by one file each:

    part-00001.json      rank 1 has written its file; what lies where in it
    part-00001.failed    rank 1 cannot, and why

A thread makes no collective calls, so it cannot interfere with those of the step. It is a daemon thread: a trainer that
ends with an error does not wait for a half-written file.

The files are in Megatron's `torch_dist` format. Megatron's own background writer is not used: it forks workers around
a manager process that stays, which takes seconds for a small first checkpoint, and a SIGTERM to the process group would
end it during the last one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import torch as megatron_strategies
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

from async_grpo.errors import WaitTimeout
from async_grpo.utils.files import write_atomic
from trainer.checkpoint.manifest import File, describe
from trainer.checkpoint.state import metadata

_LOOK_EVERY_S = 0.02


class BackgroundJob:
    """Writes something of `version`, such as a checkpoint, on a thread that starts at once."""

    def __init__(self, kind: str, version: int, work: Callable[[], None]) -> None:
        self.what, self.version = f"the {kind} of version {version}", version
        self.failure = ""
        """Why the job failed; "" if it did not (yet)."""
        self._work = work
        self._thread = threading.Thread(target=self._run, name=f"{kind}-{version}", daemon=True)
        self._thread.start()

    def ended(self, timeout_s: float) -> bool:
        """Whether the job has ended, within `timeout_s`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # kept for `failure`; errors of torch's checkpoints are no Exceptions
            self.failure = f"{type(error).__name__}: {error}"


class Written(msgspec.Struct, frozen=True):
    """Where one shard lies."""

    name: str
    offsets: list[int] | None
    index: int | None
    bytes: int
    file: str
    start: int
    length: int


class RankShards(msgspec.Struct, frozen=True):
    """The shards and files that one rank has written."""

    shards: list[Written]
    files: dict[str, File]


class RankSnapshot:
    """This rank's part of a checkpoint in `folder`, which exists. All ranks construct it together."""

    def __init__(
        self, state: dict[str, Any], folder: Path, live: Collection[Tensor], lent: Collection[Tensor] = ()
    ) -> None:
        """`live` are the tensors that the next step changes: what shares memory with them is copied, but for those
        that are `lent` until they are written."""
        self._folder = folder
        self._strategy = SaveStrategy({_memory(tensor) for tensor in live} - {_memory(tensor) for tensor in lent})
        # Without it the first data-parallel rank alone would copy and write the weights, which all of them have.
        shared = FullyParallelSaveStrategyWrapper(
            self._strategy, parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
        dist_checkpointing.save(state, str(folder), shared, content_metadata=metadata())

    def write(self) -> RankShards:
        """Write this rank's file (none, if other ranks have all of its state too)."""
        shards = [_written(result) for result in self._strategy.write()]
        return RankShards(shards, {name: describe(self._folder / name) for name in {shard.file for shard in shards}})

    def finish(self, parts: list[RankShards]) -> None:
        """Write the index over the parts of all ranks. Rank 0 only."""
        results = [[_result(shard) for shard in part.shards] for part in parts]
        self._strategy.writer.finish(self._strategy.index, results)


class SaveStrategy(megatron_strategies.TorchDistSaveShardedStrategy):
    """Does what torch's `save` does before it writes; `write` then writes."""

    writer: torch_checkpoint.FileSystemWriter
    index: Metadata
    """Rank 0 has it."""

    def __init__(self, live: set[int]) -> None:
        super().__init__("torch_dist", 1)
        self._planner = SavePlanner(live)

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> None:
        renamed, _, _ = megatron_strategies._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        self.writer = torch_checkpoint.FileSystemWriter(checkpoint_dir)
        self._plan = self._make_plan(megatron_strategies.mcore_to_pyt_state_dict(renamed, False))
        self._planner.copy(self._plan)

    def write(self) -> list[WriteResult]:
        results: list[WriteResult] = self.writer.write_data(self._plan, self._planner).wait()
        return results

    def _make_plan(self, state: dict[str, Any]) -> SavePlan:
        ranks = _DistWrapper(None, True, 0)

        def local_step() -> SavePlan:
            self._planner.set_up_planner(state, self.writer.storage_meta(), ranks.is_coordinator)
            self.writer.set_up_storage_writer(ranks.is_coordinator)
            return self.writer.prepare_local_plan(self._planner.create_local_plan())

        def global_step(plans: list[SavePlan]) -> list[SavePlan]:
            plans, self.index = self._planner.create_global_plan(plans)
            return self.writer.prepare_global_plan(plans)

        return self._planner.finish_plan(ranks.reduce_scatter("plan", local_step, global_step))


class SavePlanner(megatron_strategies.MCoreSavePlanner):
    """Copies the tensors of a plan, and hands each copy out once."""

    def __init__(self, live: set[int]) -> None:
        super().__init__(dedup_replicated_tensors=False, flatten_state_dict=False)
        self._live = live
        self._held: dict[MetadataIndex, Any] = {}

    def copy(self, plan: SavePlan) -> None:
        """Copy the tensors of the plan; afterwards training may go on."""
        self._held = {item.index: self._own(super(SavePlanner, self).resolve_data(item)) for item in plan.items}
        self.state_dict: dict[str, Any] = {}

    def resolve_data(self, write_item: WriteItem) -> Any:
        return self._held.pop(write_item.index)

    def _own(self, data: Any) -> Any:
        if not isinstance(data, Tensor):
            return data  # serialised already
        if data.is_cpu and _memory(data) not in self._live:
            return data.detach()  # made for this checkpoint, or lent to it
        return data.detach().to("cpu", copy=True)


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _written(result: WriteResult) -> Written:
    index, place = result.index, result.storage_data
    offsets = list(index.offset) if index.offset is not None else None
    return Written(
        index.fqn, offsets, index.index, result.size_in_bytes, place.relative_path, place.offset, place.length
    )


def _result(one: Written) -> WriteResult:
    offsets = torch.Size(one.offsets) if one.offsets is not None else None
    place = _StorageInfo(one.file, one.start, one.length)
    return WriteResult(MetadataIndex(one.name, offsets, one.index), one.bytes, place)


def draft_of(folder: Path, epoch: int, version: int) -> Path:
    """The draft of one trainer: each has its own, because an earlier one that seemed dead may still be writing."""
    return folder / f"draft-{epoch:08d}-{version:08d}"


def drafts(folder: Path) -> list[tuple[Path, int]]:
    """The drafts in the folder with the epochs of their writers; 0 for a name without an epoch."""
    found = []
    for path in folder.glob("draft-*"):
        _, epoch, *version = path.name.split("-")
        found.append((path, int(epoch) if version and epoch.isdigit() else 0))
    return found


def write_part(snapshot: RankSnapshot, draft: Path, rank: int) -> None:
    """Write this rank's file and its part, or the reason for the failure before the error is raised."""
    try:
        write_atomic(_part(draft, rank), msgspec.json.encode(snapshot.write()), synced=True)
    except Exception as error:
        _failed(draft, rank).write_text(f"rank {rank}: {error}")
        raise


def read_part(draft: Path, rank: int, timeout_s: float) -> RankShards:
    """Wait for the part of `rank`, remove its file and return it.

    Raises OSError if the rank failed or the draft was removed, WaitTimeout.
    """
    path, deadline_s = _part(draft, rank), time.monotonic() + timeout_s
    while not path.exists():
        if _failed(draft, rank).exists():
            raise OSError(_failed(draft, rank).read_text() or f"rank {rank} failed")
        if not draft.is_dir():
            raise FileNotFoundError(f"{draft} was removed by another process")
        if time.monotonic() > deadline_s:
            fix = "Is the folder shared by all machines? Raise trainer.checkpoint.timeout_s"
            raise WaitTimeout(f"rank {rank}'s part of {draft}", timeout_s, fix)
        time.sleep(_LOOK_EVERY_S)
    part = msgspec.json.decode(path.read_bytes(), type=RankShards)
    path.unlink()
    return part


def _part(draft: Path, rank: int) -> Path:
    return draft / f"part-{rank:05d}.json"


def _failed(draft: Path, rank: int) -> Path:
    return draft / f"part-{rank:05d}.failed"
