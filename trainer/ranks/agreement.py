"""Startup check: all ranks must have the same config, model and checkpoint folder, regardless of the launcher.

every rank   writes a file into the checkpoint folder
rank 0       puts its Claim into the store
rank R       compares it with its own claim, looks for rank 0's file, and answers "" or an objection in the store
rank 0       puts the verdict into the store: "" or the first objection, with which every rank raises ConfigError
every rank   removes its file; rank 0 only after all answers, because the others look for it before they answer
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
from msgspec.structs import replace

from async_grpo.config import RunConfig, dump
from async_grpo.config.load import differing_keys
from async_grpo.errors import ConfigError, WaitTimeout
from async_grpo.utils.files import read_end
from async_grpo.wire import encode
from async_grpo.wire.records import Record

if TYPE_CHECKING:
    from torch.distributed import Store

_HASHED_BYTES_PER_END = 1 << 20

VISIBLE_WITHIN_S = 30.0
"""Maximum wait for a file of another machine: an NFS client may show an old listing of a folder for that long."""

_POLL_EVERY_S = 0.05
_FAREWELL_S = 5.0
"""Seconds that rank 0 keeps the store after a failure, for the other ranks to read the reason."""
_CLAIM = "claim of rank 0"
_VERDICT = "verdict"
_READERS = "readers of the verdict"
_START_HINT = "Check that it has been started, and with the same MASTER_ADDR or trainer.rendezvous"


class Claim(Record, frozen=True, kw_only=True, tag="claim"):
    """Configuration, model and checkpoint folder of a rank."""

    config: str
    """The resolved configuration, as YAML."""
    model: str
    """Fingerprint of the folder of the initial model."""
    folder: str
    """Checkpoint folder, as a path of this rank."""
    nonce: str
    """Random content of the file that this rank writes there; "" if it cannot."""

    @classmethod
    def of(cls, config: RunConfig, model: Path) -> Claim:
        """Make the claim of this rank."""
        folder = config.run_dir.absolute() / "checkpoints"
        return cls(config=dump(config), model=fingerprint(model), folder=str(folder), nonce=os.urandom(8).hex())


@dataclass(frozen=True, slots=True)
class Agreement:
    """The startup check, as one rank makes it. `ranks`: number of ranks. `timeout_s`: maximum wait for the others."""

    store: Store
    rank: int
    ranks: int
    timeout_s: float

    def reach_agreement(self, own: Claim) -> None:
        """Wait until all ranks agree. Raises ConfigError if one does not, WaitTimeout if one is missing."""
        # Every rank tests that it can write here, because it will write its part of each checkpoint here. Rank 0's file
        # also shows the others whether they see the same folder.
        file = Path(own.folder) / _file_name(self.rank)
        write_error = _try_to_write(file, own.nonce, self.rank)
        try:
            if self.rank != 0:
                answer = write_error or self._find_objection(own)
                self.store.set(_answer_key(self.rank), answer.encode())
            else:
                self.store.set(_CLAIM, encode(replace(own, nonce="") if write_error else own))
                self._wait_for_answers()
                self.store.set(_VERDICT, write_error.encode() or self._first_answer())
        finally:
            if not write_error:
                file.unlink(missing_ok=True)
        reason = self._read(_VERDICT).decode()
        if reason:
            self._confirm_read()
            raise ConfigError(reason)

    def _wait_for_answers(self) -> None:
        deadline_s = time.monotonic() + self.timeout_s
        missing = list(range(1, self.ranks))
        while True:  # polls, because a wait for all keys at once would not say which ranks are missing
            missing = [rank for rank in missing if not self.store.check([_answer_key(rank)])]
            if not missing:
                return
            if time.monotonic() > deadline_s:
                raise WaitTimeout(f"rank {', '.join(map(str, missing))} of the trainer", self.timeout_s, _START_HINT)
            time.sleep(_POLL_EVERY_S)

    def _first_answer(self) -> bytes:
        """Return the first objection; b"" if there is none."""
        answers = (self.store.get(_answer_key(rank)) for rank in range(1, self.ranks))
        return next((answer for answer in answers if answer), b"")

    def _find_objection(self, own: Claim) -> str:
        """Compare the own claim with rank 0's. Returns the objection; "" if there is none."""
        rank_0_claim = msgspec.msgpack.decode(self._read(_CLAIM), type=Claim)
        reason = find_difference(rank_0_claim, own, rank=self.rank)
        if reason is not None:
            return reason
        if not rank_0_claim.nonce:
            return ""  # rank 0 cannot write and says so in its verdict
        if _wait_for_content(Path(own.folder) / _file_name(0), rank_0_claim.nonce):
            return ""
        return (
            f"{rank_0_claim.folder} on rank 0 and {own.folder} on rank {self.rank} are different folders: a file "
            f"written to the first was not visible in the second within {VISIBLE_WITHIN_S:g} s, so no checkpoint would "
            "be complete. Set runs_dir to a folder that all nodes share (NFS, Lustre)"
        )

    def _read(self, key: str) -> bytes:
        """Wait for a key that rank 0 sets, and return its value."""
        from torch.distributed import DistError

        # Twice the timeout: rank 0 may first wait for other ranks for its own timeout.
        timeout_s = 2 * self.timeout_s
        try:
            self.store.wait([key], timedelta(seconds=timeout_s))
            return bytes(self.store.get(key))
        except DistError as error:
            raise WaitTimeout("rank 0 of the trainer", timeout_s, f"{_START_HINT} ({error})") from None

    def _confirm_read(self) -> None:
        """Count this rank as a reader of the verdict. Rank 0 waits for all: the store may live in its process."""
        deadline_s = time.monotonic() + _FAREWELL_S
        readers = self.store.add(_READERS, 1)
        while self.rank == 0 and readers < self.ranks and time.monotonic() < deadline_s:
            time.sleep(_POLL_EVERY_S)
            readers = self.store.add(_READERS, 0)  # adding 0 reads the counter


def find_difference(rank_0_claim: Claim, own: Claim, *, rank: int) -> str | None:
    """Return why rank `rank` cannot train with rank 0; None if it can."""
    keys = differing_keys(yaml.safe_load(rank_0_claim.config), yaml.safe_load(own.config))
    if keys:
        return (
            f"rank {rank} has other values than rank 0 for {', '.join(keys)}, but all ranks must have the same "
            "configuration. Start all nodes with the same CONFIG and -o"
        )
    if own.model != rank_0_claim.model:
        return (
            f"rank {rank} loads other initial weights than rank 0, so they would train parts of different models. "
            "Set model.path to one folder that all nodes share, or to copies of the same files"
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
            state.update(stream.read(_HASHED_BYTES_PER_END))
        state.update(read_end(file, _HASHED_BYTES_PER_END))
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
    """Wait at most VISIBLE_WITHIN_S for the file to have this content. Returns False if it does not."""
    deadline_s = time.monotonic() + VISIBLE_WITHIN_S
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
