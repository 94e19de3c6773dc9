"""What benches and `async-grpo accept` start: a Redis server, and child processes that are told and answer in lines.

bench --line--> child's standard input
bench <--line-- child's standard output      each wait has a timeout that names the child
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import traceback
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

from async_grpo.config.buffer import RedisConfig
from async_grpo.errors import BufferFault, RoleFailed, WaitTimeout
from async_grpo.utils.child_process import child_argv
from buffer import PASSWORD_VARIABLE, EmbeddedServer
from buffer.base import ReplayBuffer

Fsync = Literal["everysec", "always"]
PATIENCE_S = 5.0
"""Longest wait for a given server that does not answer."""
STOP_S = 5.0
"""Longest wait for a child whose input has closed; then it is killed."""
LONGEST_LINE_BYTES = 16 << 20
MEMORY_BYTES = 1 << 30
"""Of the embedded server of a bench."""


@contextlib.contextmanager
def bench_server(url: str | None, fsync: Fsync = "always", memory_bytes: int = MEMORY_BYTES) -> Iterator[RedisConfig]:
    """The configuration that reaches the server at `url`, or an embedded one. The embedded one is that of a run
    (append-only file included), except for `fsync`, and is gone afterwards. Call it in the main thread: the server dies
    with the thread that has started it."""
    if url is not None:
        yield RedisConfig(url=url, timeout_s=PATIENCE_S, durable=False)
        return
    os.environ.pop(PASSWORD_VARIABLE, None)  # it belongs to another server; ours has none and would refuse it
    with tempfile.TemporaryDirectory(prefix="async-grpo-bench-") as folder:
        server = EmbeddedServer(Path(folder) / "server", RedisConfig(fsync=fsync, max_memory_bytes=memory_bytes))
        try:
            yield RedisConfig(url=server.start())
        finally:
            server.stop()


async def check_trained(buffer: ReplayBuffer, groups: int, what: str) -> None:
    """Raise BufferFault unless exactly so many groups were trained: a loop that loses groups looks faster than it is.
    `what` names the loop in the error."""
    stats = await buffer.stats()
    if not stats.balanced or stats.released["trained"] != groups:
        raise BufferFault(f"the {what} over {groups} groups ended with {stats}: groups are missing")


class LineChild:
    """A Python module as a child process. It ends with the `async with` block, and with this process."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None, stderr: IO[str] | None = None) -> None:
        """`arguments`: the module, and what it is given on its command line."""
        self._argv = child_argv([sys.executable, "-m", *arguments])
        self._env = env
        self._stderr = stderr
        self._process: Process

    async def __aenter__(self) -> LineChild:
        self._process = await asyncio.create_subprocess_exec(
            *self._argv,
            stdin=PIPE,
            stdout=PIPE,
            stderr=self._stderr,
            env=self._env,
            limit=LONGEST_LINE_BYTES,
            start_new_session=True,  # Ctrl-C is for the bench, which ends its children
        )
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the child's input, on which it should end; kill it if it does not, or at once after an error."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await self.wait(STOP_S if kind is None else 0.0)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    @property
    def process_id(self) -> int:
        """The child's PID."""
        return self._process.pid

    def kill(self) -> None:
        """Send SIGKILL, if it has not ended."""
        if self._process.returncode is None:
            self._process.kill()

    def tell(self, line: bytes) -> None:
        """Send a line, which ends with a line break."""
        assert self._process.stdin is not None
        self._process.stdin.write(line)

    async def read(self, who: str, timeout_s: float) -> bytes:
        """The next line, or b"" when the child has closed its output. Raises WaitTimeout, which names `who`."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                return await self._process.stdout.readline()
        except TimeoutError:
            raise WaitTimeout(who, timeout_s) from None

    async def hear(self, who: str, timeout_s: float) -> bytes:
        """The next line. Raises WaitTimeout, and RoleFailed if the child has ended."""
        if not (line := await self.read(who, timeout_s)):
            raise RoleFailed(f"{who} ended. Its error stands above")
        return line

    async def wait(self, timeout_s: float) -> int:
        """The exit code, when the child has ended. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            return await self._process.wait()


async def ask_all(
    who: str, children: Sequence[LineChild], requests: Sequence[Mapping[str, Any]], timeout_s: float
) -> list[Any]:
    """The answer of each child, at whose end is `AnswerLines`, to its request {"ask": X, ...}. Raises RoleFailed,
    WaitTimeout."""
    for child, request in zip(children, requests, strict=True):
        child.tell(json.dumps(request).encode() + b"\n")
    asked = f"{who}, asked to {requests[0]['ask']}"
    answers = [json.loads(await child.hear(asked, timeout_s)) for child in children]
    if failed := [answer["error"] for answer in answers if "error" in answer]:
        raise RoleFailed(f"{who} failed: {failed[0]}")
    return [answer["found"] for answer in answers]


class AnswerLines:
    """The child's end: requests are lines of JSON, and so is each answer.

    Standard output carries answers alone. What libraries print there goes to standard error.
    """

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    async def serve(self, side: Any) -> None:
        """Answer each request {"ask": X, ...} with `side.answer_X(...)` or with its error, until the input closes; then
        close the side."""
        try:
            while line := await asyncio.to_thread(sys.stdin.readline):
                request = json.loads(line)
                try:
                    answer = {"found": await getattr(side, f"answer_{request.pop('ask')}")(**request)}
                except Exception as error:  # it is for who has asked
                    traceback.print_exc()
                    answer = {"error": f"{type(error).__name__}: {error}"}
                print(json.dumps(answer), file=self._answers, flush=True)
        finally:
            await side.close()
