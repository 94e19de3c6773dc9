"""The rollout server: generates groups continuously and loads new weights in between.

    buffer --ticket--> Dispatcher --> engine --> RewardPool --group--> buffer
       ^                   |             ^
       +--- TaskFeeder ----+         WeightWatcher <-- receiver <-- publisher
                                         ^
                        MilestoneEvaluator --pin_version--+--> board <-- Heartbeat

Its parts:

- `Dispatcher`             keeps the engine full; tickets in, groups out
- `TaskFeeder`             keeps tasks waiting in the buffer
- `WeightWatcher`          loads new weights into the engine; puts it to sleep while the trainer needs its device
- `MilestoneEvaluator`     grades held-out prompts at pinned versions
- `ConcurrencyController`  adapts the number of samples in flight to the engine's load
- `Heartbeat`              writes the server's state to the board every second
- `ApiServer`              health, metrics, completions, administration (`rollout_server.http`), unless it is off

Each module's header lists what its loop waits for and what unblocks it. `serve` waits for the dispatcher, until the
run has ended or the administrator has drained this server; then for the evaluator, until the final evaluation is on the
board. A drained server leaves that evaluation to others. If one part fails, all are stopped and its error is raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

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
        yielding: asyncio.Task[None] | None = None,
    ) -> None:
        """`api` is open already; from here on it reports the server as ready.

        `yielding` runs the watcher's `yield_device_to_trainer` if the engine shares its device; it ends with an error
        or not at all.
        """
        self._api = api
        self._yielding = yielding
        self._context = context
        self._watcher = watcher
        self._feeder = TaskFeeder(
            context.buffer,
            context.source,
            target=TASKS_AHEAD * context.config.capacity_groups,
            claim=lambda: context.board.claim_job("tasks", context.name, ttl_s=FEEDER_TTL_S),
            report_starvation=partial(context.logger.record_wait, "tasks"),
        )
        self._dispatcher = Dispatcher(context, watcher, self._feeder)
        self._evaluator = MilestoneEvaluator(context, watcher)
        rollout = context.config.rollout
        self._concurrency = ConcurrencyController(
            context.engine,
            self._dispatcher.slots,
            min_capacity=rollout.min_concurrency or rollout.max_concurrency,
            max_capacity=rollout.max_concurrency,
        )
        address = api.address if api is not None else ""
        self._heartbeat = Heartbeat(context, watcher, self._dispatcher, self._evaluator, http=address)
        if api is not None:
            api.attach(context, watcher, self._dispatcher, self._evaluator)

    async def serve(self) -> None:
        """Serve until the run has ended and its final evaluation is on the board, or the server is drained.

        Cancel it to stop early: groups in flight are saved and given back. Raises the errors of all parts in an
        ExceptionGroup.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                background = [tasks.create_task(loop) for loop in self._background_loops()]

                # Evaluate the initial version before the first ticket, so that training does not slow it down.
                await self._dispatcher.admission.run_until_draining(self._evaluator.evaluate_initial_version())
                async with asyncio.TaskGroup() as work:
                    evaluation = work.create_task(self._evaluator.evaluate_milestones())
                    await self._dispatcher.run_until_end()
                    if self._dispatcher.admission.is_draining:
                        await self._leave_run(evaluation)
                    else:
                        await self._wait_for_final_evaluation(evaluation)

                for task in background:
                    task.cancel()
        finally:
            await self._count_last_tokens()

    def _background_loops(self) -> list[Coroutine[Any, Any, None]]:
        loops = [
            self._watcher.run_updating(),
            self._feeder.run_feeding(),
            self._concurrency.run_adjusting(),
            self._heartbeat.run_sending(),
        ]
        if self._yielding is not None:
            loops.append(asyncio.wait_for(self._yielding, None))
        if self._api is not None:
            loops.append(self._api.run_serving())
        return loops

    async def _count_last_tokens(self) -> None:
        """Count the tokens since the last heartbeat, unless the buffer's server is gone."""
        # An error here must not replace the one that ends the server: the engine would not be restarted after its
        # death, and a stop by SIGTERM would look like a failure.
        try:
            async with asyncio.timeout(COUNT_TIMEOUT_S):
                await self._heartbeat.count_tokens()
        except (BufferFault, TimeoutError) as error:
            log.warning("the tokens since the last heartbeat are not counted", error=f"{type(error).__name__}: {error}")

    async def _leave_run(self, evaluation: asyncio.Task[None]) -> None:
        """End a drained server: only completions over HTTP are still in flight."""
        evaluation.cancel()
        if self._api is not None:
            is_urgent = self._dispatcher.admission.stop_now.is_set()
            await self._api.finish_completions(0 if is_urgent else self._context.config.rollout.http.drain_timeout_s)

    async def _wait_for_final_evaluation(self, evaluation: asyncio.Task[None]) -> None:
        """Wait for the final evaluation after the end of the run. Raises WaitTimeout."""
        timeout_s = self._context.config.weights.update_timeout_s + 2 * self._context.config.eval.timeout_s
        done, _ = await asyncio.wait([evaluation], timeout=timeout_s)
        if not done:
            raise WaitTimeout(
                f"the evaluation of the final version {self._context.config.steps}",
                timeout_s,
                "Did the trainer end early",
            )
