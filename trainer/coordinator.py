"""The trainer's connection to the run: rank 0 talks to the buffer and the run board, the other ranks to rank 0.

    rank 0 waits in           for                                             produced by
    take_batch                the finished groups of a step                   rollout servers
    take_batch_part           at least one more finished group                rollout servers
    wait_for_probe            groups that the final weights sampled           a rollout server
    wait_for_evaluation       the evaluation of a version on the board        a rollout server
    engines_asleep            engines on these devices to sleep               rollout servers on this machine

The other ranks wait for rank 0 in a broadcast, limited by the timeout of the process group. SIGTERM ends the first four
waits and nothing else: a step that has started is finished. The same four waits end when the publication of weights has
failed (`set_publishing_check`), with its error: servers without new weights produce no groups.
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
from trainer.ranks.distributed import broadcast_batch, broadcast_ints, is_rank_zero, sum_over_ranks

R = TypeVar("R")
Call = Callable[[], Coroutine[Any, Any, R]]

POLL_EVERY_S = 1.0
"""Seconds between two polls of the run board or of the publisher. Neither sends notifications."""


class SharedDevices:
    """Devices that the trainer shares with engines, which generate between its steps (launch.share_devices)."""

    def __init__(self, config: RunConfig, release_memory: Callable[[], None] = lambda: None) -> None:
        """`release_memory`: `Platform.release_memory`, which returns cached memory to the device."""
        self._engines_sleep = config.launch.share_devices == "sleep"
        self._timeout_s = turn_timeout_s(config)
        self._release_memory = release_memory
        self._turn = DeviceTurn(config.run_dir) if self._engines_sleep and is_rank_zero() else None

    @contextmanager
    def engines_asleep(self) -> Iterator[None]:
        """Put engines to sleep for the duration of the block, if devices are shared. All ranks call it.

        An error that leaves the block ends the process, and the operating system then gives up the turn. Raises
        WaitTimeout if an engine does not sleep in time: it may be loading weights, or starting.
        """
        if not self._engines_sleep:
            yield
            return
        if self._turn is not None:
            self._turn.begin_step(self._timeout_s)
        broadcast_ints([0] if is_rank_zero() else None, 1)
        yield

        # Engines need the memory of every rank when they wake up, so rank 0 waits until all have released theirs.
        self._release_memory()
        sum_over_ranks(torch.zeros(1))
        if self._turn is not None:
            self._turn.end_step()


def turn_timeout_s(config: RunConfig) -> float:
    """Maximum seconds until all engines sleep: one may first have to start, or to finish a weight update."""
    return config.weights.update_timeout_s + config.launch.ready_timeout_s


class Coordinator:
    """A rank's access to the run. All ranks make all calls, in the same order.

    asyncio runs only inside the calls of rank 0; the trainer itself is synchronous.
    """

    def __init__(self, config: RunConfig, devices: SharedDevices) -> None:
        self._config = config
        self.devices = devices
        self._epoch = 0
        self._plan = plan_buffer_memory(config)
        self._check_publishing: Callable[[], None] | None = None
        self._is_rank_zero = is_rank_zero()
        if not self._is_rank_zero:
            # A launcher sends SIGTERM to every rank. Rank 0 decides for all: a rank that stopped by itself would leave
            # the others in a collective call.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            return
        self._runner = asyncio.Runner()
        loop = self._runner.get_loop()
        self._stop = asyncio.Event()
        self._buffer: ReplayBuffer = self._runner.run(open_run(config))
        self._board: RunBoard = self._runner.run(connect_board(config.redis, config.name))
        # If the loop is waiting, this wakes it; between calls, the event is set when the loop next runs.
        handler = signal.signal(signal.SIGTERM, lambda *_: loop.call_soon_threadsafe(self._stop.set))
        self._previous_handler = handler

    def resume_run(self, version: int, *, damage: str | None = None, accept_loss: bool = False) -> Resume:
        """Take over the run at `version`, which starts a new epoch.

        `damage`: why `version` is not the newest checkpoint. Raises TrainingError if the run's data are gone, and
        StepsForgotten if the buffer has forgotten groups of steps after `version`, unless `accept_loss`.
        """
        values = None
        if self._is_rank_zero:
            resume = self._runner.run(self._roll_back(version, damage, accept_loss))
            values = [resume.epoch, resume.head_version, resume.lost_steps]
        self._epoch, head_version, lost_steps = broadcast_ints(values, 3)
        return Resume(self._epoch, head_version, lost_steps)

    def take_batch(self, version: int) -> Batch | None:
        """Take the batch of the step `version` -> `version + 1`; None after SIGTERM.

        A take that was interrupted loses nothing: the next one for the same version delivers the same groups.
        """
        timeout_s = self._config.trainer.take_timeout_s
        return self._take_and_broadcast(
            lambda: self._buffer.take_batch(epoch=self._epoch, version=version, timeout_s=timeout_s)
        )

    def take_batch_part(self, version: int, have: int) -> Batch | None:
        """Take further groups of that batch, of which the trainer has `have`; None after SIGTERM."""
        timeout_s = self._config.trainer.take_timeout_s
        return self._take_and_broadcast(
            lambda: self._buffer.take_batch_part(epoch=self._epoch, version=version, have=have, timeout_s=timeout_s)
        )

    def set_publisher(self, address: PublisherAddress) -> None:
        """Announce to the servers where weights come from."""
        self._run_on_rank_zero(lambda: self._board.set_publisher(structs.replace(address, protocol=PROTOCOL)))

    def report_replay(self, version: int, target: int) -> None:
        """Report the progress of replaying the steps up to `target`, the last published version.

        Servers without weights wait until `target` is replayed.
        """
        progress = ReplayProgress(epoch=self._epoch, version=version, target=target)
        self._run_on_rank_zero(lambda: self._board.report_replay(progress))

    def set_publishing_check(self, check: Callable[[], None]) -> None:
        """Call `check` every second while rank 0 waits; an error that it raises ends the wait."""
        self._check_publishing = check

    def publish_version(self, version: int) -> None:
        """Make `version` the one that new tickets carry."""
        self._run_on_rank_zero(lambda: self._buffer.publish_version(epoch=self._epoch, version=version))

    def release_batch(self, batch: Batch) -> None:
        """Release a batch that has been trained and whose weights are published."""
        self._run_on_rank_zero(lambda: self._buffer.release_batch(batch))

    def buffer_stats(self) -> BufferStats | None:
        """Return the buffer's counters; None on ranks other than 0."""
        return self._run_on_rank_zero(lambda: self._buffer.stats())

    def set_staleness(self, staleness: int) -> None:
        """Change the effective S."""
        self._run_on_rank_zero(lambda: self._buffer.set_staleness(epoch=self._epoch, staleness=staleness))

    def commit_checkpoint(self, version: int) -> None:
        """Let the buffer forget the groups of the steps before `version`, which is on disk."""
        self._run_on_rank_zero(lambda: self._buffer.commit_checkpoint(epoch=self._epoch, version=version))

    def has_room(self) -> bool:
        """True if the buffer has room for all groups that may arrive before the next step is trained."""
        has_room = False
        if self._is_rank_zero:
            stats = self.buffer_stats()
            assert stats is not None
            has_room = self._plan.leaves_room(stats.stored_bytes, stats.ready + stats.taken)
        return self._broadcast_decision(has_room)

    def can_train_uncommitted(self) -> bool:
        """True if the buffer has room for the groups of the next step even if nothing is committed before it.

        Under a quota, the buffer stops admitting groups before memory runs out. That is fine as long as the next batch
        can still become complete.
        """
        if self._config.redis.quota_bytes is None:
            return self.has_room()
        stats = self.buffer_stats()
        can_train = True
        if stats is not None and stats.is_limited_by_quota:
            can_train = stats.ready + stats.inflight >= stats.groups_per_step
        return self._broadcast_decision(can_train)

    def end_run(self) -> None:
        """Record in the buffer that every step is trained."""
        self._run_on_rank_zero(lambda: self._buffer.end_run())

    def wait_for_probe(self, version: int, timeout_s: float) -> Batch | None:
        """Wait for groups that the final version sampled; None if none arrived in time, or after SIGTERM."""
        return self._take_and_broadcast(lambda: self._read_probe(version, timeout_s))

    def wait_for_evaluation(self, version: int, timeout_s: float) -> bool:
        """Wait for the evaluation of `version`. Returns False if it did not arrive in time, or after SIGTERM."""
        arrived = self._run_on_rank_zero(lambda: self._run_until_stopped(self._poll_evaluations(version, timeout_s)))
        return self._broadcast_decision(arrived is True)

    def read_evaluations(self) -> list[Evaluation]:
        """Return all evaluations on the run board; [] on ranks other than 0."""
        return self._run_on_rank_zero(lambda: self._board.evaluations()) or []

    def close(self) -> None:
        """Close connections."""
        if not self._is_rank_zero:
            return
        # Our handler needs the event loop. A SIGTERM after its end would raise an error in the main thread.
        signal.signal(signal.SIGTERM, self._previous_handler)
        try:
            self._runner.run(self._buffer.aclose())
        finally:
            self._runner.run(self._board.aclose())
            self._runner.close()

    async def _roll_back(self, version: int, damage: str | None, accept_loss: bool) -> Resume:
        if version > 0 and (await self._buffer.stats()).epoch == 0:
            raise TrainingError(
                f"there is a checkpoint of version {version}, but the server has no data of run {self._config.name}: "
                "they were lost, or redis.url names another server. Set redis.url to the old server, or start over "
                "with --fresh"
            )
        try:
            return await self._buffer.rollback(version, accept_loss=accept_loss)
        except StepsForgotten as error:
            if damage is None:
                raise
            raise StepsForgotten(
                f"{damage}. The newest intact checkpoint is version {version}, but: {error}"
            ) from error

    async def _read_probe(self, version: int, timeout_s: float) -> Batch | None:
        try:
            probe = await self._board.wait_for_probe(version, timeout_s=timeout_s)
        except WaitTimeout:
            return None
        if not probe.groups:
            return None
        return Batch(epoch=self._epoch, version=version, groups=probe.groups)

    async def _poll_evaluations(self, version: int, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    evaluations = await self._board.evaluations()
                    # A server may have skipped `version` and evaluated a newer one.
                    if any(evaluation.version >= version for evaluation in evaluations):
                        return True
                    await asyncio.sleep(POLL_EVERY_S)
        except TimeoutError:
            return False

    def _take_and_broadcast(self, call: Call[Batch | None]) -> Batch | None:
        """Run the call on rank 0 and return its batch on every rank; None after SIGTERM."""
        return broadcast_batch(self._run_on_rank_zero(lambda: self._run_until_stopped(call())))

    def _broadcast_decision(self, value: bool) -> bool:
        """Return rank 0's value on every rank."""
        (decision,) = broadcast_ints([int(value)] if self._is_rank_zero else None, 1)
        return bool(decision)

    def _run_on_rank_zero(self, call: Call[R]) -> R | None:
        """Run the call on rank 0 and return its result; None on the other ranks."""
        return self._runner.run(call()) if self._is_rank_zero else None

    async def _run_until_stopped(self, call: Coroutine[Any, Any, R]) -> R | None:
        """Return the result of the call; cancel it and return None after SIGTERM.

        Raises the error of `set_publishing_check` if the publication of weights has failed meanwhile.
        """
        calling = asyncio.create_task(call)
        stop = asyncio.create_task(self._stop.wait())
        watching = asyncio.create_task(self._poll_publishing())
        await asyncio.wait({calling, stop, watching}, return_when=asyncio.FIRST_COMPLETED)

        # Look at the outcomes before cancelling: cancelled tasks are done, too. SIGTERM comes first, because a
        # publisher that dies of the same shutdown is no fault.
        stopped = self._stop.is_set()
        finished = calling.done()
        failure = watching.exception() if watching.done() else None
        await cancel_and_wait(calling, stop, watching)
        if stopped:
            return None
        if failure is not None and not finished:
            raise failure
        return calling.result()

    async def _poll_publishing(self) -> None:
        """Raise the error of the check of `set_publishing_check`. Polled: a process that dies sends no message."""
        while True:
            await asyncio.sleep(POLL_EVERY_S)
            if self._check_publishing is not None:
                self._check_publishing()
