"""How the ranks of the trainer take part in the run: rank 0 talks to the buffer and the run board, the others to it.

What rank 0 waits for: `take_batch` for P finished groups, `take_batch_part` for one (both come from the rollout
servers), `probe` for a server that has the final weights, `wait_for_evaluation` for one that has measured them,
`SharedDevices.held` for engines to sleep. The other ranks wait for rank 0 in a broadcast, which the process group's
timeout ends. SIGTERM ends these waits of rank 0, but not that for engines, and nothing else: a step once begun is
finished. A publication that has failed (`watch_publishing`) ends them with its error: servers without new weights make
no groups to wait for.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from msgspec import structs

from async_grpo.config import RunConfig
from async_grpo.errors import StepsForgotten, TrainingError, WaitTimeout
from async_grpo.utils.aio import cancel_and_wait
from async_grpo.utils.files import DeviceTurn
from async_grpo.wire import Batch
from async_grpo.wire.board import PROTOCOL, Evaluation, PublisherAddress, ReplayProgress
from buffer import connect_board, open_run
from buffer.base import BufferStats, ReplayBuffer, Resume, RunBoard
from buffer.capacity import plan_buffer_memory
from trainer.ranks.distributed import broadcast_batch, broadcast_ints, is_leader, sum_over_ranks

R = TypeVar("R")
Call = Callable[[], Coroutine[Any, Any, R]]

LOOK_EVERY_S = 1.0
"""Seconds between two looks at the run board, which notifies nobody."""


class SharedDevices:
    """The trainer's devices, on which engines of this machine may generate between steps (launch.share_devices)."""

    def __init__(self, config: RunConfig, release_memory: Callable[[], None] = lambda: None) -> None:
        """`release_memory`: of the platform."""
        self._engines_sleep = config.launch.share_devices == "sleep"
        self._timeout_s = turn_timeout_s(config)
        self._release_memory = release_memory
        self._turn = DeviceTurn(config.run_dir) if self._engines_sleep and is_leader() else None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Engines sleep for the length of the block, if they are to; all ranks call it.

        An error that leaves the block ends the process, and with it the turn. Raises WaitTimeout if engines do not
        sleep: one may be loading weights, or starting.
        """
        if not self._engines_sleep:
            yield
            return
        if self._turn is not None:
            self._turn.begin_step(self._timeout_s)
        broadcast_ints([0] if is_leader() else None, 1)
        yield
        self._release_memory()
        sum_over_ranks(torch.zeros(1))  # all ranks have released theirs
        if self._turn is not None:
            self._turn.end_step()


def _stored(stats: BufferStats | None) -> tuple[int, int]:
    """Bytes of all payloads, and the number of active groups that they belong to."""
    assert stats is not None, "rank 0 has them"
    return stats.stored_bytes, stats.ready + stats.taken


def turn_timeout_s(config: RunConfig) -> float:
    """Seconds in which every engine sleeps: one that starts does so once it is ready, and no update takes longer."""
    return config.weights.update_timeout_s + config.launch.ready_timeout_s


class Coordinator:
    """What a rank asks of the run. Every rank makes all calls, in the same order.

    asyncio runs only inside the calls of rank 0; the trainer itself is synchronous.
    """

    def __init__(self, config: RunConfig, devices: SharedDevices) -> None:
        self._config = config
        self.devices = devices
        self._epoch = 0
        self._plan = plan_buffer_memory(config)
        self._check_publishing: Callable[[], None] | None = None
        self._leads = is_leader()
        if not self._leads:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it reaches every rank, but rank 0 decides
            return
        self._runner = asyncio.Runner()
        loop, self._stop = self._runner.get_loop(), asyncio.Event()
        self._buffer: ReplayBuffer = self._runner.run(open_run(config))
        self._board: RunBoard = self._runner.run(connect_board(config.redis, config.name))
        # Wakes the loop if it is waiting; else the event is set when it next runs.
        signal.signal(signal.SIGTERM, lambda *_: loop.call_soon_threadsafe(self._stop.set))

    def resume(self, version: int, *, damage: str = "", accept_loss: bool = False) -> Resume:
        """Take over the run at `version`: a new epoch begins. `damage`: why it is not that of the newest checkpoint.

        Raises TrainingError if the run's data are gone, and StepsForgotten if only those of the steps after `version`
        are, unless `accept_loss`.
        """
        found = self._runner.run(self._roll_back(version, damage, accept_loss)) if self._leads else None
        values = [found.epoch, found.head_version, found.lost_steps] if found else None
        self._epoch, head_version, lost_steps = broadcast_ints(values, 3)
        return Resume(self._epoch, head_version, lost_steps)

    def take(self, version: int) -> Batch | None:
        """Take the batch of the step `version` -> `version + 1`; None if the run must stop now."""
        timeout_s = self._config.trainer.take_timeout_s
        # A take that is given up is no loss: the same groups are delivered when it is asked again.
        return self._shared(lambda: self._buffer.take_batch(epoch=self._epoch, version=version, timeout_s=timeout_s))

    def take_part(self, version: int, have: int) -> Batch | None:
        """Take further groups of that batch, of which the trainer has `have`; None if the run must stop now."""
        timeout_s = self._config.trainer.take_timeout_s
        return self._shared(
            lambda: self._buffer.take_batch_part(epoch=self._epoch, version=version, have=have, timeout_s=timeout_s)
        )

    def set_publisher(self, address: PublisherAddress) -> None:
        """Tell the servers where weights come from."""
        self._lead(lambda: self._board.set_publisher(structs.replace(address, protocol=PROTOCOL)))

    def report_replay(self, version: int, target: int) -> None:
        """Tell servers without weights how far the steps are repeated that were published before, up to `target`."""
        self._lead(lambda: self._board.report_replay(ReplayProgress(epoch=self._epoch, version=version, target=target)))

    def watch_publishing(self, check: Callable[[], None]) -> None:
        """Call `check` every second while rank 0 waits; what it raises ends the wait."""
        self._check_publishing = check

    def publish_version(self, version: int) -> None:
        """Let new tickets carry `version`."""
        self._lead(lambda: self._buffer.publish_version(epoch=self._epoch, version=version))

    def release(self, batch: Batch) -> None:
        """Release a batch that has been trained and whose weights are published."""
        self._lead(lambda: self._buffer.release_batch(batch))

    def buffer_stats(self) -> BufferStats | None:
        """The buffer's counters; None on ranks other than 0."""
        return self._lead(lambda: self._buffer.stats())

    def set_staleness(self, staleness: int) -> None:
        """Change the effective S."""
        self._lead(lambda: self._buffer.set_staleness(epoch=self._epoch, staleness=staleness))

    def commit_checkpoint(self, version: int) -> None:
        """Let the buffer forget what came before `version`, which is on disk."""
        self._lead(lambda: self._buffer.commit_checkpoint(epoch=self._epoch, version=version))

    def has_room(self) -> bool:
        """True if the buffer has room for all groups that may come before the next step is trained; on every rank."""
        room = self._leads and self._plan.leaves_room(*_stored(self.buffer_stats()))
        return self._agree(room)

    def can_go_on_uncommitted(self) -> bool:
        """True if the buffer has room for the next step though nothing is committed; on every rank.

        Under a quota, new groups are held back before memory runs out, so that only a batch that cannot become complete
        any more ends the run.
        """
        if self._config.redis.quota_bytes is None:
            return self.has_room()
        stats = self.buffer_stats()
        starved = (
            stats is not None and stats.is_limited_by_quota and stats.ready + stats.inflight < stats.groups_per_step
        )
        return self._agree(not starved)

    def end(self) -> None:
        """Tell the run that every step is trained."""
        self._lead(lambda: self._buffer.end_run())

    def probe(self, version: int, timeout_s: float) -> Batch | None:
        """Wait for groups that the final version sampled; None if none came in time, or before SIGTERM."""
        return self._shared(lambda: self._find_probe(version, timeout_s))

    def wait_for_evaluation(self, version: int, timeout_s: float) -> bool:
        """Wait for the evaluation of `version`; whether it was on the board in time, and before SIGTERM."""
        found = self._lead(lambda: self._or_stop(self._look_for_evaluation(version, timeout_s)))
        (in_time,) = broadcast_ints([int(found is True)] if self._leads else None, 1)
        return bool(in_time)

    def evaluations(self) -> list[Evaluation]:
        """All evaluations on the run board; [] on ranks other than 0."""
        return self._lead(lambda: self._board.evaluations()) or []

    def close(self) -> None:
        """Close connections."""
        self._lead(lambda: self._buffer.aclose())
        self._lead(lambda: self._board.aclose())
        if self._leads:
            self._runner.close()

    async def _roll_back(self, version: int, damage: str, accept_loss: bool) -> Resume:
        if version > 0 and (await self._buffer.stats()).epoch == 0:
            raise TrainingError(
                f"there is a checkpoint of version {version}, but the server knows nothing of run {self._config.name}: "
                "its data were lost, or redis.url names another server. Point redis.url at the old one, or start over "
                "with --fresh"
            )
        try:
            return await self._buffer.rollback(version, accept_loss=accept_loss)
        except StepsForgotten as error:
            if not damage:
                raise
            raise StepsForgotten(f"{damage}. Before it there is version {version}, but: {error}") from error

    async def _find_probe(self, version: int, timeout_s: float) -> Batch | None:
        try:
            probe = await self._board.wait_for_probe(version, timeout_s=timeout_s)
        except WaitTimeout:
            return None
        return Batch(epoch=self._epoch, version=version, groups=probe.groups) if probe.groups else None

    async def _look_for_evaluation(self, version: int, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                while all(each.version < version for each in await self._board.evaluations()):  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_EVERY_S)
        except TimeoutError:
            return False
        return True

    def _shared(self, call: Call[Batch | None]) -> Batch | None:
        """The batch that rank 0 receives, on every rank; None if there is none, or after SIGTERM."""
        return broadcast_batch(self._lead(lambda: self._or_stop(call())))

    def _agree(self, value: bool) -> bool:
        """Rank 0's value, on every rank."""
        (shared,) = broadcast_ints([int(value)] if self._leads else None, 1)
        return bool(shared)

    def _lead(self, call: Call[R]) -> R | None:
        """What the call returns on rank 0; None on the others, which do not make it."""
        return self._runner.run(call()) if self._leads else None

    async def _or_stop(self, call: Coroutine[Any, Any, R]) -> R | None:
        """What the call returns; None after SIGTERM, and then the call is cancelled. Raises what ended the publication
        of weights."""
        calling = asyncio.create_task(call)
        stop = asyncio.create_task(self._stop.wait())
        watching = asyncio.create_task(self._watch_publishing())
        await asyncio.wait({calling, stop, watching}, return_when=asyncio.FIRST_COMPLETED)
        stopped, finished = self._stop.is_set(), calling.done()
        failure = watching.exception() if watching.done() else None
        await cancel_and_wait(calling, stop, watching)
        if stopped:
            return None
        if failure is not None and not finished:
            raise failure
        return calling.result()

    async def _watch_publishing(self) -> None:
        """Raise what the check of `watch_publishing` raises. We poll: a process that dies notifies nobody."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if self._check_publishing is not None:
                self._check_publishing()
