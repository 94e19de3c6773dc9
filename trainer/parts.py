"""Where the threads of a checkpoint's ranks meet: one file of each in the draft, `draft-EPOCH-VERSION`.

part-00001.json      rank 1 has written its file; what lies where in it
part-00001.failed    rank 1 cannot, and why
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from async_grpo.errors import WaitTimeout
from trainer.manifest import write_synced
from trainer.snapshot import Part, Snapshot

_LOOK_EVERY_S = 0.02


def draft_of(folder: Path, epoch: int, version: int) -> Path:
    """Every trainer has drafts of its own: one that was thought dead may still be writing."""
    return folder / f"draft-{epoch:08d}-{version:08d}"


def drafts(folder: Path) -> list[tuple[Path, int]]:
    """Those in the folder, with the epochs of their writers; 0 for a name without one."""
    found = []
    for path in folder.glob("draft-*"):
        _, epoch, *version = path.name.split("-")
        found.append((path, int(epoch) if version and epoch.isdigit() else 0))
    return found


def write_part(snapshot: Snapshot, draft: Path, rank: int) -> None:
    """This rank's file and its part; or, before the error is raised, why not."""
    try:
        write_synced(_part(draft, rank), msgspec.json.encode(snapshot.write()))
    except Exception as error:
        _failed(draft, rank).write_text(f"rank {rank}: {error}")
        raise


def read_part(draft: Path, rank: int, timeout_s: float) -> Part:
    """Wait for it, and remove it. Raises OSError if the rank failed or the draft was removed, WaitTimeout."""
    path, deadline_s = _part(draft, rank), time.monotonic() + timeout_s
    while not path.exists():
        if _failed(draft, rank).exists():
            raise OSError(_failed(draft, rank).read_text() or f"rank {rank} failed")
        if not draft.is_dir():
            raise FileNotFoundError(f"{draft} was removed by somebody else")
        if time.monotonic() > deadline_s:
            fix = "Is the folder shared by all machines? Raise trainer.checkpoint.timeout_s"
            raise WaitTimeout(f"rank {rank}'s part of {draft}", timeout_s, fix)
        time.sleep(_LOOK_EVERY_S)
    part = msgspec.json.decode(path.read_bytes(), type=Part)
    path.unlink()
    return part


def _part(draft: Path, rank: int) -> Path:
    return draft / f"part-{rank:05d}.json"


def _failed(draft: Path, rank: int) -> Path:
    return draft / f"part-{rank:05d}.failed"
