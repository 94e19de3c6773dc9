"""The run board within one process: the reference implementation, and the one for tests."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable

from async_grpo.errors import WaitTimeout
from async_grpo.wire.board import Evaluation, Probe, PublisherAddress, ServerBeat


class InMemoryBoard:
    """`RunBoard` of one event loop. `clock` gives the seconds that a ttl is measured in."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._publisher: PublisherAddress | None = None
        self._beats: dict[str, tuple[ServerBeat, float]] = {}
        self._counters: Counter[str] = Counter()
        self._claims: dict[str, tuple[str, float]] = {}
        self._evaluations: dict[int, Evaluation] = {}
        self._probe: Probe | None = None
        self._probed = asyncio.Condition()

    async def set_publisher(self, address: PublisherAddress) -> None:
        if self._publisher is None or address.epoch >= self._publisher.epoch:
            self._publisher = address

    async def publisher(self) -> PublisherAddress | None:
        return self._publisher

    async def beat(self, beat: ServerBeat, *, ttl_s: float) -> None:
        self._beats[beat.name] = (beat, self._clock() + ttl_s)

    async def servers(self) -> list[ServerBeat]:
        now_s = self._clock()
        return [beat for _, (beat, until_s) in sorted(self._beats.items()) if until_s > now_s]

    async def count(self, name: str, amount: int) -> None:
        self._counters[name] += amount

    async def counters(self) -> dict[str, int]:
        return dict(self._counters)

    async def claim(self, what: str, holder: str, *, ttl_s: float) -> bool:
        current = self._claims.get(what)
        if current is not None and current[0] != holder and current[1] > self._clock():
            return False
        self._claims[what] = (holder, self._clock() + ttl_s)
        return True

    async def put_evaluation(self, evaluation: Evaluation) -> None:
        self._evaluations.setdefault(evaluation.version, evaluation)

    async def evaluations(self) -> list[Evaluation]:
        return [self._evaluations[version] for version in sorted(self._evaluations)]

    async def put_probe(self, probe: Probe) -> None:
        async with self._probed:
            if self._probe is None or probe.version >= self._probe.version:
                self._probe = probe
            self._probed.notify_all()

    async def probe(self, version: int, *, timeout_s: float) -> Probe:
        waited_for = f"the probe of version {version} from a rollout server"
        try:
            async with asyncio.timeout(timeout_s), self._probed:
                await self._probed.wait_for(lambda: self._probe is not None and self._probe.version >= version)
        except TimeoutError:
            raise WaitTimeout(waited_for, timeout_s) from None
        assert self._probe is not None
        if self._probe.version > version:
            raise WaitTimeout(waited_for, 0, f"The probe of version {self._probe.version} has already replaced it")
        return self._probe

    async def aclose(self) -> None:
        """Nothing is open."""
