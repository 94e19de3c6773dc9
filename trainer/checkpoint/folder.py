"""The checkpoints of a run: exact ones to resume from, and Hugging Face exports for other programs.

    checkpoints/00000010/      Megatron distributed checkpoint of policy version 10, with its manifest
    checkpoints/latest         the version to resume from
    checkpoints/best           the version that was evaluated best, with keep_best
    checkpoints/hf-00000010/   Hugging Face export of version 10, with export_every_steps
    checkpoints/hf/            Hugging Face export of the last version

    write: all ranks copy their part into memory --> each rank's thread writes its file into a draft
           --> rank 0's thread waits for these files, writes index and manifest, renames, marks `latest`
    prune: then it deletes what nothing keeps; what cannot be deleted is a warning
    copy:  another thread of rank 0 copies the checkpoint to `store`; a failure is a warning, and the next checkpoint is
           copied in its place

Only a checkpoint that cannot be written ends the run. The buffer may forget what a checkpoint holds once it is safe: on
disk and, with a store, copied.

The threads meet in files, never in collective calls, so training and writing cannot wait for each other. A draft is
renamed when everything in it is on disk, and only then named by `latest`: a trainer killed at any moment leaves a
checkpoint to resume from. The stored state does not depend on the layout of the ranks. Which checkpoints are deleted
and which is the best are pure functions (`to_delete`, `protected`, `ranked`).
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from async_grpo.config.trainer import CheckpointConfig
from async_grpo.errors import CheckpointDamaged, CheckpointError
from async_grpo.utils.files import sync, write_atomic
from async_grpo.wire.board import Evaluation
from trainer.checkpoint.manifest import CheckpointManifest, changed, check_fits, read_manifest, seal, unreadable
from trainer.checkpoint.snapshot import BackgroundJob, RankSnapshot, draft_of, drafts, read_part, write_part
from trainer.checkpoint.state import fill, layout_of_ranks, live_tensors, metadata, state_of, traits_of
from trainer.checkpoint.store import CHOSEN, RunStore, StoredCheckpoint
from trainer.model.hf_folder import write_folder
from trainer.model.policy import Policy
from trainer.model.reference import Reference
from trainer.ranks.distributed import broadcast_bytes, broadcast_ints, is_rank_zero, max_over_ranks

_LATEST, _BEST = "latest", "best"
_REFERENCE = "reference"

_RUNNING, _FAILED, _DONE = 0, 1, 2
"""Of a copy, as rank 0 tells the others."""

_SLACK_S = 10.0
"""Seconds to wait for a thread beyond what the thread itself may wait."""


def to_delete(versions: Collection[int], *, saved: int, keep: int, protected: Collection[int] = ()) -> list[int]:
    """The versions to delete, in order: all but `saved`, the newest `keep` - 1 below it and the `protected` ones.

    Versions above `saved` were renamed but never named by `latest`: their trainer was killed in
    between, and the one that followed resumed below them. They go even if protected.

    >>> to_delete([2, 4, 6, 8], saved=6, keep=2)
    [2, 8]
    >>> to_delete([2, 4, 6], saved=6, keep=1, protected=[2])
    [4]
    """
    below = sorted(version for version in versions if version < saved)
    above = sorted(version for version in versions if version > saved)
    oldest = below[: max(0, len(below) - (keep - 1))]
    return [version for version in oldest if version not in protected] + above


def ranked(versions: Collection[int], accuracies: Mapping[int, float], *, span: int) -> list[int]:
    """The versions that have an evaluation, best first; of equals the newer first.

    A server that was busy evaluates a later version than it was to: an evaluation counts for the
    newest checkpoint at or before it that is less than `span` versions older, the first one first.

    >>> ranked([10, 20, 30], {10: 0.5, 21: 0.7, 35: 0.6}, span=10)
    [20, 30, 10]
    """
    scores: dict[int, float] = {}
    for evaluated in sorted(accuracies):
        owner = max((version for version in versions if version <= evaluated), default=None)
        if owner is not None and evaluated - owner < span:
            scores.setdefault(owner, accuracies[evaluated])
    return sorted(scores, key=lambda version: (scores[version], version), reverse=True)


def protected(
    versions: Collection[int], accuracies: Mapping[int, float], *, span: int, keep: int, keep_best: int
) -> list[int]:
    """The `keep_best` best versions, and as many older than the newest `keep` whose evaluation may still come.

    >>> protected([10, 20, 30, 40, 50], {10: 0.9, 20: 0.1}, span=10, keep=1, keep_best=1)
    [10, 40]
    """
    if keep_best == 0:
        return []
    newest_evaluated = max(accuracies, default=-1)
    older = sorted(versions, reverse=True)[keep:]
    waiting = [version for version in older if version > newest_evaluated]
    return ranked(versions, accuracies, span=span)[:keep_best] + waiting[:keep_best]


@dataclass(slots=True)
class CheckpointFolder:
    """The checkpoints of one run. All calls are collective: every rank makes them, in the same order."""

    path: Path
    config: CheckpointConfig
    reference: Reference | None = None
    """Reference model that is saved and loaded with the policy."""
    store: RunStore | None = None
    """Where every checkpoint is copied, and the files of the run with it."""
    warn: Callable[[int, str], None] = lambda version, message: None
    """Reports what a person should look at, with the version that it is about."""
    uncopied_version: int | None = field(default=None, init=False)
    """The newest version that is on disk and not in the store; None if there is none, or no store."""
    _saving: BackgroundJob | None = field(default=None, init=False)
    _copying: BackgroundJob | None = field(default=None, init=False)
    _exporting: BackgroundJob | None = field(default=None, init=False)
    _late: bool = field(default=False, init=False)
    """True if the copy in progress has been waited for in vain."""
    _evaluations: Sequence[Evaluation] = field(default=(), init=False)
    """Those by which the newest checkpoint is kept, for its copy."""
    _unpruned: list[str] = field(default_factory=list, init=False)
    """Warnings of the thread that prunes."""

    def newest(self) -> int | None:
        """The version to resume from; None before the first checkpoint. Raises CheckpointError."""
        found = self._marked(_LATEST) if is_rank_zero() else None
        (version,) = broadcast_ints([-1 if found is None else found] if is_rank_zero() else None, 1)
        return version if version >= 0 else None

    def save(self, policy: Policy, version: int, epoch: int, evaluations: Sequence[Evaluation] = ()) -> None:
        """Begin to write `version`; `poll_saved` returns it when it is safe, and raises if it could not be written.

        The one before it must be on disk. Once this one is, checkpoints that neither their age nor (on rank 0) their
        evaluation keeps are deleted, and this one is copied.
        """
        assert self._saving is None, "a checkpoint is still being written: poll_saved(wait=True) first"
        draft = draft_of(self.path, epoch, version)
        if is_rank_zero():
            for left_over, writer in drafts(self.path):
                if writer <= epoch:
                    shutil.rmtree(left_over, ignore_errors=True)  # an older trainer may be adding files to it
            draft.mkdir(parents=True)
        dist.barrier()
        state, written = state_of(policy) | self._reference_state(), threading.Event()
        lent = [] if policy.offload is None else policy.offload.lend_homes(written, self.config.timeout_s)
        snapshot = RankSnapshot(state, draft, live_tensors(policy), lent)
        model, layout = traits_of(policy.hf, policy.dtype, policy.adapters), layout_of_ranks()
        manifest = CheckpointManifest(version=version, epoch=epoch, model=model, layout=layout)
        rank, ranks = dist.get_rank(), dist.get_world_size()

        def write() -> None:
            try:
                try:
                    write_part(snapshot, draft, rank)
                finally:
                    written.set()  # also after a failure, whose reason must not be hidden by an update that waits
                if rank == 0:
                    parts = [read_part(draft, each, self.config.timeout_s) for each in range(ranks)]
                    snapshot.finish(parts)
                    seal(draft, manifest, {name: file for part in parts for name, file in part.files.items()})
                    self._put_in_place(draft, manifest)
                    self._prune(version, evaluations)
            except OSError:
                self._check_not_overtaken(epoch)  # by one that has removed the draft: then that is the reason
                raise

        self._evaluations = evaluations
        self._saving = BackgroundJob("checkpoint", version, write)

    def start_copy(self, version: int | None = None) -> None:
        """Begin to copy `version`, or else the newest uncopied_version one, to the store, unless a copy is in progress.

        A trainer that resumes calls it with its version: one that was killed may have left it only here.
        """
        if self.store is None:
            return
        if version is not None:
            self.uncopied_version = version
        if self.uncopied_version is None or self._copying is not None:
            return
        copied = self.uncopied_version
        work = (lambda: self._copy(copied)) if is_rank_zero() else (lambda: None)
        self._copying, self._late = BackgroundJob("copy", copied, work), False

    def poll_saved(self, *, wait: bool) -> int | None:
        """The newest version that has become safe since the last call, if any; with `wait`, wait for what is in
        progress.

        Raises CheckpointError on all ranks if writing failed; `latest` then names the one before it. A copy that failed
        leaves its version in `uncopied_version`.
        """
        written = self._poll_written(wait=wait)
        if self.store is None:
            return written
        copied = self._poll_copied(wait=wait)
        if written is not None:
            self.start_copy(written)
            copied = self._poll_copied(wait=wait) or copied
        return copied

    def _poll_written(self, *, wait: bool) -> int | None:
        saving, self._saving = self._saving, None
        if saving is None:
            return None
        if not self._is_done(saving, wait=wait):
            self._saving = saving
            return None
        self._report_unpruned(saving.version)
        return saving.version

    def _poll_copied(self, *, wait: bool) -> int | None:
        """The version of the copy in progress, if it is complete by now."""
        copying = self._copying
        if copying is None:
            return None
        outcome = self._copy_outcome(copying, wait=wait and not self._late)
        if outcome == _RUNNING:
            if wait and not self._late:
                self._late = True
                self.warn(copying.version, self._copy_warning(copying.version, "it takes longer than timeout_s"))
            return None
        self._copying = None
        if outcome == _FAILED:
            self.warn(copying.version, self._copy_warning(copying.version, copying.failure))
            return None
        self._report_unpruned(copying.version)
        if self.uncopied_version == copying.version:
            self.uncopied_version = None
        self.start_copy()  # of one that has been written meanwhile
        return copying.version

    def _copy_outcome(self, copying: BackgroundJob, *, wait: bool) -> int:
        """What has become of the copy by now, for all ranks: it is rank 0's."""
        outcome = _RUNNING
        if copying.ended(self.config.timeout_s if wait else 0.0):
            outcome = _FAILED if copying.failure else _DONE
        (shared,) = broadcast_ints([outcome] if is_rank_zero() else None, 1)
        return shared

    def _copy_warning(self, version: int, reason: str) -> str:
        assert self.store is not None
        return (
            f"the checkpoint of version {version} is not in {self.store.url}: {reason}. It is whole in "
            f"{self._folder(version)}; the copy is tried again with the next checkpoint, or when the run resumes, and "
            "the buffer keeps its groups until then. Check the store and its credentials"
        )

    def load_newest(self, policy: Policy) -> tuple[int, str | None]:
        """Load the newest checkpoint or, where that is damaged, the newest whole one before it.

        Returns its version and a description of the damage, None if there is none. Version 0 is the first policy, which
        is loaded already. Raises CheckpointError.
        """
        newest = self.newest()
        if newest is None:
            return 0, None
        damage: CheckpointDamaged | None = None
        for version in self._not_above(newest):
            try:
                self.load(policy, version)
            except CheckpointDamaged as error:
                damage = damage or error
            else:
                return version, None if damage is None else str(damage)
        assert damage is not None
        if damage.partly_loaded:
            raise damage
        return 0, str(damage)

    def _not_above(self, newest: int) -> list[int]:
        """The versions up to `newest` that have a folder, the newest first. `newest` may have lost its own."""
        found = [newest, *sorted((v for v in self._versions() if v < newest), reverse=True)] if is_rank_zero() else []
        (count,) = broadcast_ints([len(found)] if is_rank_zero() else None, 1)
        return broadcast_ints(found if is_rank_zero() else None, count)

    def is_chosen(self, version: int) -> bool:
        """True if a person chose to resume from `version`, whatever the buffer has forgotten."""
        chosen = is_rank_zero() and self._marked(CHOSEN) == version
        (shared,) = broadcast_ints([int(chosen)] if is_rank_zero() else None, 1)
        return bool(shared)

    def clear_choice(self) -> None:
        """A person's choice holds for one resumption."""
        if is_rank_zero():
            (self.path / CHOSEN).unlink(missing_ok=True)

    def load(self, policy: Policy, version: int) -> None:
        """Load weights, optimizer and random state of `version`.

        Raises CheckpointError for a damaged one, or one of another model, before anything is loaded.
        """
        folder = self._folder(version)
        manifest = read_manifest(folder)
        check_fits(folder, manifest, version=version, model=traits_of(policy.hf, policy.dtype, policy.adapters))
        _check_bytes(folder, manifest)
        wanted = state_of(policy, written_by=manifest.layout) | self._reference_state()
        try:
            loaded = dist_checkpointing.load(wanted, str(folder))
        except (Exception, CheckpointException) as error:  # torch's is no Exception
            raise unreadable(folder, f"reading it failed: {error}", partly_loaded=True) from error
        fill(policy, loaded)
        if self.reference is not None and _REFERENCE in loaded:
            self.reference.load_state_dict(loaded[_REFERENCE])

    def _reference_state(self) -> dict[str, Any]:
        """The state of a reference model that changes; {} for one that never does."""
        state = {} if self.reference is None else self.reference.state_dict(metadata())
        return {_REFERENCE: state} if state else {}

    def mark_best(self, evaluations: Sequence[Evaluation]) -> None:
        """Mark the best checkpoint by the present evaluations, and delete those that nothing protects any more."""
        if not is_rank_zero() or self.config.keep_best == 0:
            return
        saved = self._marked(_LATEST)
        if saved is not None:
            self._prune(saved, evaluations)
            self._report_unpruned(saved)

    def export_final(self, policy: Policy, source: Path) -> Path:
        """Write the present weights as checkpoints/hf, with configuration and tokenizer from `source`, and return the
        folder."""
        tensors = _copies(policy)
        target = self.path / "hf"
        if is_rank_zero():
            write_folder(target, source, tensors.items())
        return target

    def start_export(self, policy: Policy, source: Path, version: int, evaluations: Sequence[Evaluation] = ()) -> None:
        """Begin to write the present weights as an export of `version`; waits for the export before it."""
        self.wait_for_export()
        tensors = _copies(policy)

        def write() -> None:
            if tensors:
                write_folder(self._export_folder(version), source, tensors.items())
                span = self.config.export_every_steps
                for old in self._unkept(self._versions("hf-"), version, span, _accuracies(evaluations)):
                    self._remove(self._export_folder(old))

        self._exporting = BackgroundJob("export", version, write)
        if not self.config.background:
            self.wait_for_export()

    def wait_for_export(self) -> None:
        """Wait for the export in progress. Raises CheckpointError on all ranks if it failed."""
        exporting, self._exporting = self._exporting, None
        if exporting is not None:
            self._is_done(exporting, wait=True)

    def _is_done(self, job: BackgroundJob, *, wait: bool) -> bool:
        """Whether rank 0's job is done, on all ranks.

        Raises CheckpointError if it failed, or with `wait` if it is late.
        """
        ended = job.ended(self.config.timeout_s + _SLACK_S if wait else 0.0)
        failure = job.failure
        if wait and not ended:
            failure = f"it was not done after trainer.checkpoint.timeout_s ({self.config.timeout_s:g} s)"
        done, failed = broadcast_ints([int(ended), int(failure != "")] if is_rank_zero() else None, 2)
        if failed:
            reason = broadcast_bytes(failure.encode() if is_rank_zero() else None).decode()
            raise CheckpointError(
                f"{job.what} could not be written to {self.path}: {reason}. What was written before it is intact: make "
                "room or mend the disk or the store, and the same command resumes"
            )
        return bool(done)

    def _put_in_place(self, draft: Path, manifest: CheckpointManifest) -> None:
        """Rename the draft, and let `latest` name it. Another trainer may do the same at any moment, and so every
        step can be taken back: the one of the newer epoch wins."""
        self._check_not_overtaken(manifest.epoch)
        target, replaced = self._folder(manifest.version), draft.with_name(f"{draft.name}-replaced")
        if target.exists():
            target.rename(replaced)
            if _epoch_of(replaced) > manifest.epoch:
                replaced.rename(target)
                self._check_not_overtaken(manifest.epoch)
        draft.rename(target)
        shutil.rmtree(replaced, ignore_errors=True)
        sync(self.path)
        self._mark(_LATEST, manifest.version)
        epochs = {version: _epoch_of(self._folder(version)) for version in self._versions()}
        newest = max(epochs, key=lambda version: (epochs[version], version))
        if epochs[newest] > manifest.epoch:
            self._mark(_LATEST, newest)
        self._check_not_overtaken(manifest.epoch)

    def _mark(self, name: str, version: int) -> None:
        write_atomic(self.path / name, f"{version}\n", synced=True)

    def _check_not_overtaken(self, epoch: int) -> None:
        """Raise CheckpointError if a newer trainer has taken over: its checkpoint comes first."""
        saved = [_epoch_of(self._folder(version)) for version in self._versions()]
        newest = max([*saved, *(writer for _, writer in drafts(self.path))], default=0)
        if newest > epoch:
            raise CheckpointError(f"a newer trainer (epoch {newest}) has taken over from this one ({epoch})")

    def _prune(self, saved: int, evaluations: Sequence[Evaluation]) -> None:
        accuracies, span = _accuracies(evaluations), self.config.every_steps
        copied = None if self._copying is None else self._copying.version
        for version in self._unkept(self._versions(), saved, span, accuracies):
            if version != copied:  # it goes with the next checkpoint
                self._remove(self._folder(version))
        best = ranked(self._versions(), accuracies, span=span)
        if self.config.keep_best and best:
            self._mark(_BEST, best[0])

    def _remove(self, folder: Path) -> None:
        """Delete an old folder. That it cannot be deleted, as on NFS while a file in it is open, ends no run."""
        try:
            shutil.rmtree(folder)
        except OSError as error:
            self._unpruned.append(f"{folder} could not be deleted ({error}) and takes up room. Delete it by hand")

    def _report_unpruned(self, version: int) -> None:
        while self._unpruned:
            self.warn(version, self._unpruned.pop(0))

    def _copy(self, version: int) -> None:
        """Copy a checkpoint and the files of the run to the store, and delete there what nothing keeps."""
        assert self.store is not None
        held, newest = StoredCheckpoint.of(self._folder(version)), self.store.newest()
        if newest is not None and newest.epoch > held.epoch:
            raise CheckpointError(f"{self.store.url} has a checkpoint of a newer trainer (epoch {newest.epoch})")
        self.store.push_files(self.path.parent)
        if newest is not None and newest > held:
            return  # that of a trainer whose folder here is damaged: it is replaced only by a newer one
        if newest != held:
            self.store.push_checkpoint(self._folder(version), self.path.parent)
        try:
            stored = {found.version for found in self.store.checkpoints()}
            unkept = self._unkept(sorted(stored), version, self.config.every_steps, _accuracies(self._evaluations))
            self.store.prune(held, stored.difference(unkept))
        except OSError as error:
            self._unpruned.append(f"old checkpoints in {self.store.url} could not be deleted: {error}")

    def _unkept(self, versions: list[int], saved: int, span: int, accuracies: dict[int, float]) -> list[int]:
        keep, keep_best = self.config.keep, self.config.keep_best
        mine = [version for version in versions if version <= saved]
        good = protected(mine, accuracies, span=span, keep=keep, keep_best=keep_best)
        return to_delete(versions, saved=saved, keep=keep, protected=good)

    def _versions(self, prefix: str = "") -> list[int]:
        names = [path.name.removeprefix(prefix) for path in self.path.glob(f"{prefix}*") if path.is_dir()]
        return [int(name) for name in names if name.isdigit()]

    def _marked(self, name: str) -> int | None:
        marker = self.path / name
        if not marker.exists():
            return None
        text = marker.read_text().strip()
        if not text.isdigit():
            raise CheckpointError(
                f"{marker} should hold the version to resume from, but holds {text[:40]!r}. Write the number of the "
                "newest folder beside it there"
            )
        return int(text)

    def _folder(self, version: int) -> Path:
        return self.path / f"{version:08d}"

    def _export_folder(self, version: int) -> Path:
        return self.path / f"hf-{version:08d}"


def _accuracies(evaluations: Sequence[Evaluation]) -> dict[int, float]:
    return {found.version: found.sampled_accuracy for found in evaluations}


def _copies(policy: Policy) -> dict[str, Tensor]:
    """The present weights on rank 0, {} on the others."""
    return {name: tensor.clone() for name, tensor in policy.export() if is_rank_zero()}


def _epoch_of(folder: Path) -> int:
    """The epoch of a complete checkpoint; 0 for anything else."""
    try:
        return read_manifest(folder).epoch
    except CheckpointError:
        return 0


def _check_bytes(folder: Path, manifest: CheckpointManifest) -> None:
    """Compare every file with the manifest, each on one rank. Raises CheckpointError on all ranks if one differs."""
    wrong = changed(folder, manifest, sorted(manifest.files)[dist.get_rank() :: dist.get_world_size()])
    if max_over_ranks(torch.tensor([len(wrong)])).item():
        names = ", ".join(wrong) or "a file that another rank has read"
        raise unreadable(folder, f"{names} does not hold what was written")
