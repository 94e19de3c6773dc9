"""The checkpoints of a run: exact ones to resume from, and Hugging Face exports for other programs.

    checkpoints/00000010/      Megatron distributed checkpoint of policy version 10, with its manifest
    checkpoints/latest         the version to resume from
    checkpoints/best           the version with the best evaluation, with keep_best
    checkpoints/hf-00000010/   Hugging Face export of version 10, with export_every_steps
    checkpoints/hf/            Hugging Face export of the last version

    write: all ranks copy their part in memory --> each rank's thread writes its file into a draft folder
           --> rank 0's thread waits for these files, writes index and manifest, renames the draft, updates `latest`
    prune: rank 0's thread then deletes old checkpoints; a failure is a warning
    copy:  another thread of rank 0 copies the checkpoint to `store`; a failure is a warning, and the next checkpoint is
           copied instead

Only a checkpoint that cannot be written ends the run. The buffer may forget the groups that a checkpoint contains once
the checkpoint is safe: on disk and, with a store, copied.

Threads of different ranks communicate by files, never in collective calls, so training and writing cannot block each
other. A draft is renamed when everything in it is on disk, and `latest` is updated after that: a trainer killed at any
moment leaves a checkpoint to resume from. The stored state does not depend on the layout of the ranks. Pure functions
select the checkpoints to delete and the best one (`find_outdated_versions`, `find_protected_versions`,
`rank_versions`).
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
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
from trainer.checkpoint.manifest import (
    CheckpointManifest,
    check_matches_run,
    complete_folder,
    damaged_checkpoint,
    find_changed_files,
    read_manifest,
)
from trainer.checkpoint.snapshot import BackgroundJob, RankSnapshot, draft_path, list_drafts, read_part, write_part
from trainer.checkpoint.state import (
    current_layout,
    live_tensors,
    load_into_policy,
    metadata,
    model_traits,
    policy_state,
)
from trainer.checkpoint.store import CHOSEN, RunStore, StoredCheckpoint
from trainer.model.hf_folder import write_hf_folder
from trainer.model.policy import Policy
from trainer.model.reference import Reference
from trainer.ranks.distributed import broadcast_bytes, broadcast_ints, is_rank_zero, max_over_ranks

_LATEST = "latest"
_BEST = "best"
_REFERENCE = "reference"

_SLACK_S = 10.0
"""Seconds to wait for a thread beyond the longest wait of the thread itself."""


class CopyState(IntEnum):
    """State of a copy, as rank 0 broadcasts it."""

    RUNNING = 0
    FAILED = 1
    DONE = 2


def find_outdated_versions(
    versions: Collection[int], *, saved: int, keep: int, protected: Collection[int] = ()
) -> list[int]:
    """Return the versions to delete: all but `saved`, the newest `keep` - 1 below it and the `protected` ones.

    A version above `saved` was renamed, but its trainer was killed before it updated `latest`, and the next trainer
    resumed from an older version. It is deleted even if protected.

    >>> find_outdated_versions([2, 4, 6, 8], saved=6, keep=2)
    [2, 8]
    >>> find_outdated_versions([2, 4, 6], saved=6, keep=1, protected=[2])
    [4]
    """
    below = sorted(version for version in versions if version < saved)
    above = sorted(version for version in versions if version > saved)
    oldest = below[: max(0, len(below) - (keep - 1))]
    return [version for version in oldest if version not in protected] + above


def rank_versions(versions: Collection[int], accuracies: Mapping[int, float], *, span: int) -> list[int]:
    """Return the versions that have an evaluation, best first; of equals the newer first.

    A busy server evaluates a later version than the one that was due. An evaluation therefore counts for the newest
    checkpoint at or before its version that is less than `span` versions older; the first evaluation of a checkpoint
    wins.

    >>> rank_versions([10, 20, 30], {10: 0.5, 21: 0.7, 35: 0.6}, span=10)
    [20, 30, 10]
    """
    scores: dict[int, float] = {}
    for evaluated in sorted(accuracies):
        owner = max((version for version in versions if version <= evaluated), default=None)
        if owner is not None and evaluated - owner < span:
            scores.setdefault(owner, accuracies[evaluated])
    return sorted(scores, key=lambda version: (scores[version], version), reverse=True)


def find_protected_versions(
    versions: Collection[int], accuracies: Mapping[int, float], *, span: int, keep: int, keep_best: int
) -> list[int]:
    """Return the `keep_best` best versions, and as many old ones whose evaluation may still come.

    Old ones are those that the newest `keep` do not include.

    >>> find_protected_versions([10, 20, 30, 40, 50], {10: 0.9, 20: 0.1}, span=10, keep=1, keep_best=1)
    [10, 40]
    """
    if keep_best == 0:
        return []
    newest_evaluated = max(accuracies, default=-1)
    older = sorted(versions, reverse=True)[keep:]
    waiting = [version for version in older if version > newest_evaluated]
    return rank_versions(versions, accuracies, span=span)[:keep_best] + waiting[:keep_best]


@dataclass(slots=True)
class CheckpointFolder:
    """The checkpoints of one run. All calls are collective: every rank makes them, in the same order."""

    path: Path
    config: CheckpointConfig
    reference: Reference | None = None
    """Reference model that is saved and loaded with the policy."""
    store: RunStore | None = None
    """Store to which every checkpoint and the files of the run are copied."""
    warn: Callable[[int, str], None] = lambda version, message: None
    """Reports a warning about a version to the user."""
    uncopied_version: int | None = field(default=None, init=False)
    """Newest version that is on disk and not in the store; None if there is none, or no store."""
    _saving: BackgroundJob | None = field(default=None, init=False)
    _copying: BackgroundJob | None = field(default=None, init=False)
    _exporting: BackgroundJob | None = field(default=None, init=False)
    _copy_is_late: bool = field(default=False, init=False)
    """True after a wait for the copy in progress has timed out: it is not waited for again."""
    _evaluations: Sequence[Evaluation] = field(default=(), init=False)
    """Evaluations passed with the newest checkpoint; its copy is pruned by them too."""
    _prune_warnings: list[str] = field(default_factory=list, init=False)
    """Warnings of the threads, which the training thread reports."""

    def newest_version(self) -> int | None:
        """Return the version to resume from; None before the first checkpoint. Raises CheckpointError."""
        marked = self._read_marker(_LATEST) if is_rank_zero() else None
        (version,) = broadcast_ints([-1 if marked is None else marked] if is_rank_zero() else None, 1)
        return version if version >= 0 else None

    def save(self, policy: Policy, version: int, epoch: int, evaluations: Sequence[Evaluation] = ()) -> None:
        """Start to write `version`; `poll_saved` returns it when it is safe, and raises if it could not be written.

        The previous checkpoint must be on disk. Once this one is, old checkpoints are deleted (rank 0's `evaluations`
        decide which are kept as the best), and this one is copied.
        """
        assert self._saving is None, "a checkpoint is still being written: poll_saved(wait=True) first"
        draft = draft_path(self.path, epoch, version)
        if is_rank_zero():
            for old_draft, writer_epoch in list_drafts(self.path):
                if writer_epoch <= epoch:
                    # Ignore errors: an older trainer may still be adding files to it.
                    shutil.rmtree(old_draft, ignore_errors=True)
            draft.mkdir(parents=True)
        dist.barrier()

        # Optimizer state that is offloaded to the host is lent instead of copied; updates wait for `written`.
        state = policy_state(policy) | self._reference_state()
        written = threading.Event()
        lent = [] if policy.offload is None else policy.offload.lend_host_tensors(written, self.config.timeout_s)
        snapshot = RankSnapshot(state, draft, live_tensors(policy), lent)
        manifest = CheckpointManifest(
            version=version,
            epoch=epoch,
            model=model_traits(policy.hf, policy.dtype, policy.adapters),
            layout=current_layout(),
        )
        rank = dist.get_rank()
        ranks = dist.get_world_size()

        def write() -> None:
            try:
                try:
                    write_part(snapshot, draft, rank)
                finally:
                    # Also after a failure: otherwise the next update would time out and hide its reason.
                    written.set()
                if rank == 0:
                    parts = [read_part(draft, number, self.config.timeout_s) for number in range(ranks)]
                    snapshot.finish(parts)
                    known_files = {name: file for part in parts for name, file in part.files.items()}
                    complete_folder(draft, manifest, known_files)
                    self._publish_draft(draft, manifest)
                    self._prune(version, evaluations)
            except OSError:
                # If a newer trainer has removed the draft, report that as the reason.
                self._check_not_overtaken(epoch)
                raise

        self._evaluations = evaluations
        self._saving = BackgroundJob("checkpoint", version, write)

    def start_copy(self, version: int | None = None) -> None:
        """Start to copy a version to the store, unless a copy is in progress. Default: the newest uncopied one.

        A trainer that resumes calls it with its version, which an earlier trainer may have left uncopied.
        """
        if self.store is None:
            return
        if version is not None:
            self.uncopied_version = version
        if self.uncopied_version is None or self._copying is not None:
            return
        copied = self.uncopied_version

        def copy() -> None:
            if is_rank_zero():
                self._copy(copied)

        self._copying = BackgroundJob("copy", copied, copy)
        self._copy_is_late = False

    def poll_saved(self, *, wait: bool) -> int | None:
        """Return the newest version that has become safe since the last call, or None.

        `wait`: wait for the write and the copy in progress. Raises CheckpointError on all ranks if writing failed;
        `latest` is unchanged then. A copy that failed leaves its version in `uncopied_version`.
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
        saving = self._saving
        if saving is None:
            return None
        # Clear it first: if writing failed, `_is_done` raises, and the next call must not raise the same error again.
        self._saving = None
        if not self._is_done(saving, wait=wait):
            self._saving = saving
            return None
        self._report_prune_warnings(saving.version)
        return saving.version

    def _poll_copied(self, *, wait: bool) -> int | None:
        """Return the version of the copy in progress if it is complete, else None."""
        copying = self._copying
        if copying is None:
            return None
        state = self._copy_state(copying, wait=wait and not self._copy_is_late)
        if state == CopyState.RUNNING:
            if wait and not self._copy_is_late:
                self._copy_is_late = True
                self.warn(copying.version, self._copy_warning(copying.version, "it takes longer than timeout_s"))
            return None
        self._copying = None
        if state == CopyState.FAILED:
            reason = copying.failure or "rank 0 reports a failure"
            self.warn(copying.version, self._copy_warning(copying.version, reason))
            return None
        self._report_prune_warnings(copying.version)
        if self.uncopied_version == copying.version:
            self.uncopied_version = None
        self.start_copy()  # a newer checkpoint may have been written meanwhile
        return copying.version

    def _copy_state(self, copying: BackgroundJob, *, wait: bool) -> CopyState:
        """Return the state of rank 0's copy, on all ranks."""
        state = CopyState.RUNNING
        if copying.wait(self.config.timeout_s if wait else 0.0):
            state = CopyState.DONE if copying.failure is None else CopyState.FAILED
        (of_rank_zero,) = broadcast_ints([state] if is_rank_zero() else None, 1)
        return CopyState(of_rank_zero)

    def _copy_warning(self, version: int, reason: str) -> str:
        assert self.store is not None
        return (
            f"the checkpoint of version {version} is not in {self.store.url}: {reason}. It is complete in "
            f"{self._folder(version)}. The copy is retried with the next checkpoint, or when the run resumes; until "
            "then the buffer keeps its groups. Check the store and its credentials"
        )

    def load_newest(self, policy: Policy) -> tuple[int, str | None]:
        """Load the newest checkpoint or, if it is damaged, the newest intact one before it.

        Returns its version and a description of the damage, None if there is none. Version 0 is the first policy, which
        is loaded already. Raises CheckpointError.
        """
        newest = self.newest_version()
        if newest is None:
            return 0, None
        damage: CheckpointDamaged | None = None
        for version in self._versions_up_to(newest):
            try:
                self.load(policy, version)
            except CheckpointDamaged as error:
                damage = damage or error
            else:
                return version, None if damage is None else str(damage)
        assert damage is not None
        if damage.partly_loaded:
            raise damage  # the policy in memory is no longer the first one
        return 0, str(damage)

    def _versions_up_to(self, newest: int) -> list[int]:
        """Return `newest`, whose folder may be missing, and the older versions that have one, the newest first."""
        versions = []
        if is_rank_zero():
            older = [version for version in self._versions() if version < newest]
            versions = [newest, *sorted(older, reverse=True)]
        (count,) = broadcast_ints([len(versions)] if is_rank_zero() else None, 1)
        return broadcast_ints(versions if is_rank_zero() else None, count)

    def is_chosen(self, version: int) -> bool:
        """True if the user chose to resume from `version`, even if the buffer has forgotten its groups."""
        chosen = is_rank_zero() and self._read_marker(CHOSEN) == version
        (of_rank_zero,) = broadcast_ints([int(chosen)] if is_rank_zero() else None, 1)
        return bool(of_rank_zero)

    def clear_choice(self) -> None:
        """Delete the user's choice, which is valid for one resumption."""
        if is_rank_zero():
            (self.path / CHOSEN).unlink(missing_ok=True)

    def load(self, policy: Policy, version: int) -> None:
        """Load weights, optimizer and random state of `version`.

        Raises CheckpointDamaged, or CheckpointError for another model, before anything is loaded.
        """
        folder = self._folder(version)
        manifest = read_manifest(folder)
        traits = model_traits(policy.hf, policy.dtype, policy.adapters)
        check_matches_run(folder, manifest, version=version, model=traits)
        _check_bytes(folder, manifest)
        wanted = policy_state(policy, written_by=manifest.layout) | self._reference_state()
        try:
            loaded = dist_checkpointing.load(wanted, str(folder))
        except (Exception, CheckpointException) as error:  # CheckpointException is not an Exception
            raise damaged_checkpoint(folder, f"reading it failed: {error}", partly_loaded=True) from error
        load_into_policy(policy, loaded)
        if self.reference is not None and _REFERENCE in loaded:
            self.reference.load_state_dict(loaded[_REFERENCE])

    def _reference_state(self) -> dict[str, Any]:
        """Return the state of the reference model; {} if there is none or it never changes."""
        state = {} if self.reference is None else self.reference.state_dict(metadata())
        return {_REFERENCE: state} if state else {}

    def mark_best(self, evaluations: Sequence[Evaluation]) -> None:
        """Update `best` with these evaluations, and delete checkpoints that are no longer protected by theirs."""
        if not is_rank_zero() or self.config.keep_best == 0:
            return
        saved = self._read_marker(_LATEST)
        if saved is not None:
            self._prune(saved, evaluations)
            self._report_prune_warnings(saved)

    def export_final(self, policy: Policy, source: Path) -> Path:
        """Export the current weights to checkpoints/hf, with configuration and tokenizer of `source`. Returns it."""
        tensors = _gather_weights(policy)
        target = self.path / "hf"
        if is_rank_zero():
            write_hf_folder(target, source, tensors.items())
        return target

    def start_export(self, policy: Policy, source: Path, version: int, evaluations: Sequence[Evaluation] = ()) -> None:
        """Start to export the current weights as `version`; waits for the previous export first."""
        self.wait_for_export()
        tensors = _gather_weights(policy)

        def write() -> None:
            if tensors:
                write_hf_folder(self._export_folder(version), source, tensors.items())
                span = self.config.export_every_steps
                for old in self._versions_to_delete(self._versions("hf-"), version, span, _accuracies(evaluations)):
                    self._remove(self._export_folder(old))

        self._exporting = BackgroundJob("export", version, write)
        if not self.config.background:
            self.wait_for_export()

    def wait_for_export(self) -> None:
        """Wait for the export in progress. Raises CheckpointError on all ranks if it failed."""
        exporting = self._exporting
        self._exporting = None
        if exporting is not None:
            self._is_done(exporting, wait=True)

    def _is_done(self, job: BackgroundJob, *, wait: bool) -> bool:
        """True, on all ranks, if rank 0's job is done.

        Raises CheckpointError if it failed, or if `wait` timed out.
        """
        wait_s = self.config.timeout_s + _SLACK_S if wait else 0.0
        ended = job.wait(wait_s)
        failure = job.failure
        if wait and not ended:
            failure = f"it took longer than trainer.checkpoint.timeout_s ({self.config.timeout_s:g} s)"
        done, failed = broadcast_ints([int(ended), int(failure is not None)] if is_rank_zero() else None, 2)
        if failed:
            reason = broadcast_bytes((failure or "").encode() if is_rank_zero() else None).decode()
            raise CheckpointError(
                f"{job.title} could not be written to {self.path}: {reason}. Earlier checkpoints are intact: free "
                "space or fix the disk, and start the same command again to resume"
            )
        return bool(done)

    def _publish_draft(self, draft: Path, manifest: CheckpointManifest) -> None:
        """Rename the draft to its final name and update `latest`.

        A newer trainer may do the same at any moment. There is no lock (the folder may be on NFS), so each step is
        checked afterwards and undone if the other trainer has a newer epoch.
        """
        self._check_not_overtaken(manifest.epoch)
        target = self._folder(manifest.version)
        replaced = draft.with_name(f"{draft.name}-replaced")
        if target.exists():
            target.rename(replaced)
            if _epoch_of(replaced) > manifest.epoch:
                replaced.rename(target)
                self._check_not_overtaken(manifest.epoch)
        draft.rename(target)
        shutil.rmtree(replaced, ignore_errors=True)

        # The rename must be on disk before `latest` is, or a power failure could leave `latest` without its folder.
        sync(self.path)
        self._write_marker(_LATEST, manifest.version)
        epochs = {version: _epoch_of(self._folder(version)) for version in self._versions()}
        newest = max(epochs, key=lambda version: (epochs[version], version))
        if epochs[newest] > manifest.epoch:
            self._write_marker(_LATEST, newest)
        self._check_not_overtaken(manifest.epoch)

    def _write_marker(self, name: str, version: int) -> None:
        write_atomic(self.path / name, f"{version}\n", synced=True)

    def _check_not_overtaken(self, epoch: int) -> None:
        """Raise CheckpointError if a newer trainer has taken over: its checkpoints must not be replaced."""
        epochs = [_epoch_of(self._folder(version)) for version in self._versions()]
        epochs += [writer_epoch for _, writer_epoch in list_drafts(self.path)]
        newest = max(epochs, default=0)
        if newest > epoch:
            raise CheckpointError(f"a newer trainer (epoch {newest}) has taken over from this one ({epoch})")

    def _prune(self, saved: int, evaluations: Sequence[Evaluation]) -> None:
        accuracies = _accuracies(evaluations)
        span = self.config.every_steps
        being_copied = None if self._copying is None else self._copying.version
        for version in self._versions_to_delete(self._versions(), saved, span, accuracies):
            if version != being_copied:  # it is deleted after the next checkpoint
                self._remove(self._folder(version))
        best = rank_versions(self._versions(), accuracies, span=span)
        if self.config.keep_best and best:
            self._write_marker(_BEST, best[0])

    def _remove(self, folder: Path) -> None:
        """Delete an old folder. A failure, such as an open file on NFS, is a warning."""
        try:
            shutil.rmtree(folder)
        except OSError as error:
            self._prune_warnings.append(
                f"{folder} could not be deleted ({error}) and takes up space. Delete it by hand"
            )

    def _report_prune_warnings(self, version: int) -> None:
        while self._prune_warnings:
            self.warn(version, self._prune_warnings.pop(0))

    def _copy(self, version: int) -> None:
        """Copy a checkpoint and the files of the run to the store, and prune the store."""
        assert self.store is not None
        local = StoredCheckpoint.of(self._folder(version))
        newest = self.store.newest_checkpoint()
        if newest is not None and newest.epoch > local.epoch:
            raise CheckpointError(f"{self.store.url} has a checkpoint of a newer trainer (epoch {newest.epoch})")
        self.store.push_files(self.path.parent)
        if newest is not None and newest > local:
            # This trainer resumed from an older checkpoint than the store has, because the newest one was damaged here.
            # Only a newer checkpoint may replace it in the store.
            return
        if newest != local:
            self.store.push_checkpoint(self._folder(version), self.path.parent)
        try:
            stored = {checkpoint.version for checkpoint in self.store.list_checkpoints()}
            accuracies = _accuracies(self._evaluations)
            old = self._versions_to_delete(sorted(stored), version, self.config.every_steps, accuracies)
            self.store.prune(local, stored.difference(old))
        except OSError as error:
            self._prune_warnings.append(f"old checkpoints in {self.store.url} could not be deleted: {error}")

    def _versions_to_delete(
        self, versions: list[int], saved: int, span: int, accuracies: dict[int, float]
    ) -> list[int]:
        keep = self.config.keep
        up_to_saved = [version for version in versions if version <= saved]
        best = find_protected_versions(up_to_saved, accuracies, span=span, keep=keep, keep_best=self.config.keep_best)
        return find_outdated_versions(versions, saved=saved, keep=keep, protected=best)

    def _versions(self, prefix: str = "") -> list[int]:
        names = [path.name.removeprefix(prefix) for path in self.path.glob(f"{prefix}*") if path.is_dir()]
        return [int(name) for name in names if name.isdigit()]

    def _read_marker(self, name: str) -> int | None:
        marker = self.path / name
        if not marker.exists():
            return None
        text = marker.read_text().strip()
        if not text.isdigit():
            raise CheckpointError(
                f"{marker} should contain the version to resume from, but contains {text[:40]!r}. Write the number of "
                "the newest folder next to it into this file"
            )
        return int(text)

    def _folder(self, version: int) -> Path:
        return self.path / f"{version:08d}"

    def _export_folder(self, version: int) -> Path:
        return self.path / f"hf-{version:08d}"


def _accuracies(evaluations: Sequence[Evaluation]) -> dict[int, float]:
    return {evaluation.version: evaluation.sampled_accuracy for evaluation in evaluations}


def _gather_weights(policy: Policy) -> dict[str, Tensor]:
    """Return copies of the current weights on rank 0, {} on the others."""
    return {name: tensor.clone() for name, tensor in policy.export_merged() if is_rank_zero()}


def _epoch_of(folder: Path) -> int:
    """Return the epoch of a complete checkpoint; 0 for any other folder."""
    try:
        return read_manifest(folder).epoch
    except CheckpointError:
        return 0


def _check_bytes(folder: Path, manifest: CheckpointManifest) -> None:
    """Compare every file with the manifest, each on one rank. Raises CheckpointDamaged on all ranks if one differs."""
    own_files = sorted(manifest.files)[dist.get_rank() :: dist.get_world_size()]
    changed = find_changed_files(folder, manifest, own_files)
    if max_over_ranks(torch.tensor([len(changed)])).item():
        names = ", ".join(changed) or "a file that another rank has read"
        raise damaged_checkpoint(folder, f"{names} does not hold what was written")
