"""Helpers for asyncio: races, cancellation, signals, the cause among several errors, a watch on the event loop.

    race(work, rival)        the result of the work, unless the rival is done first
    cancel_and_wait(tasks)   cancel tasks and wait until they have ended
    stop_signals(stop)       SIGTERM and Ctrl-C call `stop`
    root_cause(error)        which of several errors to show
    watched_loop(...)        a thread that reports what blocks the event loop

The watching thread asks the event loop for a sign of life every second:

    watched_loop (thread) --call_soon_threadsafe--> event loop --> sign of life

Code that blocks the event loop stops everything in its process: heartbeats, weights, HTTP. After WARN_S the log names
the task and the lines that block it; after `limit_s` the process ends, so that another one can continue its groups. A
process that was stopped (SIGSTOP) has missed one sign of life, however long it was stopped. Code that also holds
Python's global lock (a regular expression, a loop in C) stops the watching thread too, so it goes unnoticed.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import structlog

from async_grpo.errors import EngineError

T = TypeVar("T")

LOOK_EVERY_S = 1.0
WARN_S = 10.0
FRAMES = 12

log = structlog.get_logger()


class Overtaken(Exception):
    """The rival in a race was done first."""


async def race(work: Awaitable[T], rival: Awaitable[object]) -> T:
    """Return the result of `work`, or raise its error, if it is done first; if both are done, `work` counts.

    Raises Overtaken if the rival is done first, or the rival's error. Coroutines that are not done are cancelled, and
    have ended when this returns; tasks and futures of the caller go on.
    """
    working, other = asyncio.ensure_future(work), asyncio.ensure_future(rival)
    try:
        await asyncio.wait({working, other}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        other.result()
        raise Overtaken
    finally:
        await cancel_and_wait(*(own for own, given in ((working, work), (other, rival)) if own is not given))


async def cancel_and_wait(*tasks: asyncio.Future[Any]) -> None:
    """Cancel the tasks and wait until all have ended; their results and errors are dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def stop_signals(stop: Callable[[], object]) -> Iterator[None]:
    """Within the block, each SIGTERM and Ctrl-C calls `stop` in the event loop instead of ending this process."""
    loop, numbers = asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def root_cause(error: BaseException) -> BaseException:
    """The error itself; of a group, the engine's error, which explains the others, or else the first."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [root_cause(inner) for inner in error.exceptions]
    return next((cause for cause in causes if isinstance(cause, EngineError)), causes[0])


@contextmanager
def watched_loop(limit_s: float, on_limit: Callable[[str], None], *, warn_s: float = WARN_S) -> Iterator[None]:
    """Watch the running event loop for the length of the block.

    After `limit_s` the watching thread calls `on_limit` with the lines that block the loop; it must end the process.
    """
    loop, thread_id, ended = asyncio.get_running_loop(), threading.get_ident(), threading.Event()

    def watch() -> None:
        while not ended.wait(LOOK_EVERY_S):
            sign = threading.Event()
            loop.call_soon_threadsafe(sign.set)
            missed, warned = 0, False
            while not sign.wait(LOOK_EVERY_S) and not ended.is_set():
                missed += 1
                if missed * LOOK_EVERY_S >= limit_s:
                    on_limit(holder_of(loop, thread_id))
                    return
                if missed * LOOK_EVERY_S >= warn_s and not warned:
                    warned = True
                    log.error("the event loop is blocked", by=holder_of(loop, thread_id), for_s=missed * LOOK_EVERY_S)

    threading.Thread(target=watch, name="loop-watch", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def holder_of(loop: asyncio.AbstractEventLoop, thread_id: int) -> str:
    """The task that the loop is running and its stack, innermost line first."""
    task = asyncio.current_task(loop)
    frame = sys._current_frames().get(thread_id)
    stack = traceback.extract_stack(frame)[-FRAMES:] if frame is not None else []
    lines = [f"{line.filename}:{line.lineno} in {line.name}" for line in reversed(stack)]
    return f"{task.get_name() if task is not None else 'a callback'}: {' < '.join(lines)}"
