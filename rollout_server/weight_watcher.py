"""Loads new weights into the engine as they arrive, and puts it to sleep while the trainer needs its device.

    receiver process --(epoch, version)--> WeightWatcher --update_weights--> engine
                                               |
                                               +--> wait_for_version (dispatcher), pin_version (evaluator)

- `run_updating` waits for the receiver; the trainer's next publication unblocks it. While an evaluation pins the
  version, it waits for the end of the evaluation.
- `wait_for_initial_weights` waits for the first publication, `wait_for_version` until `run_updating` has applied that
  version or a newer one. A trainer that resumes from a checkpoint publishes nothing until it is back at the version
  that was published before. Both timeouts restart whenever it reports a step of that replay (`ReplayWatch`).
- `yield_device_to_trainer` waits until the trainer wants to run a step on the engine's device, then for the end of that
  step (`DeviceTurn`). It and an update exclude each other.

Versions never decrease. A trainer that resumes at an earlier version replays its steps up to the version that the
engine has; the engine keeps its weights until then, so the versions in the spans of a sample never decrease. An older
epoch is never applied over a newer one.
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

NO_WEIGHTS = WeightVersion(-1, -1)
"""Older than every publication."""
BOARD_POLL_S = 1.0
"""Seconds between two polls of the run board, which sends no notifications."""
BOARD_TIMEOUT_S = 5.0
RETRY_S = 0.05

log = structlog.get_logger()


class ReplayWatch:
    """Progress of a resumed trainer's replay, polled from the run board and shared by all waits of a server."""

    def __init__(self, board: RunBoard) -> None:
        self._board = board
        self._progress: ReplayProgress | None = None
        self._has_polled = False
        self._polled_s: float | None = None
        self._advanced_s: float | None = None
        """Monotonic time of the last advance that was seen."""
        self._poll_lock = asyncio.Lock()

    def deadline_s(self, since_s: float, timeout_s: float) -> float:
        """End of a wait that started at `since_s`: `timeout_s` after that, or after the last advance of the replay."""
        if self._advanced_s is None:
            return since_s + timeout_s
        return max(since_s, self._advanced_s) + timeout_s

    async def poll_board(self) -> None:
        """Poll the board, at most once every BOARD_POLL_S. If the board does not answer, nothing changes."""
        async with self._poll_lock:
            if self._polled_s is not None and time.monotonic() - self._polled_s < BOARD_POLL_S:
                return
            try:
                async with asyncio.timeout(BOARD_TIMEOUT_S):
                    progress = await self._board.replay_progress()
            except (AsyncGrpoError, TimeoutError):
                return
            finally:
                # Also after an error: waiters would otherwise poll a board that is down in a tight loop.
                self._polled_s = time.monotonic()

            # The first report is no advance: a trainer that has died may have left it.
            if self._has_polled and progress != self._progress:
                self._advanced_s = self._polled_s
            self._has_polled = True
            self._progress = progress

    def describe(self) -> str:
        """One sentence about the replay, for an error; "" if no trainer replays."""
        progress = self._progress
        if progress is None or progress.version >= progress.target:
            return ""
        if self._advanced_s is None:
            advance = "it has not advanced since"
        else:
            advance = f"its last advance was {time.monotonic() - self._advanced_s:.0f} s ago"
        return (
            f"The trainer of epoch {progress.epoch} has resumed and repeats its steps before it publishes again: it "
            f"reported version {progress.version} of {progress.target}, and {advance}. Is it alive"
        )


class WeightWatcher:
    """Keeps the weights of one engine current.

    Heartbeat and metrics read `applied`, `updates` and the `last_` fields.
    """

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
        self._seen = NO_WEIGHTS
        """Newest publication that was applied, or skipped because it would decrease the engine's version."""
        self.applied = NO_WEIGHTS
        """Epoch and version of the engine's weights."""
        self._engine_lock = asyncio.Lock()
        """Taken by an update, and while an evaluation pins the version."""
        self._awake_lock = asyncio.Lock()
        """Taken by an update, which needs the engine's memory, and while the engine sleeps."""
        self._changed = asyncio.Condition()
        self._asleep_s = 0.0
        """Total seconds of completed sleeps."""
        self._asleep_since_s: float | None = None
        self.updates = 0
        self.last_pause_s = 0.0
        self.last_load_s = 0.0
        """The part of the pause in which the weights were copied into the engine."""
        self.last_transfer_s = 0.0

    async def wait_for_initial_weights(self, timeout_s: float) -> None:
        """Wait for the trainer's first publication and apply it. Raises WaitTimeout, PublisherLost.

        `timeout_s` counts from the start, or from the last step of a replaying trainer.
        """
        since_s = time.monotonic()
        while True:
            remaining_s = self._replay.deadline_s(since_s, timeout_s) - time.monotonic()
            try:
                # Wait in short pieces, so that steps of a replay are seen and extend the deadline.
                await self._receiver.wait_for_newer_version(self._seen, max(0.0, min(remaining_s, BOARD_POLL_S)))
                break
            except (WaitTimeout, PublisherLost) as error:
                await self._replay.poll_board()
                if time.monotonic() >= self._replay.deadline_s(since_s, timeout_s):
                    raise self._explain_no_weights(timeout_s, error) from error
                await asyncio.sleep(RETRY_S)
        await self._apply_newest()

    async def run_updating(self) -> None:
        """Apply every publication, until cancelled. Raises EngineError, WeightsError."""
        while True:
            try:
                await self._receiver.wait_for_newer_version(self._seen, self._update_timeout_s)
                await self._apply_newest()
            except WaitTimeout:
                continue  # a long step is no fault; callers of wait_for_version have their own timeouts
            except WeightsReplaced as error:  # the receiver was killed and restarted; the engine is untouched
                log.warning("weights were replaced before they could be loaded", error=str(error))
            except PublisherLost as error:
                log.warning("the publisher is silent; waiting for a trainer", error=str(error))
                # A receiver that has already detected the silence raises without waiting. Without this pause the loop
                # would block the event loop.
                await asyncio.sleep(BOARD_POLL_S)

    async def wait_for_version(self, version: int, timeout_s: float | None = None) -> None:
        """Wait until the engine generates with `version` or a newer one. Raises WaitTimeout.

        `timeout_s` counts from the start, or from the last step of a replaying trainer. Use None for versions that
        training has not reached yet.
        """
        if timeout_s is None:
            await self._reach_version(version, None)
            return

        since_s = time.monotonic()
        while True:
            remaining_s = self._replay.deadline_s(since_s, timeout_s) - time.monotonic()
            if await self._reach_version(version, max(0.0, min(remaining_s, BOARD_POLL_S))):
                return
            if remaining_s <= BOARD_POLL_S:
                break
            await self._replay.poll_board()

        fix = "Is the publisher reachable from here"
        replay = self._replay.describe()
        if replay:
            fix = f"{replay}? Raise weights.update_timeout_s if one step takes longer"
        raise WaitTimeout(
            f"weights of version {version}, which are published (the engine has {self._engine.version})", timeout_s, fix
        )

    async def _reach_version(self, version: int, within_s: float | None) -> bool:
        """Wait at most `within_s` for the version. Returns False if the engine does not have it by then."""
        try:
            async with asyncio.timeout(within_s), self._changed:
                await self._changed.wait_for(lambda: self._engine.version >= version)
        except TimeoutError:
            return False
        return True

    def _explain_no_weights(self, timeout_s: float, error: WaitTimeout | PublisherLost) -> WaitTimeout | PublisherLost:
        replay = self._replay.describe()
        if replay:
            fix = f"{replay}? Raise launch.ready_timeout_s if one step takes longer"
        elif isinstance(error, PublisherLost):
            return error
        else:
            fix = "Is the trainer running, and is weights.bind reachable from here"
        return WaitTimeout("the trainer's first publication of weights", timeout_s, fix)

    @asynccontextmanager
    async def pin_version(self) -> AsyncIterator[int]:
        """Exclude updates within the block; yields the engine's version."""
        async with self._engine_lock:
            yield self._engine.version

    @property
    def is_asleep(self) -> bool:
        """True while the engine sleeps."""
        return self._asleep_since_s is not None

    @property
    def awake_s(self) -> float:
        """Clock in seconds that stops while the engine sleeps."""
        now_s = time.monotonic() if self._asleep_since_s is None else self._asleep_since_s
        return now_s - self._asleep_s

    async def yield_device_to_trainer(self, turn: DeviceTurn) -> None:
        """Put the engine to sleep during each of the trainer's steps on its device, until cancelled.

        Raises EngineError.
        """
        while True:
            await turn.wanted()
            # Not during an update, which needs the engine's memory.
            async with self._awake_lock:
                with self._logger.record_span("sleep", f"version {self._engine.version}"):
                    # Free the memory before the trainer gets its turn, and wake only after the turn is ours again:
                    # otherwise both would allocate on the device.
                    await self._call_engine(self._engine.sleep(), "fall asleep")
                    self._asleep_since_s = time.monotonic()
                    turn.yield_to_step()
                    await turn.use()
                    await self._call_engine(self._engine.wake(), "wake")
                slept_s = time.monotonic() - self._asleep_since_s
                self._asleep_s += slept_s
                self._asleep_since_s = None
            log.info("the engine slept during a step of the trainer", slept_s=slept_s)

    async def _call_engine(self, call: Coroutine[Any, Any, None], action: str) -> None:
        """Await an engine call. Raises EngineError if it takes longer than weights.update_timeout_s."""
        try:
            async with asyncio.timeout(self._update_timeout_s):
                await call
        except TimeoutError:
            raise EngineError(
                f"the engine did not {action} within {self._update_timeout_s:g} s (weights.update_timeout_s). Is its "
                "process alive"
            ) from None

    async def _apply_newest(self) -> None:
        """Apply the newest weights, unless they would decrease the engine's version."""
        # Take both locks first: newer weights may arrive while the version is pinned or the engine sleeps, and `hold`
        # returns the newest weights at that moment.
        async with self._engine_lock, self._awake_lock, self._receiver.hold_newest() as newest:
            if newest.version >= self._engine.version:
                await self._update_engine(newest)
            self._seen = newest.identity

    async def _update_engine(self, weights: HeldWeights) -> None:
        """Load the weights and wake the waiters. Raises EngineError, also if the engine does not answer in time."""
        started_s = time.time()
        try:
            with self._logger.record_span("weights", f"version {weights.version}") as fields:
                async with asyncio.timeout(self._update_timeout_s):
                    times = await self._engine.update_weights(weights, interruption=self._interruption)
                self.last_pause_s, self.last_load_s = times.pause_s, times.load_s
                self.last_transfer_s = self._receiver.last_transfer_s
                fields["transfer_s"] = round(self.last_transfer_s, 4)
                fields["pause_s"] = round(self.last_pause_s, 4)
                fields["load_s"] = round(self.last_load_s, 4)
        except TimeoutError:
            raise EngineError(
                f"the engine did not load {weights.identity} within {self._update_timeout_s:g} s. Is its process "
                "alive? Raise weights.update_timeout_s if the model is that large"
            ) from None
        self.applied = weights.identity
        self.updates += 1
        log.info(
            "weights applied",
            version=weights.version,
            epoch=weights.epoch,
            transfer_s=self.last_transfer_s,
            pause_s=self.last_pause_s,
            load_s=self.last_load_s,
            took_s=time.time() - started_s,
        )
        async with self._changed:
            self._changed.notify_all()
