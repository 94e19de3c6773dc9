"""Producer and consumer processes of the bench: `python -m benchmarks.buffer.workers`, and their starter.

A worker process is started once. It waits for jobs on its standard input, one after the other, and ends when that
closes. Nothing else runs during a job: the next line is only read after the answer.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import uvloop

from async_grpo.errors import AsyncGrpoError, RoleFailed
from async_grpo.lab.bench.rig import LineChild
from benchmarks.buffer.systems import (
    GO,
    READY,
    WAIT_S,
    BenchJob,
    GroupMaker,
    WorkerReport,
    consume,
    open_loop,
    produce,
    produce_paced,
)

Workers = list[LineChild]


@asynccontextmanager
async def bench_workers(size: int) -> AsyncIterator[Workers]:
    """So many worker processes, which end with the block, and with this process."""
    async with AsyncExitStack() as stack:
        children = [LineChild("benchmarks.buffer.workers") for _ in range(size)]
        yield [await stack.enter_async_context(child) for child in children]


async def run_jobs(workers: Workers, jobs: Sequence[BenchJob]) -> list[WorkerReport]:
    """Run each job in a worker of its own; all begin when the last one is ready. The reports are in the order of the
    jobs. Raises RoleFailed, WaitTimeout."""
    pairs = list(zip(workers, jobs, strict=False))
    for worker, job in pairs:
        worker.tell(msgspec.json.encode(job) + b"\n")
    for worker, job in pairs:
        if (line := await _hear(worker, job)) != READY:
            _report(line, job)
    for worker, _ in pairs:
        worker.tell(GO)
    return [_report(await _hear(worker, job), job) for worker, job in pairs]


async def _hear(worker: LineChild, job: BenchJob) -> bytes:
    return await worker.hear(f"a {job.role} of the bench (process {worker.process_id})", 2 * WAIT_S)


def _report(line: bytes, job: BenchJob) -> WorkerReport:
    report = msgspec.json.decode(line, type=WorkerReport)
    if report.error:
        raise RoleFailed(f"a {job.role} of the bench failed: {report.error}")
    return report


async def serve() -> None:
    """Work on one job after the other, until the pipe closes."""
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
