"""This rank's part of a checkpoint: copied in memory by all ranks together, then written by each rank separately.

    RankSnapshot   (all ranks together)   plans which rank writes what; copies the tensors that training changes
    write_part     (each rank's thread)   writes the rank's file and the list of its shards to disk
    read_part      (rank 0's thread)      waits for the list of another rank
    finish         (rank 0's thread)      writes the index over the files of all ranks

The threads of the ranks communicate by files in the draft folder, `draft-EPOCH-VERSION`, one per rank:

    part-00001.json      rank 1 has written its file: list of its shards
    part-00001.failed    rank 1 has failed: the reason

A thread makes no collective calls, so it cannot interfere with those of the step. It is a daemon thread: a trainer that
ends with an error does not wait for a half-written file.

The files are in Megatron's `torch_dist` format. `SaveStrategy` splits torch's `save_state_dict` (plan, then write) in
two, with its private parts. Megatron's own background writer is not used: it forks workers and keeps a manager process,
which takes seconds for a small first checkpoint, and a SIGTERM to the process group would kill it in the last one.
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
from trainer.checkpoint.manifest import FileDigest, hash_file
from trainer.checkpoint.state import metadata

_POLL_EVERY_S = 0.02


class BackgroundJob:
    """Runs `work`, such as writing a checkpoint of `version`, in a background thread that starts immediately."""

    def __init__(self, kind: str, version: int, work: Callable[[], None]) -> None:
        self.title = f"the {kind} of version {version}"
        self.version = version
        self.failure: str | None = None
        """Why the job failed; None if it did not, or has not ended."""
        self._work = work
        self._thread = threading.Thread(target=self._run, name=f"{kind}-{version}", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the job at most `timeout_s`. Returns True if it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # torch's CheckpointException is not an Exception
            self.failure = f"{type(error).__name__}: {error}"


class ShardLocation(msgspec.Struct, frozen=True):
    """Location of one shard in a rank's file; the fields of torch's WriteResult."""

    name: str
    offsets: list[int] | None
    index: int | None
    bytes: int
    file: str
    start: int
    length: int


class RankShards(msgspec.Struct, frozen=True):
    """Shards and files that one rank has written."""

    shards: list[ShardLocation]
    files: dict[str, FileDigest]


class RankSnapshot:
    """This rank's part of a checkpoint in `folder`, which must exist. All ranks construct it together."""

    def __init__(
        self, state: dict[str, Any], folder: Path, live: Collection[Tensor], lent: Collection[Tensor] = ()
    ) -> None:
        """Plan the checkpoint and copy what the next step would change.

        `live`: tensors that the next step changes; state that shares memory with them is copied. `lent`: live tensors
        that stay unchanged until they are written, so they need no copy.
        """
        self._folder = folder
        copied_addresses = {_address(tensor) for tensor in live} - {_address(tensor) for tensor in lent}
        self._strategy = SaveStrategy(copied_addresses)
        # All data-parallel ranks have the weights. Without this wrapper the first would write all of them.
        shared = FullyParallelSaveStrategyWrapper(
            self._strategy, parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
        dist_checkpointing.save(state, str(folder), shared, content_metadata=metadata())

    def write(self) -> RankShards:
        """Write this rank's file (none if other ranks write all of its state)."""
        shards = [_to_location(result) for result in self._strategy.write()]
        names = {shard.file for shard in shards}
        return RankShards(shards, {name: hash_file(self._folder / name) for name in names})

    def finish(self, parts: list[RankShards]) -> None:
        """Write the index over the parts of all ranks. Rank 0 only."""
        results = [[_to_write_result(shard) for shard in part.shards] for part in parts]
        self._strategy.writer.finish(self._strategy.index, results)


class SaveStrategy(megatron_strategies.TorchDistSaveShardedStrategy):
    """Splits torch's `save_state_dict`: `save` makes the plan and copies the tensors, `write` writes them later."""

    writer: torch_checkpoint.FileSystemWriter
    index: Metadata
    """Set on rank 0 only."""

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
    """Copies the tensors of a plan, and returns each copy once, so that its memory is freed as it is written."""

    def __init__(self, live: set[int]) -> None:
        super().__init__(dedup_replicated_tensors=False, flatten_state_dict=False)
        self._live = live
        self._copies: dict[MetadataIndex, Any] = {}

    def copy(self, plan: SavePlan) -> None:
        """Copy the tensors of the plan. Training may change the originals afterwards."""
        self._copies = {}
        for item in plan.items:
            self._copies[item.index] = self._copy_if_live(super().resolve_data(item))
        self.state_dict: dict[str, Any] = {}

    def resolve_data(self, write_item: WriteItem) -> Any:
        return self._copies.pop(write_item.index)

    def _copy_if_live(self, data: Any) -> Any:
        if not isinstance(data, Tensor):
            return data  # already serialised
        if data.is_cpu and _address(data) not in self._live:
            return data.detach()  # created for this checkpoint, or lent
        return data.detach().to("cpu", copy=True)


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _to_location(result: WriteResult) -> ShardLocation:
    index = result.index
    storage = result.storage_data
    return ShardLocation(
        name=index.fqn,
        offsets=list(index.offset) if index.offset is not None else None,
        index=index.index,
        bytes=result.size_in_bytes,
        file=storage.relative_path,
        start=storage.offset,
        length=storage.length,
    )


def _to_write_result(shard: ShardLocation) -> WriteResult:
    offsets = torch.Size(shard.offsets) if shard.offsets is not None else None
    storage = _StorageInfo(shard.file, shard.start, shard.length)
    return WriteResult(MetadataIndex(shard.name, offsets, shard.index), shard.bytes, storage)


def draft_path(folder: Path, epoch: int, version: int) -> Path:
    """Draft folder of a version. Each trainer has its own, because an earlier one that seemed dead may still write."""
    return folder / f"draft-{epoch:08d}-{version:08d}"


def list_drafts(folder: Path) -> list[tuple[Path, int]]:
    """Return the drafts in the folder with the epochs of their writers; 0 for a name without an epoch."""
    drafts = []
    for path in folder.glob("draft-*"):
        _, epoch, *version = path.name.split("-")
        drafts.append((path, int(epoch) if version and epoch.isdigit() else 0))
    return drafts


def write_part(snapshot: RankSnapshot, draft: Path, rank: int) -> None:
    """Write this rank's file and its list of shards; if that fails, write the reason for rank 0 and raise the error."""
    try:
        write_atomic(_part_path(draft, rank), msgspec.json.encode(snapshot.write()), synced=True)
    except Exception as error:
        _failure_path(draft, rank).write_text(f"rank {rank}: {error}")
        raise


def read_part(draft: Path, rank: int, timeout_s: float) -> RankShards:
    """Wait for the list of shards of `rank`, remove its file and return it.

    Raises OSError if the rank failed or the draft was removed, WaitTimeout.
    """
    path = _part_path(draft, rank)
    deadline_s = time.monotonic() + timeout_s
    while not path.exists():
        if _failure_path(draft, rank).exists():
            raise OSError(_failure_path(draft, rank).read_text() or f"rank {rank} failed")
        if not draft.is_dir():
            raise FileNotFoundError(f"{draft} was removed by another process")
        if time.monotonic() > deadline_s:
            fix = "Is the folder shared by all machines? Raise trainer.checkpoint.timeout_s"
            raise WaitTimeout(f"rank {rank}'s part of {draft}", timeout_s, fix)
        time.sleep(_POLL_EVERY_S)
    part = msgspec.json.decode(path.read_bytes(), type=RankShards)
    path.unlink()
    return part


def _part_path(draft: Path, rank: int) -> Path:
    return draft / f"part-{rank:05d}.json"


def _failure_path(draft: Path, rank: int) -> Path:
    return draft / f"part-{rank:05d}.failed"
