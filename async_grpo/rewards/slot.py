"""One place in the pool: a verifier process, and its replacement when it hangs or dies."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence

from async_grpo.errors import ConfigError, WireError
from async_grpo.rewards.frames import Assignment, Hello, Score, pack, read_frame
from async_grpo.rewards.verdict import Verdict, unverifiable

_START_TIMEOUT_S = 60.0


class WorkerSlot:
    """Used by one caller at a time."""

    def __init__(self, names: Sequence[str], deadline_s: float) -> None:
        self._names = names
        self._deadline_s = deadline_s
        self._process: Process | None = None

    async def start(self) -> None:
        """Have a process that is ready. Raises ConfigError (a verifier cannot be had, or it does not start)."""
        if self._process is not None:
            return
        argv = [sys.executable, "-m", "async_grpo.rewards.worker", *self._names]
        self._process = await asyncio.create_subprocess_exec(*argv, stdin=PIPE, stdout=PIPE)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                hello = await read_frame(self._stdout, Hello)
        except (asyncio.IncompleteReadError, TimeoutError, WireError) as error:
            await self.kill()
            raise ConfigError(
                f"a verifier process for {', '.join(self._names)} did not start within {_START_TIMEOUT_S:g} s "
                "or ended at once. Does importing the verifier's module hang or exit?"
            ) from error
        if hello.error:
            await self.kill()
            raise ConfigError(hello.error)

    async def judge(self, items: Sequence[tuple[str, str]]) -> AsyncIterator[Score | Verdict]:
        """An answer per item, in order. An item that hangs or crashes costs the process, not the others."""
        done = 0
        while done < len(items):
            try:
                await self.start()
            except ConfigError as error:
                yield unverifiable("crash", str(error))
                done += 1
                continue
            await self._send(items[done:])
            async for answer in self._answers(len(items) - done):
                yield answer
                done += 1

    async def _send(self, items: Sequence[tuple[str, str]]) -> None:
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(ConnectionError):  # a process that has ended shows when its answer is read
            self._process.stdin.write(pack(Assignment(items=list(items))))

    async def _answers(self, count: int) -> AsyncIterator[Score | Verdict]:
        """Up to `count` answers; ends after the first that the process did not survive."""
        for _ in range(count):
            try:
                async with asyncio.timeout(self._deadline_s):
                    score = await read_frame(self._stdout, Score)
            except TimeoutError:
                await self.kill()
                yield unverifiable("deadline", f"a verifier took longer than {self._deadline_s:g} s and was killed")
                return
            except (asyncio.IncompleteReadError, ConnectionError):
                code = await self.kill(grace_s=1.0)
                yield unverifiable("crash", f"the verifier process ended with code {code}")
                return
            except WireError as error:
                await self.kill()
                yield unverifiable("crash", f"the verifier process wrote to the pool's pipe: {error}")
                return
            yield score

    async def kill(self, grace_s: float = 0.0) -> int | None:
        """End the process, if there is one, after `grace_s` to end by itself; returns its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                return await process.wait()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        return await process.wait()

    @property
    def _stdout(self) -> asyncio.StreamReader:
        assert self._process is not None and self._process.stdout is not None
        return self._process.stdout
