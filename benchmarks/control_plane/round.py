"""One round: the trainer's end in this process, servers in others, observed for a while; then the engines alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec
import numpy as np
import psutil

import buffer
from async_grpo.app.launch.role_process import find_last_error
from async_grpo.errors import RoleFailed
from async_grpo.lab.bench.rig import LineChild, ask_all
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
WHO = "the servers of the bench"
NODES = 4
OPEN_TIMEOUT_S, TAKE_TIMEOUT_S, MARGIN_S = 300.0, 240.0, 60.0
WARM_COMPLETIONS, WARM_S = 3, 2.0
"""How long the servers come into stride: so many completions of mean length, and so many seconds."""
_TINY = np.zeros(1024, np.float32)


@dataclass(frozen=True, slots=True)
class Look:
    """Counters of the run and its Valkey at one moment."""

    at_s: float
    inserted: int
    commands: int
    redis_cpu_s: float
    trainer_cpu_s: float
    connections: int
    servers: int
    """Servers whose heartbeat the board has."""


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What was seen between two looks."""

    plan: ReplayPlan
    before: Look
    after: Look
    reports: Sequence[NodeReport]
    published_s: Mapping[int, float]
    """When each version was published, by the monotonic clock."""
    bare_per_s: float
    """Groups a second of the same engines alone."""

    @property
    def seconds(self) -> float:
        """Length of the observation."""
        return self.after.at_s - self.before.at_s

    @property
    def groups_per_s(self) -> float:
        """Groups inserted in a second."""
        return (self.after.inserted - self.before.inserted) / self.seconds

    @property
    def applied_s(self) -> list[float]:
        """Seconds from the publication of a version until an engine had it, of all versions and engines."""
        found = (one for report in self.reports for one in report.applied)
        return [at_s - self.published_s[version] for version, at_s in found if version in self.published_s]

    def noted(self, what: str) -> list[float]:
        """The values of a field of all reports."""
        return [value for report in self.reports for value in getattr(report, what)]


class ModelessTrainer:
    """The trainer's end of a run: takes a batch as soon as there is one, and publishes the next version at once."""

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

    async def begin(self) -> None:
        """Publish version 0. All evaluations of the run are there already, so that no server makes any."""
        for version in (0, ENDLESS):
            await self._board.put_evaluation(Evaluation(version=version, prompts=0, samples=0, sampled_accuracy=0.0))
        await self._publish(0)
        await self._board.set_publisher(self._sender.address)

    async def run(self) -> None:
        """Take, publish, release, as long as groups come. Raises WaitTimeout if they stay away."""
        for version in range(ENDLESS):
            batch = await self._state.take_batch(epoch=self._epoch, version=version, timeout_s=TAKE_TIMEOUT_S)
            await self._publish(version + 1)
            await self._state.release_batch(batch)
            await self._state.commit_checkpoint(epoch=self._epoch, version=version + 1)

    async def look(self) -> Look:
        """The counters now."""
        about = await self._link.call(self._link.client.info)
        return Look(
            at_s=time.monotonic(),
            inserted=(await self._state.stats()).inserted,
            commands=about["total_commands_processed"],
            redis_cpu_s=about["used_cpu_user"] + about["used_cpu_sys"],
            trainer_cpu_s=sum(sum(process.cpu_times()[:2]) for process in self._processes),
            connections=about["connected_clients"],
            servers=len(await self._board.live_servers()),
        )

    async def _publish(self, version: int) -> None:
        self._sender.publish_weights(version, [("weight", _TINY)])
        self.published_s[version] = time.monotonic()
        await self._state.publish_version(epoch=self._epoch, version=version)


async def play_round(plan: ReplayPlan, seconds: float) -> RoundResult:
    """Start the servers, let them come into stride and observe them; then the engines alone. Raises RoleFailed,
    WaitTimeout, BufferFault."""
    warm_s = WARM_COMPLETIONS * plan.completion_s + WARM_S
    told = msgspec.to_builtins(plan)
    shares = [len(part) for part in np.array_split(range(plan.servers), NODES) if len(part)]
    path = Path(plan.folder) / "servers.log"
    with path.open("w") as log, _with_the_reason(path):
        async with _nodes(len(shares), log) as nodes:
            async with _trainer(plan) as trainer:
                about = {"ask": "open", "plan": told}
                opened = [{**about, "node": number, "servers": share} for number, share in enumerate(shares)]
                await ask_all(WHO, nodes, opened, OPEN_TIMEOUT_S)
                await ask_all(WHO, nodes, [{"ask": "serve"}] * len(nodes), MARGIN_S)
                await asyncio.sleep(warm_s)
                before = await trainer.look()
                observed = await ask_all(
                    WHO, nodes, [{"ask": "observe", "seconds": seconds}] * len(nodes), seconds + MARGIN_S
                )
                after = await trainer.look()
                await ask_all(WHO, nodes, [{"ask": "stop"}] * len(nodes), MARGIN_S)
            about = {"ask": "bare", "plan": told, "warm_s": warm_s, "seconds": seconds}
            bare = await ask_all(
                WHO, nodes, [{**about, "servers": share} for share in shares], warm_s + seconds + MARGIN_S
            )
    reports = [msgspec.convert(one, NodeReport) for one in observed]
    return RoundResult(plan, before, after, reports, trainer.published_s, sum(bare) / seconds)


@contextmanager
def _with_the_reason(log: Path) -> Iterator[None]:
    """Add what a process wrote last to the error that it has ended."""
    try:
        yield
    except RoleFailed as error:
        raise RoleFailed(f"{error}: {find_last_error(log)}") from error


@asynccontextmanager
async def _nodes(count: int, log: IO[str]) -> AsyncIterator[list[LineChild]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(LineChild(MODULE, stderr=log)) for _ in range(count)]


@asynccontextmanager
async def _trainer(plan: ReplayPlan) -> AsyncIterator[ModelessTrainer]:
    """The trainer's end, at work for the length of the block."""
    config = replay_config(plan)
    layout = make_layout([("weight", "float32", list(_TINY.shape))])
    async with AsyncExitStack() as stack:
        state = await buffer.open_run(config)
        stack.push_async_callback(state.aclose)
        board = await buffer.connect_board(config.redis, config.name)
        stack.push_async_callback(board.aclose)
        link = RetryingClient(make_client(config.redis, config.name), config.redis.timeout_s)
        stack.push_async_callback(link.aclose)
        stack.callback(remove_stores, config.local_name)
        epoch = (await state.rollback(0)).epoch
        sender = ZmqWeightSender(layout, config.local_name, epoch, config.weights)
        stack.callback(sender.close)
        trainer = ModelessTrainer(state, board, link, sender, epoch)
        await trainer.begin()
        working = asyncio.create_task(trainer.run())
        stack.push_async_callback(cancel_and_wait, working)
        yield trainer
        if working.done():
            working.result()
