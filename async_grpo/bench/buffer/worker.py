"""A producer or consumer process of the bench: `python -m async_grpo.bench.buffer.worker`.

It waits for jobs on its standard input, one after the other, and ends when that closes. Nothing else
runs while a job does: the next line is only read after the answer.
"""

from __future__ import annotations

import asyncio
import sys
import time

import msgspec
import uvloop

from async_grpo.bench.buffer.jobs import GO, READY, Done, Job
from async_grpo.bench.buffer.loops import consume, open_loop, produce, produce_paced
from async_grpo.bench.buffer.records import GroupMaker
from async_grpo.errors import AsyncGrpoError


async def serve() -> None:
    """One job after the other, until the pipe closes."""
    makers: dict[int, GroupMaker] = {}
    while line := await _next_line():
        job = msgspec.json.decode(line, type=Job)
        maker = makers.setdefault(job.worker, GroupMaker(job.worker))
        try:
            done = await _work(job, maker)
        except* AsyncGrpoError as errors:
            done = Done(error=str(errors.exceptions[0]))
        _say(msgspec.json.encode(done) + b"\n")


async def _work(job: Job, maker: GroupMaker) -> Done:
    loop = await open_loop(job)
    try:
        _say(READY)
        if await _next_line() != GO:
            return Done(error="the bench ended before this loop")
        started_s, latencies_s = time.monotonic(), list[float]()
        if job.role == "consumer":
            latencies_s = await consume(loop, job)
        else:
            await (produce_paced if job.interval_s else produce)(loop, job, maker)
        return Done(started_s=started_s, ended_s=time.monotonic(), latencies_s=latencies_s)
    finally:
        await loop.aclose()


async def _next_line() -> bytes:
    return await asyncio.to_thread(sys.stdin.buffer.readline)


def _say(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    uvloop.run(serve())
