"""Steps whose loss or gradient is not finite: the update is skipped and the batch is dumped.

One such step may be bad luck. Its groups are released like trained ones, and the version advances with unchanged
weights. After `trainer.max_skipped_steps` such steps in a row the run ends with TrainingError. All ranks decide alike,
because they see the same loss and norm; rank 0 writes the batch to run_dir/dumps/step-N.msgpack.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from async_grpo.errors import NonFiniteStep, TrainingError, WireError
from async_grpo.utils.files import write_atomic
from async_grpo.wire import Batch, encode
from async_grpo.wire.records import Record

MAX_DUMPS = 8
"""Number of dumps that a run keeps; those of the oldest steps are deleted first."""


class SkippedBatch(Record, frozen=True, kw_only=True, tag="dump"):
    """Batch of a skipped step, readable with the plain `msgpack` package."""

    step: int
    reason: str
    time_s: float
    batch: Batch


@dataclass(slots=True)
class SkippedSteps:
    """Counts consecutive skipped steps of one trainer process, and dumps their batches."""

    folder: Path
    limit: int
    writes_dumps: bool
    """True on the rank that writes the dumps."""
    consecutive: int = 0

    def reset(self) -> None:
        """Set the count to 0, after a step that was trained."""
        self.consecutive = 0

    def record_skip(self, batch: Batch, fault: NonFiniteStep) -> str:
        """Count a step that was skipped because of `fault` and dump its batch.

        Returns a sentence about the dump for the log; "" on ranks that write none. Raises TrainingError if the limit is
        reached.
        """
        self.consecutive += 1
        dumped = self._try_to_dump(batch, fault) if self.writes_dumps else ""
        if self.consecutive >= self.limit:
            raise TrainingError(
                f"{self.consecutive} steps in a row had a loss or a gradient that is not finite "
                f"(trainer.max_skipped_steps is {self.limit}), the last one with: {fault}. Checkpoints hold the "
                f"weights before them. {dumped}".rstrip()
            ) from fault
        return dumped

    def _try_to_dump(self, batch: Batch, fault: NonFiniteStep) -> str:
        # A dump is for debugging only. If it is too large or the disk is full, the run must not end.
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

        def step_of(path: Path) -> int:
            return int(path.stem.removeprefix("step-"))

        # After a resumption, dumps of later steps of the earlier trainer may be here. Never delete the new dump for
        # being older than those.
        newest_first = sorted(self.folder.glob("step-*.msgpack"), key=step_of, reverse=True)
        for old in newest_first[MAX_DUMPS:]:
            if old != path:
                old.unlink()
