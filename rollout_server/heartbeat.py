"""Writes this server's state to the run board every second, counts its generated tokens, and notes where its processes
waited for a processor.

It waits for its timer only. The first heartbeat means that the server is ready. The board forgets a server that is
silent for `TTL_S`.
"""

from __future__ import annotations

import asyncio
import os
import time

from async_grpo.telemetry.bottleneck import NOTEWORTHY
from async_grpo.telemetry.contention import ContentionWatch, own_tree
from async_grpo.telemetry.rows import GENERATED_TOKENS
from async_grpo.wire.board import ServerBeat
from rollout_server.context import ServerContext
from rollout_server.dispatch.dispatcher import Dispatcher
from rollout_server.engines.base import EngineLoad
from rollout_server.evaluation.milestones import MilestoneEvaluator
from rollout_server.weight_watcher import WeightWatcher

EVERY_S = 1.0
TTL_S = 5.0
SHORT_WAIT_S = 0.2


class Heartbeat:
    """The heartbeat of one server, and its count of generated tokens."""

    def __init__(
        self,
        context: ServerContext,
        watcher: WeightWatcher,
        dispatcher: Dispatcher,
        evaluator: MilestoneEvaluator,
        *,
        http: str = "",
    ) -> None:
        """`http`: address at which the server answers over HTTP, "" if it does not; it is shown on the board."""
        self._context = context
        self._watcher = watcher
        self._dispatcher = dispatcher
        self._evaluator = evaluator
        self._http = http
        self._counted = self._last_tokens = context.engine.load().generated_tokens  # of the proof
        self._last_s = time.monotonic()
        self._contention = ContentionWatch(own_tree)

    async def run(self) -> None:
        """Send a heartbeat every second, until cancelled."""
        while True:
            await self.beat()
            await asyncio.sleep(EVERY_S)

    async def beat(self) -> None:
        """Send one heartbeat, and count the tokens generated since the last."""
        load = self._context.engine.load()
        now_s = time.monotonic()
        rate = (load.generated_tokens - self._last_tokens) / max(now_s - self._last_s, 1e-3)
        self._last_tokens, self._last_s = load.generated_tokens, now_s
        beat = ServerBeat(
            name=self._context.name,
            pid=os.getpid(),
            version=self._context.engine.version,
            running=load.running,
            waiting=load.waiting,
            tokens_per_s=rate,
            waiting_for=await self._waiting_for(load),
            updates=self._watcher.updates,
            last_pause_s=self._watcher.last_pause_s,
            time_s=time.time(),
            http=self._http,
            logprob_gap=None if self._context.proof is None else self._context.proof.gap_max,
            evaluation=self._evaluator.progress,
        )
        await self._context.board.announce_server(beat, ttl_s=TTL_S)
        await self.count_tokens()
        if (found := self._contention.look()).share >= NOTEWORTHY:  # `why` reads it from the timeline
            self._context.logger.contention(found)

    async def count_tokens(self) -> None:
        """Add the tokens generated for training since the last call, dropped ones included, to the run's counter.

        Pauses while an evaluation generates, whose tokens cannot be told apart until it ends, and catches up then.
        """
        if self._evaluator.busy:
            return
        total = self._context.engine.load().generated_tokens - self._evaluator.tokens
        if total > self._counted:
            await self._context.board.add_to_counter(GENERATED_TOKENS, total - self._counted)
            self._counted = total

    async def _waiting_for(self, load: EngineLoad) -> str:
        """What the engine waits for, as `ServerBeat.waiting_for` shows it; "" if nothing keeps it from being full."""
        if self._watcher.is_asleep:
            return "the trainer's step"
        if not self._dispatcher.admission.is_open:
            return f"admission ({self._dispatcher.admission.state.value})"
        since_s = self._dispatcher.asking_since_s
        if since_s is not None and time.time() - since_s > SHORT_WAIT_S:
            stats = await self._context.buffer.stats()
            if stats.waiting == 0:
                return "tasks"
            return "room under redis.quota_bytes" if stats.is_limited_by_quota else "staleness window"
        return "weights" if len(self._dispatcher.groups) and not load.running + load.waiting else ""
