"""Brings new weights into the engine as they arrive.

    receiver process --(epoch, version)--> WeightWatcher --update_weights--> engine
                                               |
                                               +--> wait_for_version (dispatcher), pin (evaluator)

- `run` waits for the receiver; the next publication of the trainer unblocks it. Then it waits for
  the pin, if somebody holds it; the end of that evaluation unblocks it.
- `wait_for_version` waits for `run` to apply that version or a newer one.

Versions never go back: a trainer that resumes at an earlier version replays the steps up to the
one that the engine already has, so the engine keeps its weights until then, and the spans of
samples in flight never decrease. An older epoch is never applied over a newer one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from async_grpo.errors import EngineError, PublisherLost, WaitTimeout, WeightsReplaced
from async_grpo.weights.base import HeldWeights, WeightReceiver
from async_grpo.weights.manifest import WeightVersion
from rollout_server.engines.base import Engine, Interruption
from rollout_server.run_logger import RolloutLogger

NOTHING = WeightVersion(-1, -1)

log = structlog.get_logger()


class WeightWatcher:
    """One engine's weights. `applied`, `updates` and `last_pause_s` are for those who report."""

    def __init__(
        self,
        receiver: WeightReceiver,
        engine: Engine,
        *,
        interruption: Interruption,
        update_timeout_s: float,
        logger: RolloutLogger,
    ) -> None:
        self._receiver = receiver
        self._engine = engine
        self._interruption: Interruption = interruption
        self._update_timeout_s = update_timeout_s
        self._logger = logger
        self._seen = NOTHING
        self.applied = NOTHING
        """What the engine has."""
        self._engine_lock = asyncio.Lock()
        self._changed = asyncio.Condition()
        self.updates = 0
        self.last_pause_s = 0.0

    async def first(self, timeout_s: float) -> None:
        """Wait for the trainer's first publication and apply it. Raises WaitTimeout."""
        try:
            await self._receiver.next_version(self._seen, timeout_s)
            await self._apply()
        except WaitTimeout as error:
            raise WaitTimeout(
                "the trainer's first publication of weights",
                timeout_s,
                "Is the trainer running, and is weights.bind reachable from here",
            ) from error

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self._receiver.next_version(self._seen, self._update_timeout_s)
                await self._apply()
            except WaitTimeout:
                continue  # a long step is no fault; whoever needs the version has a timeout of its own
            except WeightsReplaced as error:  # the receiver was killed and began anew; nothing was touched
                log.warning("weights were replaced before they could be loaded", error=str(error))
            except PublisherLost as error:
                log.warning("the publisher is silent; waiting for a trainer", error=str(error))

    async def wait_for_version(self, version: int, timeout_s: float | None = None) -> None:
        """Return once the engine generates with `version` or a newer one. Raises WaitTimeout.

        Without a timeout for versions that training has yet to reach.
        """
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self._engine.version >= version)
        except TimeoutError:
            raise WaitTimeout(
                f"weights of version {version}, which are published (the engine has {self._engine.version})",
                timeout_s or 0.0,
                "Is the publisher reachable from here",
            ) from None

    @asynccontextmanager
    async def pin(self) -> AsyncIterator[int]:
        """Hold the engine's version for the length of the block; yields it."""
        async with self._engine_lock:
            yield self._engine.version

    async def _apply(self) -> None:
        """Apply the newest weights there are, unless they would take the engine's version back.

        More may have come while the version was pinned: what to load is asked for last.
        """
        async with self._engine_lock, self._receiver.hold() as newest:
            if newest.version >= self._engine.version:
                await self._update(newest)
            self._seen = newest.identity

    async def _update(self, held: HeldWeights) -> None:
        started_s = time.time()
        with self._logger.span("weights", f"version {held.version}"):
            self.last_pause_s = await self._load(held)
        self.applied = held.identity
        self.updates += 1
        log.info(
            "weights applied",
            version=held.version,
            epoch=held.epoch,
            pause_s=self.last_pause_s,
            took_s=time.time() - started_s,
        )
        async with self._changed:
            self._changed.notify_all()

    async def _load(self, held: HeldWeights) -> float:
        """Raises EngineError also for an engine that never answers: it may have died during the update."""
        try:
            async with asyncio.timeout(self._update_timeout_s):
                return await self._engine.update_weights(held, interruption=self._interruption)
        except TimeoutError:
            raise EngineError(
                f"the engine did not load {held.identity} within {self._update_timeout_s:g} s. Is its process alive? "
                "Raise weights.update_timeout_s if the model is that large"
            ) from None
