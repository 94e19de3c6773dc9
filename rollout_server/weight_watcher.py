"""Loads new weights into the engine as they arrive, and lets it sleep while the trainer needs its device.

    receiver process --(epoch, version)--> WeightWatcher --update_weights--> engine
                                               |
                                               +--> wait_for_version (dispatcher), pin (evaluator)

- `run` waits for the receiver; the trainer's next publication unblocks it. Then it waits for the pin while an
  evaluation holds it; the end of the evaluation unblocks it.
- `first` waits for the first publication, `wait_for_version` until `run` has applied that version or a newer one. A
  trainer that resumes from a checkpoint publishes nothing until it is back at the version that was published before.
  These two timeouts start again whenever it reports a step of that replay (`ReplayWatch`).
- `give_way` waits until the trainer wants to make a step on the engine's device, then until that step is made
  (`DeviceTurn`). It and an update wait for each other.

Versions never go back. A trainer that resumes at an earlier version replays its steps up to the version that the engine
has; the engine keeps its weights until then, so the versions in the spans of a sample never decrease. An older epoch is
never applied over a newer one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import structlog

from async_grpo.errors import AsyncGrpoError, EngineError, PublisherLost, WaitTimeout, WeightsReplaced
from async_grpo.utils.files import DeviceTurn
from async_grpo.weights.base import HeldWeights, WeightReceiver
from async_grpo.weights.manifest import WeightVersion
from async_grpo.wire.board import ReplayProgress
from buffer.base import RunBoard
from rollout_server.engines.base import Engine, Interruption
from rollout_server.run_logger import RolloutLogger

NOTHING = WeightVersion(-1, -1)
LOOK_EVERY_S = 1.0
"""Seconds between two looks at the run board, which notifies nobody."""
LOOK_TIMEOUT_S = 5.0
RETRY_S = 0.05

log = structlog.get_logger()


class ReplayWatch:
    """The replay of a trainer that has resumed, as the run board shows it; one for all waits of a server."""

    def __init__(self, board: RunBoard) -> None:
        self._board = board
        self._progress: ReplayProgress | None = None
        self._is_known = False
        self._looked_s: float | None = None
        self._advanced_s: float | None = None
        self._looking = asyncio.Lock()

    def deadline_s(self, since_s: float, timeout_s: float) -> float:
        """End of a wait that began at `since_s`: `timeout_s` after that, or after the last advance of the replay."""
        if self._advanced_s is None:
            return since_s + timeout_s
        return max(since_s, self._advanced_s) + timeout_s

    async def look(self) -> None:
        """Look at the board, at most once in LOOK_EVERY_S. A board that does not answer shows no advance."""
        async with self._looking:
            if self._looked_s is not None and time.monotonic() - self._looked_s < LOOK_EVERY_S:
                return
            try:
                async with asyncio.timeout(LOOK_TIMEOUT_S):
                    progress = await self._board.replay_progress()
            except (AsyncGrpoError, TimeoutError):
                return
            finally:
                self._looked_s = time.monotonic()
            # The first report that is seen is no advance: a trainer that is dead may have left it.
            if self._is_known and progress != self._progress:
                self._advanced_s = self._looked_s
            self._is_known, self._progress = True, progress

    def describe(self) -> str:
        """What is known about the replay; "" if there is none."""
        progress = self._progress
        if progress is None or progress.version >= progress.target:
            return ""
        if self._advanced_s is None:
            advance = "it has not advanced meanwhile"
        else:
            advance = f"its last advance was {time.monotonic() - self._advanced_s:.0f} s ago"
        return (
            f"The trainer of epoch {progress.epoch} has resumed and repeats its steps before it publishes again: it "
            f"reported version {progress.version} of {progress.target}, and {advance}. Is it alive"
        )


class WeightWatcher:
    """Keeps one engine's weights current. `applied`, `updates` and the `last_` seconds are for heartbeat and
    metrics."""

    def __init__(
        self,
        receiver: WeightReceiver,
        engine: Engine,
        *,
        interruption: Interruption,
        update_timeout_s: float,
        board: RunBoard,
        logger: RolloutLogger,
    ) -> None:
        self._receiver = receiver
        self._replay = ReplayWatch(board)
        self._engine = engine
        self._interruption: Interruption = interruption
        self._update_timeout_s = update_timeout_s
        self._logger = logger
        self._seen = NOTHING
        self.applied = NOTHING
        """Epoch and version of the weights that the engine has."""
        self._engine_lock = asyncio.Lock()
        self._awake_lock = asyncio.Lock()
        """Held by an update, which needs the engine's memory, and while the engine sleeps."""
        self._changed = asyncio.Condition()
        self._asleep_s = 0.0
        self._asleep_since_s: float | None = None
        self.updates = 0
        self.last_pause_s = 0.0
        self.last_load_s = 0.0
        """The part of the pause in which the weights were copied into the engine."""
        self.last_transfer_s = 0.0

    async def first(self, timeout_s: float) -> None:
        """Wait for the trainer's first publication and apply it. Raises WaitTimeout, PublisherLost.

        `timeout_s` counts from the start, or from the last step of a trainer that replays.
        """
        since_s = time.monotonic()
        while True:
            left_s = self._replay.deadline_s(since_s, timeout_s) - time.monotonic()
            try:
                await self._receiver.wait_for_newer_version(self._seen, max(0.0, min(left_s, LOOK_EVERY_S)))
                break
            except (WaitTimeout, PublisherLost) as error:
                await self._replay.look()
                if time.monotonic() >= self._replay.deadline_s(since_s, timeout_s):
                    raise self._explain_no_weights(timeout_s, error) from error
                await asyncio.sleep(RETRY_S)
        await self._apply()

    async def run(self) -> None:
        """Apply every publication, until cancelled. Raises EngineError, WeightsError."""
        while True:
            try:
                await self._receiver.wait_for_newer_version(self._seen, self._update_timeout_s)
                await self._apply()
            except WaitTimeout:
                continue  # a long step is no fault; callers of wait_for_version have timeouts of their own
            except WeightsReplaced as error:  # the receiver was killed and started again; the engine is untouched
                log.warning("weights were replaced before they could be loaded", error=str(error))
            except PublisherLost as error:
                log.warning("the publisher is silent; waiting for a trainer", error=str(error))
                # A receiver that knows of the silence may raise this without waiting: the event loop would spin.
                await asyncio.sleep(LOOK_EVERY_S)

    async def wait_for_version(self, version: int, timeout_s: float | None = None) -> None:
        """Return once the engine generates with `version` or a newer one. Raises WaitTimeout.

        `timeout_s` counts from the start, or from the last step of a trainer that replays. Give none for versions that
        training has yet to reach.
        """
        if timeout_s is None:
            await self._reach_version(version, None)
            return
        since_s = time.monotonic()
        while True:
            left_s = self._replay.deadline_s(since_s, timeout_s) - time.monotonic()
            if await self._reach_version(version, max(0.0, min(left_s, LOOK_EVERY_S))):
                return
            if left_s <= LOOK_EVERY_S:
                break
            await self._replay.look()
        fix = "Is the publisher reachable from here"
        if replay := self._replay.describe():
            fix = f"{replay}? Raise weights.update_timeout_s if one step takes longer"
        waited_for = f"weights of version {version}, which are published (the engine has {self._engine.version})"
        raise WaitTimeout(waited_for, timeout_s, fix)

    async def _reach_version(self, version: int, within_s: float | None) -> bool:
        """True once the engine has this version, False if it has not after `within_s`."""
        try:
            async with asyncio.timeout(within_s), self._changed:
                await self._changed.wait_for(lambda: self._engine.version >= version)
        except TimeoutError:
            return False
        return True

    def _explain_no_weights(self, timeout_s: float, error: WaitTimeout | PublisherLost) -> WaitTimeout | PublisherLost:
        if replay := self._replay.describe():
            fix = f"{replay}? Raise launch.ready_timeout_s if one step takes longer"
        elif isinstance(error, PublisherLost):
            return error
        else:
            fix = "Is the trainer running, and is weights.bind reachable from here"
        return WaitTimeout("the trainer's first publication of weights", timeout_s, fix)

    @asynccontextmanager
    async def pin(self) -> AsyncIterator[int]:
        """Keep the engine at its version for the length of the block; yields that version."""
        async with self._engine_lock:
            yield self._engine.version

    @property
    def is_asleep(self) -> bool:
        """Whether the engine sleeps now."""
        return self._asleep_since_s is not None

    @property
    def awake_s(self) -> float:
        """A clock in seconds that stands still while the engine sleeps."""
        now_s = time.monotonic()
        return (now_s if self._asleep_since_s is None else self._asleep_since_s) - self._asleep_s

    async def give_way(self, turn: DeviceTurn) -> None:
        """Let the engine sleep whenever the trainer makes a step on its device, until cancelled. Raises EngineError."""
        while True:
            await turn.wanted()
            async with self._awake_lock:
                with self._logger.span("sleep", f"version {self._engine.version}"):
                    await self._within(self._engine.sleep(), "fall asleep")
                    self._asleep_since_s = time.monotonic()
                    turn.yield_to_step()
                    await turn.use()
                    await self._within(self._engine.wake(), "wake")
                slept_s = time.monotonic() - self._asleep_since_s
                self._asleep_s, self._asleep_since_s = self._asleep_s + slept_s, None
            log.info("the engine slept while a step was made", slept_s=slept_s)

    async def _within(self, call: Coroutine[Any, Any, None], what: str) -> None:
        """Raises EngineError if the engine does not answer in time."""
        try:
            async with asyncio.timeout(self._update_timeout_s):
                await call
        except TimeoutError:
            raise EngineError(
                f"the engine did not {what} within {self._update_timeout_s:g} s (weights.update_timeout_s). Is its "
                "process alive"
            ) from None

    async def _apply(self) -> None:
        """Apply the newest weights, unless they would take the engine's version back.

        What to load is asked for last, because newer weights may have come while the version was pinned.
        """
        async with self._engine_lock, self._awake_lock, self._receiver.hold_newest() as newest:
            if newest.version >= self._engine.version:
                await self._update(newest)
            self._seen = newest.identity

    async def _update(self, held: HeldWeights) -> None:
        """Raises EngineError also if the engine does not answer: it may have died."""
        started_s = time.time()
        try:
            with self._logger.span("weights", f"version {held.version}") as facts:
                async with asyncio.timeout(self._update_timeout_s):
                    times = await self._engine.update_weights(held, interruption=self._interruption)
                self.last_pause_s, self.last_load_s = times.pause_s, times.load_s
                self.last_transfer_s = self._receiver.last_transfer_s
                facts["transfer_s"] = round(self.last_transfer_s, 4)
                facts["pause_s"] = round(self.last_pause_s, 4)
                facts["load_s"] = round(self.last_load_s, 4)
        except TimeoutError:
            raise EngineError(
                f"the engine did not load {held.identity} within {self._update_timeout_s:g} s. Is its process alive? "
                "Raise weights.update_timeout_s if the model is that large"
            ) from None
        self.applied = held.identity
        self.updates += 1
        log.info(
            "weights applied",
            version=held.version,
            epoch=held.epoch,
            transfer_s=self.last_transfer_s,
            pause_s=self.last_pause_s,
            load_s=self.last_load_s,
            took_s=time.time() - started_s,
        )
        async with self._changed:
            self._changed.notify_all()
