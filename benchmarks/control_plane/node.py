"""One process with many virtual rollout servers: `python -m benchmarks.control_plane.node`.

    bench --open, serve, observe, stop, bare--> VirtualServers --NodeReport--> bench

Each server is a real `RolloutServer` with separate connections, heartbeat, leases and weight watcher. A process
represents one machine: its servers share a weight receiver. The parts that are not real are in `replay`.
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
from async_grpo.lab.bench.rig import LineServer
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
    count_bare_groups,
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
    """Measurements of a process's servers during an observation."""

    admit_s: list[float]
    """Seconds per call of `admit_groups`."""
    insert_s: list[float]
    """Seconds per insert."""
    applied: list[tuple[int, float]]
    """Versions that the engines applied, with the time of the monotonic clock."""
    late_s: list[float]
    """Seconds by which each heartbeat was late, relative to the previous one."""
    cpu_s: float
    """CPU seconds of this process."""


class TimedCalls:
    """Wraps an object and records the duration of some of its methods, in one list per method name."""

    def __init__(self, target: Any, **durations_s: list[float]) -> None:
        self._target = target
        self._durations_s = durations_s

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._target, name)
        if name not in self._durations_s:
            return attribute
        return _record_duration(attribute, self._durations_s[name])


def _record_duration(call: Callable[..., Awaitable[Any]], durations_s: list[float]) -> Callable[..., Awaitable[Any]]:
    async def timed_call(*args: Any, **kwargs: Any) -> Any:
        started_s = time.monotonic()
        try:
            return await call(*args, **kwargs)
        finally:
            durations_s.append(time.monotonic() - started_s)

    return timed_call


class TimedBoard(TimedCalls):
    """A run board that records how late each heartbeat of its server is."""

    def __init__(self, board: RunBoard, late_s: list[float]) -> None:
        super().__init__(board)
        self._late_s = late_s
        self._last_s: float | None = None

    async def announce_server(self, *args: Any, **kwargs: Any) -> None:
        """Forward the heartbeat, then record how late it arrived."""
        await self._target.announce_server(*args, **kwargs)
        now_s = time.monotonic()
        if self._last_s is not None:
            self._late_s.append(max(0.0, now_s - self._last_s - heartbeat.INTERVAL_S))
        self._last_s = now_s


class VirtualServers:
    """The virtual servers of this process. Every method `answer_X` answers request X of the bench."""

    def __init__(self) -> None:
        self._servers: list[tuple[AsyncExitStack, RolloutServer]] = []
        self._engines: list[ReplayEngine] = []
        self._admit_s: list[float] = []
        self._insert_s: list[float] = []
        self._late_s: list[float] = []

    async def answer_open(self, plan: dict[str, Any], node: int, servers: int) -> int:
        """Open `servers` servers, a few at a time. Returns when all have their first weights."""
        replay_plan = msgspec.convert(plan, ReplayPlan)
        config = replay_config(replay_plan)
        opening = asyncio.Semaphore(OPENED_AT_ONCE)

        async def open_server(name: str) -> None:
            async with opening:
                await self._open_server(replay_plan, config, name, node)

        async with asyncio.TaskGroup() as group:
            for number in range(servers):
                group.create_task(open_server(f"rollout-{node}-{number}"))
        return servers

    async def answer_serve(self) -> int:
        """Start all servers, spread over SPREAD_S, so that their periodic calls do not coincide."""
        for stack, server in self._servers:
            await asyncio.sleep(SPREAD_S / len(self._servers))
            serving = asyncio.create_task(server.serve())
            stack.push_async_callback(cancel_and_wait, serving)
        return len(self._servers)

    async def answer_observe(self, seconds: float) -> Any:
        """Record statistics for `seconds` seconds."""
        for recorded in (self._admit_s, self._insert_s, self._late_s):
            recorded.clear()
        started_s = time.monotonic()
        cpu_before_s = time.process_time()
        await asyncio.sleep(seconds)

        applied: list[tuple[int, float]] = []
        for engine in self._engines:
            applied += [(version, applied_s) for version, applied_s in engine.applied if applied_s >= started_s]
        cpu_s = time.process_time() - cpu_before_s
        return msgspec.to_builtins(NodeReport(self._admit_s, self._insert_s, applied, self._late_s, cpu_s))

    async def answer_bare(self, plan: dict[str, Any], servers: int, warm_s: float, seconds: float) -> int:
        """Return the number of groups of `servers` engines alone."""
        return await count_bare_groups(msgspec.convert(plan, ReplayPlan), servers, warm_s, seconds)

    async def answer_stop(self) -> None:
        """Stop all servers together. They give their leases back."""
        await asyncio.gather(*(stack.aclose() for stack, _ in self._servers))
        self._servers.clear()
        self._engines.clear()

    async def close(self) -> None:
        """Stop the servers that are still running."""
        await self.answer_stop()

    async def _open_server(self, plan: ReplayPlan, config: RunConfig, name: str, node: int) -> None:
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
        path = store_path(config.name_with_digest, f"node-{node}")
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
        await watcher.wait_for_initial_weights(FIRST_WEIGHTS_S)
        self._servers.append((stack, RolloutServer(context, watcher)))
        self._engines.append(engine)


if __name__ == "__main__":
    configure_logging("node")
    uvloop.run(LineServer().serve(VirtualServers()))
