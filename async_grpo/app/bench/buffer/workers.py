"""Producer and consumer processes of the bench: `python -m async_grpo.app.bench.buffer.workers`, and their starter.

A worker process is started once. It waits for jobs on its standard input, one after the other, and ends when that
closes. Nothing else runs during a job: the next line is only read after the answer.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from types import TracebackType

import msgspec
import uvloop

from async_grpo.app.bench.buffer.groups import GroupMaker
from async_grpo.app.bench.buffer.systems import (
    GO,
    READY,
    WAIT_S,
    BenchJob,
    WorkerReport,
    consume,
    open_loop,
    produce,
    produce_paced,
)
from async_grpo.errors import AsyncGrpoError, RoleFailed, WaitTimeout
from async_grpo.utils.child_process import child_argv

LONGEST_ANSWER_BYTES = 16 << 20
STOP_S = 5.0


class BenchWorkers:
    """`async with BenchWorkers(9) as workers`: nine processes, which end with the block, and with this process."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._workers: list[asyncio.subprocess.Process] = []

    async def __aenter__(self) -> BenchWorkers:
        for _ in range(self._size):
            worker = await asyncio.create_subprocess_exec(
                *child_argv([sys.executable, "-m", "async_grpo.app.bench.buffer.workers"]),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=LONGEST_ANSWER_BYTES,
                start_new_session=True,  # Ctrl-C is for the bench, which ends its workers
            )
            self._workers.append(worker)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await asyncio.gather(*(_end(worker, at_once=error is not None) for worker in self._workers))

    async def run(self, jobs: Sequence[BenchJob]) -> list[WorkerReport]:
        """Each job in a worker of its own, all begun at once, when the last one is ready. The answers are in
        the order of the jobs. Raises RoleFailed, WaitTimeout."""
        workers = self._workers[: len(jobs)]
        for worker, job in zip(workers, jobs, strict=True):
            _tell(worker, msgspec.json.encode(job) + b"\n")
        for worker, job in zip(workers, jobs, strict=True):
            if (line := await _hear(worker, job)) != READY:
                raise RoleFailed(f"a {job.role} of the bench failed: {_decoded(line).error}")
        for worker in workers:
            _tell(worker, GO)
        answers = [_decoded(await _hear(worker, job)) for worker, job in zip(workers, jobs, strict=True)]
        for answer, job in zip(answers, jobs, strict=True):
            if answer.error:
                raise RoleFailed(f"a {job.role} of the bench failed: {answer.error}")
        return answers


def _tell(worker: asyncio.subprocess.Process, line: bytes) -> None:
    assert worker.stdin is not None
    worker.stdin.write(line)


async def _hear(worker: asyncio.subprocess.Process, job: BenchJob) -> bytes:
    assert worker.stdout is not None
    try:
        async with asyncio.timeout(2 * WAIT_S):
            line = await worker.stdout.readline()
    except TimeoutError:
        raise WaitTimeout(f"a {job.role} of the bench (process {worker.pid})", 2 * WAIT_S) from None
    if not line:
        raise RoleFailed(f"a {job.role} of the bench (process {worker.pid}) ended. Its error stands above")
    return line


def _decoded(line: bytes) -> WorkerReport:
    return msgspec.json.decode(line, type=WorkerReport)


async def _end(worker: asyncio.subprocess.Process, *, at_once: bool) -> None:
    """It ends when its input closes; killed if it has something better to do."""
    assert worker.stdin is not None
    worker.stdin.close()
    try:
        async with asyncio.timeout(0 if at_once else STOP_S):
            await worker.wait()
    except TimeoutError:
        worker.kill()
        await worker.wait()


async def serve() -> None:
    """One job after the other, until the pipe closes."""
    makers: dict[int, GroupMaker] = {}
    while line := await _next_line():
        job = msgspec.json.decode(line, type=BenchJob)
        maker = makers.setdefault(job.worker, GroupMaker(job.worker))
        try:
            done = await _work(job, maker)
        except* AsyncGrpoError as errors:
            done = WorkerReport(error=str(errors.exceptions[0]))
        _say(msgspec.json.encode(done) + b"\n")


async def _work(job: BenchJob, maker: GroupMaker) -> WorkerReport:
    loop = await open_loop(job)
    try:
        _say(READY)
        if await _next_line() != GO:
            return WorkerReport(error="the bench ended before this loop")
        started_s, latencies_s = time.monotonic(), list[float]()
        if job.role == "consumer":
            latencies_s = await consume(loop, job)
        else:
            await (produce_paced if job.interval_s else produce)(loop, job, maker)
        return WorkerReport(started_s=started_s, ended_s=time.monotonic(), latencies_s=latencies_s)
    finally:
        await loop.aclose()


async def _next_line() -> bytes:
    return await asyncio.to_thread(sys.stdin.buffer.readline)


def _say(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    uvloop.run(serve())
