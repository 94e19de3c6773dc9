"""Writes this server's state to the run board every second, and counts its generated tokens.

It also records in the timeline when the server's processes waited for a processor. It waits for its timer only. The
first heartbeat means that the server is ready. The board drops a server that is silent for `TTL_S`.
"""

from __future__ import annotations

import asyncio
import os
import time

from async_grpo.telemetry.bottleneck import NOTEWORTHY
from async_grpo.telemetry.contention import ContentionWatch, own_process_tree
from async_grpo.telemetry.rows import GENERATED_TOKENS
from async_grpo.wire.board import ServerBeat
from rollout_server.context import ServerContext
from rollout_server.dispatch.dispatcher import Dispatcher
from rollout_server.engines.base import EngineLoad
from rollout_server.evaluation.milestones import MilestoneEvaluator
from rollout_server.weight_watcher import WeightWatcher

INTERVAL_S = 1.0
TTL_S = 5.0
MIN_REPORTED_WAIT_S = 0.2
"""Waits for a ticket shorter than this are not reported."""


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
        """`http`: the server's HTTP address for the board, "" if it has none."""
        self._context = context
        self._watcher = watcher
        self._dispatcher = dispatcher
        self._evaluator = evaluator
        self._http = http
        # The engine has already generated the tokens of its log-probability proof, which do not count.
        tokens = context.engine.load().generated_tokens
        self._counted = tokens
        self._last_tokens = tokens
        self._last_s = time.monotonic()
        self._contention = ContentionWatch(own_process_tree)

    async def run_sending(self) -> None:
        """Send a heartbeat every second, until cancelled."""
        while True:
            await self.send_heartbeat()
            await asyncio.sleep(INTERVAL_S)

    async def send_heartbeat(self) -> None:
        """Send one heartbeat, and count the tokens generated since the last."""
        load = self._context.engine.load()
        now_s = time.monotonic()
        tokens_per_s = (load.generated_tokens - self._last_tokens) / max(now_s - self._last_s, 1e-3)
        self._last_tokens = load.generated_tokens
        self._last_s = now_s

        proof = self._context.proof
        beat = ServerBeat(
            name=self._context.name,
            pid=os.getpid(),
            version=self._context.engine.version,
            running=load.running,
            waiting=load.waiting,
            tokens_per_s=tokens_per_s,
            waiting_for=await self._waiting_for(load),
            updates=self._watcher.updates,
            last_pause_s=self._watcher.last_pause_s,
            time_s=time.time(),
            http=self._http,
            logprob_gap=None if proof is None else proof.gap_max,
            evaluation=self._evaluator.progress,
        )
        await self._context.board.announce_server(beat, ttl_s=TTL_S)
        await self.count_tokens()

        contention = self._contention.measure()
        if contention.share >= NOTEWORTHY:  # the command `why` reads it from the timeline
            self._context.logger.record_contention(contention)

    async def count_tokens(self) -> None:
        """Add the tokens generated for training since the last call, including dropped ones, to the run's counter."""
        # Until an evaluation ends, its tokens cannot be told from those for training. The first call after it catches
        # up.
        if self._evaluator.is_evaluating:
            return
        total = self._context.engine.load().generated_tokens - self._evaluator.tokens
        if total > self._counted:
            await self._context.board.add_to_counter(GENERATED_TOKENS, total - self._counted)
            self._counted = total

    async def _waiting_for(self, load: EngineLoad) -> str:
        """The engine's bottleneck, for `ServerBeat.waiting_for`; "" if nothing keeps the engine from being full."""
        if self._watcher.is_asleep:
            return "the trainer's step"
        if not self._dispatcher.admission.is_open:
            return f"admission ({self._dispatcher.admission.state.value})"

        since_s = self._dispatcher.ticket_wait_since_s
        if since_s is not None and time.time() - since_s > MIN_REPORTED_WAIT_S:
            stats = await self._context.buffer.stats()
            if stats.waiting == 0:
                return "tasks"
            if stats.is_limited_by_quota:
                return "room under redis.quota_bytes"
            return "staleness window"

        # Groups but no requests in the engine: they wait for weights of their tickets' versions.
        has_requests = load.running + load.waiting > 0
        if len(self._dispatcher.groups) and not has_requests:
            return "weights"
        return ""
