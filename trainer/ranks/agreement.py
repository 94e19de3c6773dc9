"""Startup check: all ranks must have the same config, model and checkpoint folder, regardless of the launcher.

rank 0   writes its Claim to the store, and a file into the checkpoint folder
rank R   compares its own claim, looks for the file, and writes "" or an objection to the store
rank 0   writes "" or the first objection to the store; with an objection, every rank raises ConfigError
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
"""Seconds until a file of another machine must be visible: NFS caches the listing of a folder that long."""

_POLL_EVERY_S = 0.05
_FAREWELL_S = 5.0
"""Seconds that rank 0 keeps the store after a failure, for the other ranks to read the reason."""
_CLAIM = "claim of rank 0"
_AGREED = "agreed"
_KNOWN = "known"
_START_IT = "Is it started, with the same MASTER_ADDR or trainer.rendezvous?"


class Claim(Record, frozen=True, kw_only=True, tag="claim"):
    """Configuration, model and checkpoint folder of a rank."""

    config: str
    """The resolved configuration, as YAML."""
    model: str
    """Fingerprint of the folder of the first policy."""
    folder: str
    """Checkpoint folder, as a path of this rank."""
    token: str
    """Content of the file that rank 0 writes there."""

    @classmethod
    def of(cls, config: RunConfig, model: Path) -> Claim:
        """Make the claim of this rank."""
        folder = config.run_dir.absolute() / "checkpoints"
        return cls(config=dump(config), model=fingerprint(model), folder=str(folder), token=os.urandom(8).hex())


@dataclass(frozen=True, slots=True)
class Agreement:
    """The startup check of one of `ranks` ranks. `timeout_s`: maximum wait for the others."""

    store: Store
    rank: int
    ranks: int
    timeout_s: float

    def reach_agreement(self, own: Claim) -> None:
        """Wait until all ranks agree. Raises ConfigError if one does not, WaitTimeout if one is missing."""
        # Every rank writes a file of its own, because every rank writes its part of a checkpoint there. Rank 0's file
        # also shows the others whether they see the same folder.
        file = Path(own.folder) / _file_name(self.rank)
        unwritable = _try_to_write(file, own.token, self.rank)
        try:
            if self.rank != 0:
                answer = unwritable or self._find_objection(own)
                self.store.set(_answer_key(self.rank), answer.encode())
            else:
                self.store.set(_CLAIM, encode(own))
                self._wait_for_answers()
                self.store.set(_AGREED, unwritable.encode() or self._first_answer())
        finally:
            if not unwritable:
                file.unlink(missing_ok=True)
        reason = self._read(_AGREED).decode()
        if reason:
            self._wait_until_all_have_read()
            raise ConfigError(reason)

    def _wait_for_answers(self) -> None:
        deadline_s = time.monotonic() + self.timeout_s
        missing = list(range(1, self.ranks))
        while True:
            missing = [rank for rank in missing if not self.store.check([_answer_key(rank)])]
            if not missing:
                return
            if time.monotonic() > deadline_s:
                raise WaitTimeout(f"rank {', '.join(map(str, missing))} of the trainer", self.timeout_s, _START_IT)
            time.sleep(_POLL_EVERY_S)

    def _first_answer(self) -> bytes:
        """Return the first objection; b"" if there is none."""
        answers = (self.store.get(_answer_key(rank)) for rank in range(1, self.ranks))
        return next((answer for answer in answers if answer), b"")

    def _find_objection(self, own: Claim) -> str:
        """Compare the own claim with rank 0's. Returns the objection; "" if there is none."""
        first = msgspec.msgpack.decode(self._read(_CLAIM), type=Claim)
        reason = find_difference(first, own, rank=self.rank)
        if reason is not None:
            return reason
        if _wait_for_content(Path(own.folder) / _file_name(0), first.token):
            return ""
        return (
            f"{first.folder} on rank 0 and {own.folder} on rank {self.rank} are different folders: a file written to "
            f"the first was not visible in the second within {LOOK_S:g} s, so no checkpoint would be complete. Set "
            "runs_dir to a folder that all nodes share (NFS, Lustre)"
        )

    def _read(self, key: str) -> bytes:
        """Wait for a key that rank 0 sets, and return its value."""
        from torch.distributed import DistError

        # Twice the timeout: rank 0 may first wait for other ranks for its own timeout.
        try:
            self.store.wait([key], timedelta(seconds=2 * self.timeout_s))
            return bytes(self.store.get(key))
        except DistError as error:
            raise WaitTimeout("rank 0 of the trainer", self.timeout_s, f"{_START_IT} ({error})") from None

    def _wait_until_all_have_read(self) -> None:
        """Keep rank 0 alive until every rank has read the reason: the store may live in its process."""
        deadline_s = time.monotonic() + _FAREWELL_S
        readers = self.store.add(_KNOWN, 1)
        while self.rank == 0 and readers < self.ranks and time.monotonic() < deadline_s:
            time.sleep(_POLL_EVERY_S)
            readers = self.store.add(_KNOWN, 0)


def find_difference(first: Claim, own: Claim, *, rank: int) -> str | None:
    """Return why rank `rank` cannot train with rank 0, whose claim is `first`; None if it can."""
    keys = differing_keys(yaml.safe_load(first.config), yaml.safe_load(own.config))
    if keys:
        return (
            f"rank {rank} has other values than rank 0 for {', '.join(keys)}, and all ranks must train the same. Start "
            "all nodes with the same CONFIG and -o"
        )
    if own.model != first.model:
        return (
            f"rank {rank} has another first policy than rank 0, so they would train parts of different models. Set "
            "model.path to one folder that all nodes share, or to copies of the same files"
        )
    return None


def fingerprint(model: Path) -> str:
    """Hash a model's configuration and weights: names, sizes, and the first and last MiB of every file.

    This distinguishes models of different origin without reading them completely.
    """
    state = xxhash.xxh3_128()
    for file in sorted([*model.glob("*.safetensors"), *model.glob("*.json")]):
        state.update(f"{file.name} {file.stat().st_size}\n".encode())
        with file.open("rb") as stream:
            state.update(stream.read(_ENDS_BYTES))
        state.update(read_end(file, _ENDS_BYTES))
    return state.hexdigest()


def _try_to_write(file: Path, content: str, rank: int) -> str:
    """Create the folder and write the file. Returns an error message; "" on success."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    except OSError as error:
        return (
            f"rank {rank} cannot write to {file.parent} ({error}), and every rank writes its part of a checkpoint "
            "there. Mount runs_dir for writing on each node"
        )
    return ""


def _wait_for_content(file: Path, content: str) -> bool:
    """Wait at most LOOK_S for the file to have this content. Returns False if it does not."""
    deadline_s = time.monotonic() + LOOK_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(OSError):
            if file.read_text() == content:
                return True
        time.sleep(_POLL_EVERY_S)
    return False


def _file_name(rank: int) -> str:
    return f".rank-{rank}"


def _answer_key(rank: int) -> str:
    return f"answer of rank {rank}"
