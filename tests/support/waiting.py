"""Bounded waits for a condition."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import redis


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 30.0) -> None:
    """Block until the condition holds. A Redis server that does not answer (yet) counts as not holding.

    Raises AssertionError with `what` after timeout_s.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(redis.RedisError):
            if condition():
                return
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s in vain until {what}"
        time.sleep(0.01)


async def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Let the event loop run until the condition holds. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)
