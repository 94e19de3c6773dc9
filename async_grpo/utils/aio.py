"""Helpers for asyncio: races, cancellation, signals, root causes, and a watchdog of the event loop.

    race(work, rival)        the result of the work, unless the rival is done first
    cancel_and_wait(tasks)   cancel tasks and wait until they have ended
    stop_signals(stop)       SIGTERM and Ctrl-C call `stop`
    root_cause(error)        the error of a group that explains the others
    watched_loop(...)        a thread that reports code that blocks the event loop

The watchdog thread pings the event loop every second:

    watched_loop (thread) --call_soon_threadsafe--> event loop --> reply

Code that blocks the event loop stops everything in its process: heartbeats, weights, HTTP. After WARN_S the log names
the task and the lines that block it; after `limit_s` the process ends, so that another one can continue its groups. A
process that was stopped (SIGSTOP) has missed one ping, regardless of how long it was stopped. Code that also holds
Python's global lock (a regular expression, a loop in C) stops the watchdog as well, so it is not detected.
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

PING_EVERY_S = 1.0
WARN_S = 10.0
MAX_FRAMES = 12

log = structlog.get_logger()


class Overtaken(Exception):
    """The rival in a race was done first."""


async def race(work: Awaitable[T], rival: Awaitable[object]) -> T:
    """Return the result of `work`, or raise its error, if it is done first; if both are done, `work` counts.

    Raises Overtaken if the rival is done first, or the rival's error. Coroutines that are not done are cancelled, and
    have ended when this returns; tasks and futures of the caller continue.
    """
    work_task = asyncio.ensure_future(work)
    rival_task = asyncio.ensure_future(rival)
    try:
        await asyncio.wait({work_task, rival_task}, return_when=asyncio.FIRST_COMPLETED)
        if work_task.done():
            return work_task.result()
        rival_task.result()
        raise Overtaken
    finally:
        # `ensure_future` returns tasks and futures of the caller unchanged: those are not ours to cancel.
        own_tasks: list[asyncio.Future[Any]] = []
        if work_task is not work:
            own_tasks.append(work_task)
        if rival_task is not rival:
            own_tasks.append(rival_task)
        await cancel_and_wait(*own_tasks)


async def cancel_and_wait(*tasks: asyncio.Future[Any]) -> None:
    """Cancel the tasks and wait until all have ended; their results and errors are dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def stop_signals(stop: Callable[[], object]) -> Iterator[None]:
    """Within the block, each SIGTERM and Ctrl-C calls `stop` in the event loop instead of ending this process."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def root_cause(error: BaseException) -> BaseException:
    """Return the error itself; of a group, the engine's error, which explains the others, or else the first."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [root_cause(inner) for inner in error.exceptions]
    for cause in causes:
        if isinstance(cause, EngineError):
            return cause
    return causes[0]


@contextmanager
def watched_loop(limit_s: float, on_limit: Callable[[str], None], *, warn_s: float = WARN_S) -> Iterator[None]:
    """Watch the running event loop for the duration of the block.

    After `limit_s` the watchdog calls `on_limit` with the lines that block the loop; it must end the process.
    """
    loop = asyncio.get_running_loop()
    thread_id = threading.get_ident()
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(PING_EVERY_S):
            replied = threading.Event()
            loop.call_soon_threadsafe(replied.set)
            # Count waits rather than read a clock: a process that was stopped would seem blocked for all that time.
            blocked_s = 0.0
            has_warned = False
            while not replied.wait(PING_EVERY_S) and not ended.is_set():
                blocked_s += PING_EVERY_S
                if blocked_s >= limit_s:
                    on_limit(describe_running_task(loop, thread_id))
                    return
                if blocked_s >= warn_s and not has_warned:
                    has_warned = True
                    task = describe_running_task(loop, thread_id)
                    log.error("the event loop is blocked", by=task, for_s=blocked_s)

    threading.Thread(target=watch, name="loop-watch", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def describe_running_task(loop: asyncio.AbstractEventLoop, thread_id: int) -> str:
    """Return the name of the task that the loop is running, and its stack, innermost line first."""
    task = asyncio.current_task(loop)
    frame = sys._current_frames().get(thread_id)
    stack = traceback.extract_stack(frame)[-MAX_FRAMES:] if frame is not None else []
    lines = [f"{line.filename}:{line.lineno} in {line.name}" for line in reversed(stack)]
    return f"{task.get_name() if task is not None else 'a callback'}: {' < '.join(lines)}"
