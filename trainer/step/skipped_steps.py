"""Steps whose loss or gradient is not finite: they are skipped, and their batches dumped.

One such step may be bad luck. Its groups are released like trained ones, and the version advances with the weights as
they are. After `trainer.max_skipped_steps` such steps in a row the run ends with TrainingError. All ranks come to the
same decision, because they see the same loss and norm; rank 0 writes the batch to run_dir/dumps/step-N.msgpack.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from async_grpo.errors import NonFiniteStep, TrainingError, WireError
from async_grpo.utils.files import write_atomic
from async_grpo.wire import Batch, encode
from async_grpo.wire.records import Record

KEPT = 8
"""Number of dumps of a run; those of the oldest steps are deleted first."""


class SkippedBatch(Record, frozen=True, kw_only=True, tag="dump"):
    """The batch of a step that was skipped, readable with the plain `msgpack` package."""

    step: int
    reason: str
    time_s: float
    batch: Batch


@dataclass(slots=True)
class SkippedSteps:
    """Counts the skipped steps of one trainer process, and dumps their batches."""

    folder: Path
    limit: int
    writes: bool
    """Whether this rank writes the dumps."""
    in_a_row: int = 0

    def reset(self) -> None:
        """Set the count to 0: a step was trained."""
        self.in_a_row = 0

    def record_skip(self, batch: Batch, fault: NonFiniteStep) -> str:
        """Count a step that was skipped because of `fault` and dump its batch. Returns a sentence that says where.

        Raises TrainingError if it is one too many.
        """
        self.in_a_row += 1
        dumped = self._try_to_dump(batch, fault) if self.writes else ""
        if self.in_a_row >= self.limit:
            raise TrainingError(
                f"{self.in_a_row} steps in a row had a loss or a gradient that is not finite "
                f"(trainer.max_skipped_steps is {self.limit}), the last one with: {fault}. Checkpoints hold the "
                f"weights before them. {dumped}".rstrip()
            ) from fault
        return dumped

    def _try_to_dump(self, batch: Batch, fault: NonFiniteStep) -> str:
        """A dump is only there to look at: one that is too large, or a full disk, must not end the run."""
        path = self.folder / f"step-{batch.version + 1}.msgpack"
        dump = SkippedBatch(step=batch.version + 1, reason=str(fault), time_s=time.time(), batch=batch)
        try:
            self._write_dump(path, dump)
        except (OSError, WireError) as error:
            return f"Its batch could not be written to {path}: {error}"
        return f"Its batch is in {path}"

    def _write_dump(self, path: Path, dump: SkippedBatch) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(path, encode(dump))

        def number(path: Path) -> int:
            return int(path.stem.removeprefix("step-"))

        for old in sorted(self.folder.glob("step-*.msgpack"), key=number, reverse=True)[KEPT:]:
            if old != path:
                old.unlink()
