"""The run board: the few facts that the processes of a run tell each other beside the buffer.

- where the publisher of the weights listens
- a heartbeat of every rollout server, with its load and what it waits for
- counters that survive restarts
- results of evaluations, and the probe samples that the trainer compares log-probabilities with
"""

from __future__ import annotations

from typing import Protocol

from async_grpo.wire.board import Evaluation, Probe, PublisherAddress, ServerBeat


class RunBoard(Protocol):
    """All calls are coroutines; `InMemoryBoard` and `RedisBoard` keep this contract."""

    async def set_publisher(self, address: PublisherAddress) -> None:
        """The publisher of a (new) trainer listens here; an older epoch never replaces a newer one."""
        ...

    async def publisher(self) -> PublisherAddress | None:
        """Where the newest publisher listens; None before the first."""
        ...

    async def beat(self, beat: ServerBeat, *, ttl_s: float) -> None:
        """State that a rollout server lives; forgotten after ttl_s."""
        ...

    async def servers(self) -> list[ServerBeat]:
        """Rollout servers heard of within their ttl, by name."""
        ...

    async def count(self, name: str, amount: int) -> None:
        """Add to a counter of the run."""
        ...

    async def counters(self) -> dict[str, int]:
        """All counters."""
        ...

    async def claim(self, what: str, holder: str, *, ttl_s: float) -> bool:
        """Take a job that must be done by one process only; False if another holds it. A holder
        may claim again (renews)."""
        ...

    async def put_evaluation(self, evaluation: Evaluation) -> None:
        """Publish a result (one a version; the first stays)."""
        ...

    async def evaluations(self) -> list[Evaluation]:
        """All results, by version."""
        ...

    async def put_probe(self, probe: Probe) -> None:
        """Samples with behaviour log-probabilities, all of one version (the newest probe is kept)."""
        ...

    async def probe(self, version: int, *, timeout_s: float) -> Probe:
        """Wait for the probe of `version`. Raises WaitTimeout."""
        ...

    async def aclose(self) -> None:
        """Close connections."""
        ...
