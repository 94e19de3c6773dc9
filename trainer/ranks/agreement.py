"""What the ranks compare before they train, in their store, whatever has started them.

    rank 0   Claim --> store          and a file in the folder of checkpoints
    rank R   compares its own, looks for the file --> "" or an objection --> store
    rank 0   "" or the first objection --> store --> every rank goes on, or ends with it

Ranks agree if they have the same configuration and first policy, and see one folder of checkpoints.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import xxhash
import yaml

from async_grpo.config import RunConfig, dump
from async_grpo.config.load import differing_keys
from async_grpo.errors import ConfigError, WaitTimeout
from async_grpo.utils.files import read_end
from async_grpo.wire import encode
from async_grpo.wire.records import Record

if TYPE_CHECKING:
    from torch.distributed import Store

_ENDS_BYTES = 1 << 20

LOOK_S = 30.0
"""Seconds that a file of another machine may take to appear: as long as NFS caches a folder without it."""

_LOOK_EVERY_S = 0.05
_LAST_WORD_S = 5.0
_CLAIM, _AGREED, _KNOWN = "claim of rank 0", "agreed", "known"
_START_IT = "Is it started, with the same MASTER_ADDR or trainer.rendezvous?"


class Claim(Record, frozen=True, kw_only=True, tag="claim"):
    """What a rank would train, and where rank 0 has put a file for the others to find."""

    config: str
    """The resolved configuration, as YAML."""
    model: str
    """Fingerprint of the folder of the first policy."""
    folder: str
    """Folder of the checkpoints, as this rank knows it."""
    token: str
    """Content of the file."""

    @classmethod
    def of(cls, config: RunConfig, model: Path) -> Claim:
        """The claim of a rank with this configuration and first policy."""
        folder = config.run_dir.absolute() / "checkpoints"
        return cls(config=dump(config), model=fingerprint(model), folder=str(folder), token=os.urandom(8).hex())


@dataclass(frozen=True, slots=True)
class Agreement:
    """One rank among `ranks`, and the patience that it has with the others, in seconds."""

    store: Store
    rank: int
    ranks: int
    timeout_s: float

    def reach(self, own: Claim) -> None:
        """Wait until all ranks agree. Raises ConfigError if one does not, WaitTimeout if one is missing."""
        file = Path(own.folder) / _name(self.rank)
        unwritable = _write(file, own.token, self.rank)
        try:
            if self.rank:
                self.store.set(_answer_of(self.rank), (unwritable or self._objection(own)).encode())
            else:
                self.store.set(_CLAIM, encode(own))
                self._wait_for_answers()
                self.store.set(_AGREED, unwritable.encode() or self._first_answer())
        finally:
            if not unwritable:
                file.unlink(missing_ok=True)
        reason = self._read(_AGREED).decode()
        if reason:
            self._wait_until_all_know()
            raise ConfigError(reason)

    def _wait_for_answers(self) -> None:
        end_s = time.monotonic() + self.timeout_s
        missing = list(range(1, self.ranks))
        while missing := [rank for rank in missing if not self.store.check([_answer_of(rank)])]:
            if time.monotonic() > end_s:
                raise WaitTimeout(f"rank {', '.join(map(str, missing))} of the trainer", self.timeout_s, _START_IT)
            time.sleep(_LOOK_EVERY_S)

    def _first_answer(self) -> bytes:
        """The first objection; b"" if there is none."""
        answers = (self.store.get(_answer_of(rank)) for rank in range(1, self.ranks))
        return next((answer for answer in answers if answer), b"")

    def _objection(self, own: Claim) -> str:
        first = msgspec.msgpack.decode(self._read(_CLAIM), type=Claim)
        reason = objection(first, own, rank=self.rank)
        if reason is not None:
            return reason
        if _holds(Path(own.folder) / _name(0), first.token):
            return ""
        return (
            f"{first.folder} of rank 0 is not the folder that rank {self.rank} has as {own.folder}: a file written to "
            f"one was not seen in the other within {LOOK_S:g} s, and no checkpoint would be whole. Set runs_dir to a "
            "folder that all nodes share (NFS, Lustre)"
        )

    def _read(self, key: str) -> bytes:
        """The value of a key that rank 0 sets."""
        from torch.distributed import DistError

        try:
            self.store.wait([key], timedelta(seconds=2 * self.timeout_s))  # rank 0 may wait for others so long
            return bytes(self.store.get(key))
        except DistError as error:
            raise WaitTimeout("rank 0 of the trainer", self.timeout_s, f"{_START_IT} ({error})") from None

    def _wait_until_all_know(self) -> None:
        """Rank 0 stays, since it may keep the store, until every rank knows the reason, or for a few seconds."""
        end_s = time.monotonic() + _LAST_WORD_S
        known = self.store.add(_KNOWN, 1)
        while self.rank == 0 and known < self.ranks and time.monotonic() < end_s:
            time.sleep(_LOOK_EVERY_S)
            known = self.store.add(_KNOWN, 0)


def objection(first: Claim, own: Claim, *, rank: int) -> str | None:
    """Why rank `rank` cannot train with rank 0, whose claim is `first`. Value, rule and fix."""
    if keys := differing_keys(yaml.safe_load(first.config), yaml.safe_load(own.config)):
        return (
            f"rank {rank} has other values than rank 0 of {', '.join(keys)}: they would not do the same. Start all "
            "nodes with the same CONFIG and -o"
        )
    if own.model != first.model:
        return (
            f"rank {rank} has another first policy than rank 0: they would train parts of different models. Set "
            "model.path to one folder that all see, or to copies of the same files"
        )
    return None


def fingerprint(model: Path) -> str:
    """A hash of a model's configuration and weights: names, sizes, and the first and last MiB of every file.

    Enough to tell models apart that were made or fetched differently, without reading all of one.
    """
    state = xxhash.xxh3_128()
    for file in sorted([*model.glob("*.safetensors"), *model.glob("*.json")]):
        state.update(f"{file.name} {file.stat().st_size}\n".encode())
        with file.open("rb") as stream:
            state.update(stream.read(_ENDS_BYTES))
        state.update(read_end(file, _ENDS_BYTES))
    return state.hexdigest()


def _write(file: Path, content: str, rank: int) -> str:
    """Write the file, and make its folder. Returns why that cannot be done; "" if it is."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    except OSError as error:
        return (
            f"{file.parent} cannot be written to by rank {rank} ({error}), and every rank writes its part of a "
            "checkpoint there. Mount runs_dir for writing on each node"
        )
    return ""


def _holds(file: Path, content: str) -> bool:
    """Whether the file is there with this content within LOOK_S."""
    end_s = time.monotonic() + LOOK_S
    while time.monotonic() < end_s:
        with contextlib.suppress(OSError):
            if file.read_text() == content:
                return True
        time.sleep(_LOOK_EVERY_S)
    return False


def _name(rank: int) -> str:
    return f".rank-{rank}"


def _answer_of(rank: int) -> str:
    return f"answer of rank {rank}"
