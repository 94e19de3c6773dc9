"""One round: a trainer without a model in this process and servers in others, observed; then the engines alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import psutil

import buffer
from async_grpo.app.launch.role_process import find_last_error
from async_grpo.errors import RoleFailed
from async_grpo.lab.bench.rig import LineChild, request_all
from async_grpo.utils.aio import cancel_and_wait
from async_grpo.weights.manifest import make_layout
from async_grpo.weights.shared_memory import remove_stores
from async_grpo.weights.zmq.sender import ZmqWeightSender
from async_grpo.wire.board import Evaluation
from benchmarks.control_plane.node import NodeReport
from benchmarks.control_plane.replay import ENDLESS, ReplayPlan, replay_config
from buffer.base import ReplayBuffer, RunBoard
from buffer.redis.client import make_client
from buffer.redis.retrying import RetryingClient

MODULE = "benchmarks.control_plane.node"
NODE_NAME = "the servers of the bench"
NODES = 4
OPEN_TIMEOUT_S = 300.0
TAKE_TIMEOUT_S = 240.0
MARGIN_S = 60.0
WARM_COMPLETIONS = 3
"""Warm-up before the observation: number of completions of mean length."""
WARM_S = 2.0
"""Seconds of warm-up in addition to these."""
_TINY = np.zeros(1024, np.float32)


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters of the run and its Valkey at one moment."""

    at_s: float
    inserted: int
    commands: int
    redis_cpu_s: float
    trainer_cpu_s: float
    connections: int
    servers: int
    """Servers with a current heartbeat on the run board."""


@dataclass(frozen=True, slots=True)
class RoundResult:
    """Measurements of one round."""

    plan: ReplayPlan
    before: Counters
    after: Counters
    reports: Sequence[NodeReport]
    published_s: Mapping[int, float]
    """Publication time of each version, by the monotonic clock."""
    bare_per_s: float
    """Groups per second of the same engines alone."""

    @property
    def seconds(self) -> float:
        """Length of the observation."""
        return self.after.at_s - self.before.at_s

    @property
    def groups_per_s(self) -> float:
        """Groups inserted per second."""
        return (self.after.inserted - self.before.inserted) / self.seconds

    @property
    def applied_s(self) -> list[float]:
        """Seconds from publishing a version until an engine applied it, for all versions and engines."""
        delays_s: list[float] = []
        for report in self.reports:
            for version, applied_s in report.applied:
                if version in self.published_s:
                    delays_s.append(applied_s - self.published_s[version])
        return delays_s

    def collect(self, field: str) -> list[float]:
        """Return the values of a list field of all reports."""
        return [value for report in self.reports for value in getattr(report, field)]


class ModelessTrainer:
    """A trainer without a model: takes a batch as soon as there is one, and immediately publishes the next version."""

    def __init__(
        self, state: ReplayBuffer, board: RunBoard, link: RetryingClient, sender: ZmqWeightSender, epoch: int
    ) -> None:
        self.published_s: dict[int, float] = {}
        self._state = state
        self._link = link
        self._board = board
        self._sender = sender
        self._epoch = epoch
        self._processes = [psutil.Process(), psutil.Process(sender.process_id)]

    async def start(self) -> None:
        """Publish version 0."""
        # Store all evaluations of the run in advance, so that no server spends time on one.
        for version in (0, ENDLESS):
            await self._board.put_evaluation(Evaluation(version=version, prompts=0, samples=0, sampled_accuracy=0.0))
        await self._publish(0)
        await self._board.set_publisher(self._sender.address)

    async def run(self) -> None:
        """Take, publish and release batches until cancelled. Raises WaitTimeout if no groups arrive."""
        for version in range(ENDLESS):
            batch = await self._state.take_batch(epoch=self._epoch, version=version, timeout_s=TAKE_TIMEOUT_S)
            await self._publish(version + 1)
            await self._state.release_batch(batch)
            await self._state.commit_checkpoint(epoch=self._epoch, version=version + 1)

    async def read_counters(self) -> Counters:
        """Read all counters."""
        info = await self._link.call(self._link.client.info)
        return Counters(
            at_s=time.monotonic(),
            inserted=(await self._state.stats()).inserted,
            commands=info["total_commands_processed"],
            redis_cpu_s=info["used_cpu_user"] + info["used_cpu_sys"],
            trainer_cpu_s=sum(sum(process.cpu_times()[:2]) for process in self._processes),
            connections=info["connected_clients"],
            servers=len(await self._board.live_servers()),
        )

    async def _publish(self, version: int) -> None:
        self._sender.publish_weights(version, [("weight", _TINY)])
        self.published_s[version] = time.monotonic()
        await self._state.publish_version(epoch=self._epoch, version=version)


async def run_round(plan: ReplayPlan, seconds: float) -> RoundResult:
    """Start the servers, warm up, observe them for `seconds`; then run the engines alone.

    Raises RoleFailed, WaitTimeout, BufferFault.
    """
    warm_s = WARM_COMPLETIONS * plan.completion_s + WARM_S
    packed_plan = msgspec.to_builtins(plan)
    servers_per_node = [len(part) for part in np.array_split(range(plan.servers), NODES) if len(part)]

    log_path = Path(plan.folder) / "servers.log"
    with log_path.open("w") as log, _add_last_log_line(log_path):
        async with _start_nodes(len(servers_per_node), log) as nodes:
            async with _start_trainer(plan) as trainer:
                opens: list[dict[str, Any]] = []
                for node, servers in enumerate(servers_per_node):
                    opens.append({"ask": "open", "plan": packed_plan, "node": node, "servers": servers})
                await request_all(NODE_NAME, nodes, opens, OPEN_TIMEOUT_S)
                await request_all(NODE_NAME, nodes, [{"ask": "serve"}] * len(nodes), MARGIN_S)
                await asyncio.sleep(warm_s)

                before = await trainer.read_counters()
                observe = {"ask": "observe", "seconds": seconds}
                observed = await request_all(NODE_NAME, nodes, [observe] * len(nodes), seconds + MARGIN_S)
                after = await trainer.read_counters()
                await request_all(NODE_NAME, nodes, [{"ask": "stop"}] * len(nodes), MARGIN_S)

            # The engines alone run after the trainer has stopped, on the same processes and cores.
            bares: list[dict[str, Any]] = []
            for servers in servers_per_node:
                bares.append(
                    {"ask": "bare", "plan": packed_plan, "warm_s": warm_s, "seconds": seconds, "servers": servers}
                )
            bare_groups = await request_all(NODE_NAME, nodes, bares, warm_s + seconds + MARGIN_S)

    reports = [msgspec.convert(report, NodeReport) for report in observed]
    return RoundResult(plan, before, after, reports, trainer.published_s, sum(bare_groups) / seconds)


@contextmanager
def _add_last_log_line(log: Path) -> Iterator[None]:
    """Add the last error in the log to the RoleFailed of a process that has ended."""
    try:
        yield
    except RoleFailed as error:
        raise RoleFailed(f"{error}: {find_last_error(log)}") from error


@asynccontextmanager
async def _start_nodes(count: int, log: IO[str]) -> AsyncIterator[list[LineChild]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(LineChild(MODULE, stderr=log)) for _ in range(count)]


@asynccontextmanager
async def _start_trainer(plan: ReplayPlan) -> AsyncIterator[ModelessTrainer]:
    """Run a trainer for the length of the block."""
    config = replay_config(plan)
    layout = make_layout([("weight", "float32", list(_TINY.shape))])
    async with AsyncExitStack() as stack:
        state = await buffer.open_run(config)
        stack.push_async_callback(state.aclose)
        board = await buffer.connect_board(config.redis, config.name)
        stack.push_async_callback(board.aclose)
        link = RetryingClient(make_client(config.redis, config.name), config.redis.timeout_s)
        stack.push_async_callback(link.aclose)
        stack.callback(remove_stores, config.name_with_digest)
        epoch = (await state.rollback(0)).epoch
        sender = ZmqWeightSender(layout, config.name_with_digest, epoch, config.weights)
        stack.callback(sender.close)
        trainer = ModelessTrainer(state, board, link, sender, epoch)
        await trainer.start()
        task = asyncio.create_task(trainer.run())
        stack.push_async_callback(cancel_and_wait, task)
        yield trainer
        if task.done():
            task.result()  # raise its error
