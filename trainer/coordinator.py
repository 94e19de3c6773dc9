"""How the ranks of the trainer take part in the run: one interface, two roles.

- `Leader`    rank 0: talks to the buffer and the run board, and passes on to the others what it receives
- `Follower`  every other rank: waits for rank 0

What the leader waits for: `take` for P finished groups, `take_part` for one (both come from the rollout servers),
`probe` for a server that has the final weights, `wait_for_evaluation` for one that has measured them. Followers wait
for the leader in a broadcast, which the process group's timeout ends. SIGTERM ends these waits of the leader and
nothing else: a step once begun is finished.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from async_grpo.config import RunConfig
from async_grpo.errors import TrainingError, WaitTimeout
from async_grpo.utils.aio import cancel_and_wait
from async_grpo.wire import Batch, decode, encode
from async_grpo.wire.board import Evaluation, PublisherAddress
from buffer import connect_board, open_run
from buffer.base import ReplayBuffer, Resume, RunBoard
from trainer.distributed import broadcast_bytes, broadcast_ints, is_leader

R = TypeVar("R")
LOOK_EVERY_S = 1.0


class Coordinator(Protocol):
    """What a rank asks of the run. Every rank makes all calls, in the same order."""

    def resume(self, version: int) -> Resume:
        """Take over the run at `version`: a new epoch begins."""
        ...

    def take(self, version: int) -> Batch | None:
        """Take the batch of the step `version` -> `version + 1`; None if the run must stop now."""
        ...

    def take_part(self, version: int, have: int) -> Batch | None:
        """Take further groups of that batch, of which the trainer has `have`; None if the run must stop now."""
        ...

    def set_publisher(self, address: PublisherAddress) -> None:
        """Tell the servers where weights come from."""
        ...

    def publish_version(self, version: int) -> None:
        """Let new tickets carry `version`."""
        ...

    def release(self, batch: Batch) -> None:
        """Release a batch that has been trained and whose weights are published."""
        ...

    def commit_checkpoint(self, version: int) -> None:
        """Let the buffer forget what came before `version`, which is on disk."""
        ...

    def end(self) -> None:
        """Tell the run that every step is trained."""
        ...

    def probe(self, version: int, timeout_s: float) -> Batch | None:
        """Wait for groups that the final version sampled; None if none came in time, or before SIGTERM."""
        ...

    def wait_for_evaluation(self, version: int, timeout_s: float) -> bool:
        """Wait for the evaluation of `version`; whether it was on the board in time, and before SIGTERM."""
        ...

    def evaluations(self) -> list[Evaluation]:
        """All evaluations on the run board; [] on followers."""
        ...

    def close(self) -> None:
        """Close connections."""
        ...


def join_run(config: RunConfig) -> Coordinator:
    """Join the run as leader or follower, whichever this rank is."""
    return Leader(config) if is_leader() else Follower()


class Leader:
    """Rank 0. asyncio runs only inside its calls; the trainer itself is synchronous."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._epoch = 0
        self._runner = asyncio.Runner()
        self._loop = self._runner.get_loop()
        self._stop = asyncio.Event()
        self._buffer: ReplayBuffer
        self._board: RunBoard
        self._buffer, self._board = self._run(self._connect())
        # Wakes the loop if it is waiting; else the event is set when it next runs.
        signal.signal(signal.SIGTERM, lambda *_: self._loop.call_soon_threadsafe(self._stop.set))

    def resume(self, version: int) -> Resume:
        if version > 0 and self._run(self._buffer.stats()).epoch == 0:
            raise TrainingError(
                f"there is a checkpoint of version {version}, but the server knows nothing of run {self._config.name}: "
                "its data were lost, or redis.url names another server. Point redis.url at the old one, or start over "
                "with --fresh"
            )
        resume = self._run(self._buffer.rollback(version))
        self._epoch = resume.epoch
        broadcast_ints([resume.epoch, resume.head_version], 2)
        return resume

    def take(self, version: int) -> Batch | None:
        timeout_s = self._config.trainer.take_timeout_s
        # A take that is given up is no loss: the same groups are delivered when it is asked again.
        batch = self._run(self._or_stop(self._buffer.take(epoch=self._epoch, version=version, timeout_s=timeout_s)))
        broadcast_bytes(encode(batch) if batch is not None else b"")
        return batch

    def take_part(self, version: int, have: int) -> Batch | None:
        timeout_s = self._config.trainer.take_timeout_s
        call = self._buffer.take_part(epoch=self._epoch, version=version, have=have, timeout_s=timeout_s)
        part = self._run(self._or_stop(call))
        broadcast_bytes(encode(part) if part is not None else b"")
        return part

    def set_publisher(self, address: PublisherAddress) -> None:
        self._run(self._board.set_publisher(address))

    def publish_version(self, version: int) -> None:
        self._run(self._buffer.publish_version(epoch=self._epoch, version=version))

    def release(self, batch: Batch) -> None:
        self._run(self._buffer.release(batch))

    def commit_checkpoint(self, version: int) -> None:
        self._run(self._buffer.commit_checkpoint(epoch=self._epoch, version=version))

    def end(self) -> None:
        self._run(self._buffer.end())

    def probe(self, version: int, timeout_s: float) -> Batch | None:
        try:
            probe = self._run(self._or_stop(self._board.probe(version, timeout_s=timeout_s)))
        except WaitTimeout:
            probe = None
        batch = Batch(epoch=self._epoch, version=version, groups=probe.groups) if probe and probe.groups else None
        broadcast_bytes(encode(batch) if batch is not None else b"")
        return batch

    def wait_for_evaluation(self, version: int, timeout_s: float) -> bool:
        try:
            found = self._run(self._or_stop(self._look_for_evaluation(version, timeout_s))) is not None
        except TimeoutError:
            found = False
        broadcast_ints([int(found)], 1)
        return found

    def evaluations(self) -> list[Evaluation]:
        return self._run(self._board.evaluations())

    def close(self) -> None:
        self._run(self._buffer.aclose())
        self._run(self._board.aclose())
        self._runner.close()

    async def _connect(self) -> tuple[ReplayBuffer, RunBoard]:
        config = self._config
        buffer = await open_run(config)
        return buffer, await connect_board(config.redis, config.name)

    async def _look_for_evaluation(self, version: int, timeout_s: float) -> Evaluation:
        """Poll the board once a second, since it notifies nobody. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while True:
                for evaluation in await self._board.evaluations():
                    if evaluation.version >= version:
                        return evaluation
                await asyncio.sleep(LOOK_EVERY_S)

    async def _or_stop(self, call: Coroutine[Any, Any, R]) -> R | None:
        """What the call returns; None after SIGTERM, and then the call is cancelled."""
        calling = asyncio.create_task(call)
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait({calling, stop}, return_when=asyncio.FIRST_COMPLETED)
        stopped = self._stop.is_set()
        await cancel_and_wait(calling, stop)
        return None if stopped else calling.result()

    def _run(self, call: Coroutine[Any, Any, R]) -> R:
        return self._runner.run(call)


class Follower:
    """Ranks other than 0. SIGTERM reaches them too, but the leader decides."""

    def __init__(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def resume(self, version: int) -> Resume:
        epoch, head_version = broadcast_ints(None, 2)
        return Resume(epoch, head_version)

    def take(self, version: int) -> Batch | None:
        return self._shared_batch()

    def take_part(self, version: int, have: int) -> Batch | None:
        return self._shared_batch()

    def set_publisher(self, address: PublisherAddress) -> None: ...

    def publish_version(self, version: int) -> None: ...

    def release(self, batch: Batch) -> None: ...

    def commit_checkpoint(self, version: int) -> None: ...

    def end(self) -> None: ...

    def probe(self, version: int, timeout_s: float) -> Batch | None:
        return self._shared_batch()

    def wait_for_evaluation(self, version: int, timeout_s: float) -> bool:
        (found,) = broadcast_ints(None, 1)
        return bool(found)

    def evaluations(self) -> list[Evaluation]:
        return []

    def close(self) -> None: ...

    @staticmethod
    def _shared_batch() -> Batch | None:
        payload = broadcast_bytes(None)
        return decode(payload, Batch) if payload else None
