"""The groups of one step, taken from the buffer together or in parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from msgspec import structs

from async_grpo.telemetry.timeline import PhaseTimer
from async_grpo.wire import Batch
from trainer.coordinator import Coordinator


@dataclass(slots=True)
class IncomingBatch:
    """The batch of the step `version` -> `version + 1`. All ranks make the same calls.

    Waiting ends early on SIGTERM; the batch is not complete then.
    """

    coordinator: Coordinator
    version: int
    phases: PhaseTimer
    waiting_phase: str
    """Name of the phase that waiting time is added to."""
    received: list[Batch] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """True if all groups of the step are here."""
        return bool(self.received) and self.received[-1].missing == 0

    @property
    def batch(self) -> Batch:
        """The groups received so far, as one batch."""
        groups = [group for part in self.received for group in part.groups]
        return structs.replace(self.received[-1], groups=groups)

    def wait_for_batch(self) -> None:
        """Wait for all groups."""
        with self.phases.span(self.waiting_phase, version=self.version):
            batch = self.coordinator.take_batch(self.version)
        if batch is not None:
            self.received.append(batch)

    def receive_parts(self) -> Iterator[Batch]:
        """Yield further groups as they arrive, until the batch is complete."""
        while not self.is_complete:
            have = sum(len(part.groups) for part in self.received)
            with self.phases.span(self.waiting_phase, version=self.version, have=have):
                part = self.coordinator.take_batch_part(self.version, have)
            if part is None:
                return
            self.received.append(part)
            yield part
