"""A rollout server: generates without pause, takes new weights in between.

    buffer --ticket--> Dispatcher --> engine --> RewardPool --group--> buffer
       ^                   |             ^
       +-- tasks -- TaskFeeder +     WeightWatcher <-- receiver <-- publisher
                                         ^
                        MilestoneEvaluator --pin--+--> board <-- Heartbeat

The cast:

- `Dispatcher`     keeps the engine full; tickets in, groups out
- `TaskFeeder`         keeps tasks waiting in the buffer
- `WeightWatcher`  new weights into the engine
- `MilestoneEvaluator`      held-out prompts at pinned versions
- `ConcurrencyController`       as many samples in flight as the engine can run
- `Heartbeat`          a heartbeat every second
- `ApiServer`      health, metrics, completions, administration (`rollout_server.http`), unless it is off

Each module says what its loop waits for and who unblocks it. `serve` waits for the dispatcher (until
the buffer says that the run has ended, or somebody has drained this server) and for the evaluator (until
the final evaluation is on the board; a drained server leaves that to others). If one of the cast fails,
all are stopped and the failure surfaces.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from async_grpo.errors import WaitTimeout
from buffer import TASKS_AHEAD
from rollout_server.context import ServerContext
from rollout_server.dispatch.admission import TaskFeeder
from rollout_server.dispatch.concurrency import ConcurrencyController
from rollout_server.dispatch.dispatcher import Dispatcher
from rollout_server.evaluation.milestones import MilestoneEvaluator
from rollout_server.heartbeat import Heartbeat
from rollout_server.weight_watcher import WeightWatcher

if TYPE_CHECKING:
    from rollout_server.http.server import ApiServer


class RolloutServer:
    """One engine's server; the engine has started and has its first weights."""

    def __init__(self, cast: ServerContext, watcher: WeightWatcher, front: ApiServer | None = None) -> None:
        """`front` is open; from here on it is ready."""
        self._front = front
        self._cast = cast
        self._watcher = watcher
        self._feeder = TaskFeeder(cast.buffer, cast.source, target=TASKS_AHEAD * cast.config.capacity_groups)
        self._dispatcher = Dispatcher(cast, watcher, self._feeder)
        self._evaluator = MilestoneEvaluator(cast, watcher)
        rollout = cast.config.rollout
        least = rollout.min_concurrency or rollout.max_concurrency
        self._throttle = ConcurrencyController(
            cast.engine, self._dispatcher.slots, least=least, most=rollout.max_concurrency
        )
        address = front.address if front is not None else ""
        self._pulse = Heartbeat(cast, watcher, self._dispatcher, self._evaluator, http=address)
        if front is not None:
            front.attach(cast, watcher, self._dispatcher, self._evaluator)

    async def serve(self) -> None:
        """Until the run has ended and its final evaluation is there, or the server is drained. Cancel it to stop
        early: work in flight is stored and given back."""
        try:
            async with asyncio.TaskGroup() as group:
                loops = [self._watcher.run(), self._feeder.run(), self._throttle.run(), self._pulse.run()]
                loops += [self._front.run()] if self._front is not None else []
                background = [group.create_task(loop) for loop in loops]
                await self._dispatcher.admission.until_draining(self._evaluator.first())
                async with asyncio.TaskGroup() as work:
                    evaluation = work.create_task(self._evaluator.run())
                    await self._dispatcher.run()
                    await (self._leave if self._dispatcher.admission.is_draining else self._finish)(evaluation)
                for task in background:
                    task.cancel()
        finally:
            await self._pulse.count_tokens()

    async def _leave(self, evaluation: asyncio.Task[None]) -> None:
        """Somebody has drained this server: what is in flight has ended, but for completions over HTTP."""
        evaluation.cancel()
        if self._front is not None:
            in_a_hurry = self._dispatcher.admission.hurry.is_set()
            await self._front.finish(0 if in_a_hurry else self._cast.config.rollout.http.drain_timeout_s)

    async def _finish(self, evaluation: asyncio.Task[None]) -> None:
        """After the run has ended: the final weights are on their way, or here."""
        timeout_s = self._cast.config.weights.update_timeout_s + 2 * self._cast.config.eval.timeout_s
        done, _ = await asyncio.wait([evaluation], timeout=timeout_s)
        if not done:
            raise WaitTimeout(
                f"the evaluation of the final version {self._cast.config.steps}", timeout_s, "Did the trainer end early"
            )
