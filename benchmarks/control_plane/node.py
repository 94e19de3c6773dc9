"""One process with many virtual rollout servers: `python -m benchmarks.control_plane.node`.

    bench --open, serve, observe, stop, bare--> VirtualServers --NodeReport--> bench

A server is a real `RolloutServer` with connections, heartbeat, leases and weight watcher of its own. The servers of a
process are those of one machine: they share a receiver of weights. What is not real: `replay`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, cast

import msgspec
import uvloop

import buffer
from async_grpo.config import RunConfig
from async_grpo.lab.bench.rig import AnswerLines
from async_grpo.rewards.pool import RewardPool
from async_grpo.telemetry.logging import configure_logging
from async_grpo.utils.aio import cancel_and_wait
from async_grpo.weights.node.receiver import SharedWeightReceiver
from async_grpo.weights.shared_memory import store_path
from benchmarks.control_plane.replay import (
    SPREAD_S,
    EqualVerdicts,
    ReplayEngine,
    ReplayPlan,
    ReplaySource,
    ReplayWorkflow,
    bare_groups,
    replay_config,
)
from buffer.base import ReplayBuffer, RunBoard
from rollout_server import heartbeat
from rollout_server.context import ServerContext
from rollout_server.run_logger import RolloutLogger
from rollout_server.server import RolloutServer
from rollout_server.weight_watcher import WeightWatcher

FIRST_WEIGHTS_S = 120.0
OPENED_AT_ONCE = 8


class NodeReport(msgspec.Struct, frozen=True):
    """What the servers of a process saw during an observation."""

    admit_s: list[float]
    """Seconds of every call of `admit_groups`."""
    insert_s: list[float]
    """Seconds of every insert."""
    applied: list[tuple[int, float]]
    """Versions that the engines took, with the time of the monotonic clock."""
    late_s: list[float]
    """By how much every heartbeat came later than a second after the one before."""
    cpu_s: float
    """CPU seconds of this process."""


class TimedCalls:
    """An object whose calls are timed: the seconds of those named are appended to the lists given for them."""

    def __init__(self, target: Any, **lists: list[float]) -> None:
        self._target = target
        self._lists = lists

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        return _timed(found, self._lists[name]) if name in self._lists else found


def _timed(call: Callable[..., Awaitable[Any]], seconds: list[float]) -> Callable[..., Awaitable[Any]]:
    async def timed(*args: Any, **kwargs: Any) -> Any:
        started_s = time.monotonic()
        try:
            return await call(*args, **kwargs)
        finally:
            seconds.append(time.monotonic() - started_s)

    return timed


class TimedBoard(TimedCalls):
    """A board that notes how late each heartbeat of its server is."""

    def __init__(self, board: RunBoard, late_s: list[float]) -> None:
        super().__init__(board)
        self._late_s = late_s
        self._last_s: float | None = None

    async def announce_server(self, *args: Any, **kwargs: Any) -> None:
        """Pass the heartbeat on, then note when it had arrived."""
        await self._target.announce_server(*args, **kwargs)
        now_s = time.monotonic()
        if self._last_s is not None:
            self._late_s.append(max(0.0, now_s - self._last_s - heartbeat.EVERY_S))
        self._last_s = now_s


class VirtualServers:
    """The virtual servers of this process."""

    def __init__(self) -> None:
        self._servers: list[tuple[AsyncExitStack, RolloutServer]] = []
        self._engines: list[ReplayEngine] = []
        self._admit_s: list[float] = []
        self._insert_s: list[float] = []
        self._late_s: list[float] = []

    async def answer_open(self, plan: dict[str, Any], node: int, servers: int) -> int:
        """Open so many servers, a few at a time; returns when all have their first weights."""
        told = msgspec.convert(plan, ReplayPlan)
        config, turns = replay_config(told), asyncio.Semaphore(OPENED_AT_ONCE)

        async def start(name: str) -> None:
            async with turns:
                await self._open(told, config, name, node)

        async with asyncio.TaskGroup() as starting:
            for number in range(servers):
                starting.create_task(start(f"rollout-{node}-{number}"))
        return servers

    async def answer_serve(self) -> int:
        """Let all of them serve, one after another for SPREAD_S, so that they do not act at the same moments."""
        for stack, server in self._servers:
            await asyncio.sleep(SPREAD_S / len(self._servers))
            serving = asyncio.create_task(server.serve())
            stack.push_async_callback(cancel_and_wait, serving)
        return len(self._servers)

    async def answer_observe(self, seconds: float) -> Any:
        """Note for so long what happens."""
        for noted in (self._admit_s, self._insert_s, self._late_s):
            noted.clear()
        since_s, cpu_s = time.monotonic(), time.process_time()
        await asyncio.sleep(seconds)
        applied = [one for engine in self._engines for one in engine.applied if one[1] >= since_s]
        spent_s = time.process_time() - cpu_s
        return msgspec.to_builtins(NodeReport(self._admit_s, self._insert_s, applied, self._late_s, spent_s))

    async def answer_bare(self, plan: dict[str, Any], servers: int, warm_s: float, seconds: float) -> int:
        """Groups of so many engines alone."""
        return await bare_groups(msgspec.convert(plan, ReplayPlan), servers, warm_s, seconds)

    async def answer_stop(self) -> None:
        """End all servers at the same time; what they hold is given back."""
        await asyncio.gather(*(stack.aclose() for stack, _ in self._servers))
        self._servers.clear()
        self._engines.clear()

    async def close(self) -> None:
        """End what still runs."""
        await self.answer_stop()

    async def _open(self, plan: ReplayPlan, config: RunConfig, name: str, node: int) -> None:
        stack = AsyncExitStack()
        state = await buffer.open_run(config)
        stack.push_async_callback(state.aclose)
        board = await buffer.connect_board(config.redis, config.name)
        stack.push_async_callback(board.aclose)
        engine = ReplayEngine(plan)
        await engine.start()
        logger = RolloutLogger(config.run_dir, name, samples_every=config.telemetry.samples_every)
        stack.callback(logger.close)
        context = ServerContext(
            config=config,
            name=name,
            engine=engine,
            pool=cast(RewardPool, EqualVerdicts()),
            workflow=ReplayWorkflow(),
            source=ReplaySource(),
            buffer=cast(ReplayBuffer, TimedCalls(state, admit_groups=self._admit_s, insert_group=self._insert_s)),
            board=cast(RunBoard, TimedBoard(board, self._late_s)),
            logger=logger,
        )
        path = store_path(config.local_name, f"node-{node}")
        receiver = SharedWeightReceiver(board.publisher_address, path, config.weights, name=name)
        stack.push_async_callback(receiver.close)
        watcher = WeightWatcher(
            receiver,
            engine,
            interruption=config.rollout.interruption,
            update_timeout_s=config.weights.update_timeout_s,
            board=board,
            logger=logger,
        )
        await watcher.first(FIRST_WEIGHTS_S)
        self._servers.append((stack, RolloutServer(context, watcher)))
        self._engines.append(engine)


if __name__ == "__main__":
    configure_logging("node")
    uvloop.run(AnswerLines().serve(VirtualServers()))
