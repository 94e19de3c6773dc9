"""Producer and consumer processes of the buffer benchmark (`python -m benchmarks.buffer.workers`), and starting them.

A worker process reads jobs from its standard input, one after the other, and ends when it closes. Nothing else runs
during a job: the next line is read only after the answer.
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
async def bench_workers(count: int) -> AsyncIterator[Workers]:
    """Start `count` worker processes. They end with the block, and with this process."""
    async with AsyncExitStack() as stack:
        children = [LineChild("benchmarks.buffer.workers") for _ in range(count)]
        yield [await stack.enter_async_context(child) for child in children]


async def run_jobs(workers: Workers, jobs: Sequence[BenchJob]) -> list[WorkerReport]:
    """Run each job in a separate worker, and return the reports in the order of the jobs.

    All workers start when the last one is ready. Raises RoleFailed, WaitTimeout.
    """
    pairs = list(zip(workers, jobs, strict=False))
    for worker, job in pairs:
        worker.write_line(msgspec.json.encode(job) + b"\n")
    for worker, job in pairs:
        line = await _read_answer(worker, job)
        if line != READY:
            _decode_report(line, job)  # raises the worker's error
    for worker, _ in pairs:
        worker.write_line(GO)
    return [_decode_report(await _read_answer(worker, job), job) for worker, job in pairs]


async def _read_answer(worker: LineChild, job: BenchJob) -> bytes:
    return await worker.expect_line(f"a {job.role} of the bench (process {worker.process_id})", 2 * WAIT_S)


def _decode_report(line: bytes, job: BenchJob) -> WorkerReport:
    report = msgspec.json.decode(line, type=WorkerReport)
    if report.error:
        raise RoleFailed(f"a {job.role} of the bench failed: {report.error}")
    return report


async def serve() -> None:
    """Run one job after the other, until the pipe closes."""
    makers: dict[tuple[int, bool], GroupMaker] = {}
    while line := await _read_line():
        job = msgspec.json.decode(line, type=BenchJob)
        maker = makers.get((job.worker, job.truncated))
        if maker is None:
            maker = makers[job.worker, job.truncated] = GroupMaker(job.worker, truncated=job.truncated)
        try:
            report = await _run_job(job, maker)
        except* AsyncGrpoError as errors:
            report = WorkerReport(error=str(errors.exceptions[0]))
        _write(msgspec.json.encode(report) + b"\n")


async def _run_job(job: BenchJob, maker: GroupMaker) -> WorkerReport:
    loop = await open_loop(job)
    try:
        _write(READY)
        if await _read_line() != GO:
            return WorkerReport(error="the bench ended before this loop")

        started_s = time.monotonic()
        latencies_s: list[float] = []
        if job.role == "consumer":
            latencies_s = await consume(loop, job)
        elif job.interval_s:
            await produce_paced(loop, job, maker)
        else:
            await produce(loop, job, maker)
        return WorkerReport(started_s=started_s, ended_s=time.monotonic(), latencies_s=latencies_s)
    finally:
        await loop.aclose()


async def _read_line() -> bytes:
    return await asyncio.to_thread(sys.stdin.buffer.readline)


def _write(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    uvloop.run(serve())
