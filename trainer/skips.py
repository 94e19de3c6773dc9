"""Steps that are skipped because their loss or gradient is not finite, and what is left of them to look at.

    NonFiniteStep --> batch into run_dir/dumps/step-N.msgpack --> version N with the weights as they are then
                                  |
                                  +--> as many in a row as trainer.max_skipped_steps: TrainingError

One such step may be bad luck, and the groups of it are gone from the buffer like trained ones; several in a row are
not. All ranks come to the same decision, because they see the same loss and norm; the first one writes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from async_grpo.errors import NonFiniteStep, TrainingError
from async_grpo.wire import Batch, encode
from async_grpo.wire.records import Record

KEPT = 8
"""Dumps of a run; the oldest steps go first."""


class Dump(Record, frozen=True, kw_only=True, tag="dump"):
    """The batch of a step that was skipped, readable with the plain `msgpack` package."""

    step: int
    reason: str
    time_s: float
    batch: Batch


@dataclass(slots=True)
class Skips:
    """Of one trainer process."""

    folder: Path
    limit: int
    writes: bool
    """Whether this rank writes the dumps."""
    in_a_row: int = 0

    def made(self) -> None:
        """A step was trained."""
        self.in_a_row = 0

    def skipped(self, batch: Batch, fault: NonFiniteStep) -> Path:
        """A step was not, because of `fault`; returns its dump. Raises TrainingError if that was one too many."""
        self.in_a_row += 1
        path = self.folder / f"step-{batch.version + 1}.msgpack"
        if self.writes:
            self._write(path, Dump(step=batch.version + 1, reason=str(fault), time_s=time.time(), batch=batch))
        if self.in_a_row >= self.limit:
            raise TrainingError(
                f"{self.in_a_row} steps in a row had a loss or a gradient that is not finite "
                f"(trainer.max_skipped_steps is {self.limit}), the last one with: {fault}. Its batch is in {path}; "
                "checkpoints hold the weights before them"
            ) from fault
        return path

    def _write(self, path: Path, dump: Dump) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".part")
        draft.write_bytes(encode(dump))
        draft.replace(path)
        for old in sorted(self.folder.glob("step-*.msgpack"), key=_step, reverse=True)[KEPT:]:
            if old != path:
                old.unlink()


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))
