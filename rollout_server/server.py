"""The rollout server: generates without pause, takes new weights in between.

    buffer --ticket--> Dispatcher --> engine --> RewardPool --group--> buffer
       ^                   |             ^
       +--- TaskFeeder ----+         WeightWatcher <-- receiver <-- publisher
                                         ^
                        MilestoneEvaluator --pin--+--> board <-- Heartbeat

Its parts:

- `Dispatcher`             keeps the engine full; tickets in, groups out
- `TaskFeeder`             keeps tasks waiting in the buffer
- `WeightWatcher`          loads new weights into the engine; lets it sleep while the trainer needs its device
- `MilestoneEvaluator`     grades held-out prompts at pinned versions
- `ConcurrencyController`  as many samples in flight as the engine can run
- `Heartbeat`              writes the server's state to the board every second
- `ApiServer`              health, metrics, completions, administration (`rollout_server.http`), unless it is off

Each module says what its loop waits for and who unblocks it. `serve` waits for the dispatcher, until the buffer says
that the run has ended or the administrator has drained this server. Then it waits for the evaluator, until the final
evaluation is on the board; a drained server leaves that to others. If one part fails, all are stopped and the failure
surfaces.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import structlog

from async_grpo.errors import BufferFault, WaitTimeout
from buffer import TASKS_AHEAD
from rollout_server.context import ServerContext
from rollout_server.dispatch.admission import FEEDER_TTL_S, TaskFeeder
from rollout_server.dispatch.concurrency import ConcurrencyController
from rollout_server.dispatch.dispatcher import Dispatcher
from rollout_server.evaluation.milestones import MilestoneEvaluator
from rollout_server.heartbeat import Heartbeat
from rollout_server.weight_watcher import WeightWatcher

if TYPE_CHECKING:
    from rollout_server.http.server import ApiServer

COUNT_TIMEOUT_S = 5.0

log = structlog.get_logger()


class RolloutServer:
    """The parts of one server, run together. The engine has started and has its first weights."""

    def __init__(
        self,
        context: ServerContext,
        watcher: WeightWatcher,
        api: ApiServer | None = None,
        giving_way: asyncio.Task[None] | None = None,
    ) -> None:
        """`api` is open already; from here on it reports the server as ready. `giving_way`: the watcher's `give_way`,
        if the engine has to sleep; it ends with an error or not at all."""
        self._api = api
        self._giving_way = giving_way
        self._context = context
        self._watcher = watcher
        self._feeder = TaskFeeder(
            context.buffer,
            context.source,
            target=TASKS_AHEAD * context.config.capacity_groups,
            claim=lambda: context.board.claim_job("tasks", context.name, ttl_s=FEEDER_TTL_S),
            starved=partial(context.logger.wait, "tasks"),
        )
        self._dispatcher = Dispatcher(context, watcher, self._feeder)
        self._evaluator = MilestoneEvaluator(context, watcher)
        rollout = context.config.rollout
        least = rollout.min_concurrency or rollout.max_concurrency
        self._concurrency = ConcurrencyController(
            context.engine, self._dispatcher.slots, least=least, most=rollout.max_concurrency
        )
        address = api.address if api is not None else ""
        self._heartbeat = Heartbeat(context, watcher, self._dispatcher, self._evaluator, http=address)
        if api is not None:
            api.attach(context, watcher, self._dispatcher, self._evaluator)

    async def serve(self) -> None:
        """Serve until the run has ended and its final evaluation is on the board, or the server is drained. Cancel it
        to stop early: work in flight is stored and given back. Raises what any part raises, in an ExceptionGroup."""
        try:
            async with asyncio.TaskGroup() as group:
                loops = [self._watcher.run(), self._feeder.run(), self._concurrency.run(), self._heartbeat.run()]
                loops += [asyncio.wait_for(self._giving_way, None)] if self._giving_way is not None else []
                loops += [self._api.run()] if self._api is not None else []
                background = [group.create_task(loop) for loop in loops]
                await self._dispatcher.admission.until_draining(self._evaluator.first())
                async with asyncio.TaskGroup() as work:
                    evaluation = work.create_task(self._evaluator.run())
                    await self._dispatcher.run()
                    await (self._leave if self._dispatcher.admission.is_draining else self._finish)(evaluation)
                for task in background:
                    task.cancel()
        finally:
            await self._count_last_tokens()

    async def _count_last_tokens(self) -> None:
        """Count the tokens since the last heartbeat, unless the buffer's server is gone.

        Its error must not replace the one that ends the server: an engine that died would not be started again, and a
        stop by SIGTERM would look like a failure.
        """
        try:
            async with asyncio.timeout(COUNT_TIMEOUT_S):
                await self._heartbeat.count_tokens()
        except (BufferFault, TimeoutError) as error:
            log.warning("the tokens since the last heartbeat are not counted", error=f"{type(error).__name__}: {error}")

    async def _leave(self, evaluation: asyncio.Task[None]) -> None:
        """The server was drained: only completions over HTTP are still in flight."""
        evaluation.cancel()
        if self._api is not None:
            is_urgent = self._dispatcher.admission.stop_now.is_set()
            await self._api.finish(0 if is_urgent else self._context.config.rollout.http.drain_timeout_s)

    async def _finish(self, evaluation: asyncio.Task[None]) -> None:
        """The run has ended: wait for the final evaluation. Raises WaitTimeout."""
        timeout_s = self._context.config.weights.update_timeout_s + 2 * self._context.config.eval.timeout_s
        done, _ = await asyncio.wait([evaluation], timeout=timeout_s)
        if not done:
            raise WaitTimeout(
                f"the evaluation of the final version {self._context.config.steps}",
                timeout_s,
                "Did the trainer end early",
            )
