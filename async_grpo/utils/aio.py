"""Helpers for asyncio: cancelling tasks, which of several errors to show, and who holds the event loop.

`watched_loop` starts a thread that asks the event loop for a sign of life every second:

    LoopWatch (thread) --call_soon_threadsafe--> event loop --> sign of life

It waits for that sign only. Code that blocks the event loop stops everything in this process: heartbeats, weights,
HTTP. After WARN_S the log names the task and the lines that hold it; after `limit_s` the process ends, so that another
one goes on with its groups. A process that was stopped (SIGSTOP) has missed one sign, however long that took. What
holds Python's global lock as well (a regular expression, a loop in C) cannot be seen from here.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import structlog

from async_grpo.errors import EngineError

LOOK_EVERY_S = 1.0
WARN_S = 10.0
FRAMES = 12

log = structlog.get_logger()


async def cancel_and_wait(*tasks: asyncio.Future[Any]) -> None:
    """Cancel the tasks and wait until all have ended. Their results and errors are dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def root_cause(error: BaseException) -> BaseException:
    """The error itself, or of a group: the engine's, if there is one (it explains the others), else the first."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [root_cause(inner) for inner in error.exceptions]
    return next((cause for cause in causes if isinstance(cause, EngineError)), causes[0])


@contextmanager
def watched_loop(limit_s: float, on_limit: Callable[[str], None], *, warn_s: float = WARN_S) -> Iterator[None]:
    """Watch the running event loop for the length of the block. `on_limit` gets what holds it; it is called in the
    watching thread, and is to end the process."""
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
    """The task that the loop runs, and where it is, innermost first."""
    task = asyncio.current_task(loop)
    frame = sys._current_frames().get(thread_id)
    stack = traceback.extract_stack(frame)[-FRAMES:] if frame is not None else []
    lines = [f"{line.filename}:{line.lineno} in {line.name}" for line in reversed(stack)]
    return f"{task.get_name() if task is not None else 'a callback'}: {' < '.join(lines)}"
