"""What benches and `async-grpo accept` start: a Redis server, and child processes that exchange lines with them.

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
SERVER_TIMEOUT_S = 5.0
"""Maximum seconds to wait for a server at a URL."""
CHILD_STOP_S = 5.0
"""Maximum seconds for a child to exit after its input has closed; then it is killed."""
MAX_LINE_BYTES = 16 << 20
MEMORY_BYTES = 1 << 30
"""Memory of a bench's embedded server."""


@contextlib.contextmanager
def bench_server(url: str | None, fsync: Fsync = "always", memory_bytes: int = MEMORY_BYTES) -> Iterator[RedisConfig]:
    """Yield the configuration of the server at `url`, or of an embedded one that ends with the block.

    The embedded server is set up as in a run (append-only file included), except for `fsync`. Call this in the main
    thread: the server is killed when the thread that started it ends.
    """
    if url is not None:
        yield RedisConfig(url=url, timeout_s=SERVER_TIMEOUT_S, durable=False)
        return

    # The variable is the password of another server. Ours has none and would reject clients that send one.
    os.environ.pop(PASSWORD_VARIABLE, None)
    with tempfile.TemporaryDirectory(prefix="async-grpo-bench-") as folder:
        server = EmbeddedServer(Path(folder) / "server", RedisConfig(fsync=fsync, max_memory_bytes=memory_bytes))
        try:
            yield RedisConfig(url=server.start())
        finally:
            server.stop()


async def check_trained(buffer: ReplayBuffer, groups: int, what: str) -> None:
    """Raise BufferFault unless exactly `groups` groups were trained; `what` names the loop in the error.

    A loop that loses groups would look faster than it is.
    """
    stats = await buffer.stats()
    if not stats.balanced or stats.released["trained"] != groups:
        raise BufferFault(f"the {what} over {groups} groups ended with {stats}: groups are missing")


class LineChild:
    """A Python module as a child process. It ends with the `async with` block, and with this process."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None, stderr: IO[str] | None = None) -> None:
        """`arguments`: the module and its command line."""
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
            limit=MAX_LINE_BYTES,
            start_new_session=True,  # Ctrl-C is for the bench, which ends its children
        )
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the child's input, on which it should exit. Kill it if it does not, or immediately after an error."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await self.wait(CHILD_STOP_S if kind is None else 0.0)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    @property
    def process_id(self) -> int:
        """PID of the child."""
        return self._process.pid

    def kill(self) -> None:
        """Send SIGKILL if the child is still running."""
        if self._process.returncode is None:
            self._process.kill()

    def write_line(self, line: bytes) -> None:
        """Send a line, which must end with a line break."""
        assert self._process.stdin is not None
        self._process.stdin.write(line)

    async def read_line(self, name: str, timeout_s: float) -> bytes:
        """Return the next line, or b"" if the child has closed its output.

        Raises WaitTimeout, which mentions `name`.
        """
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                return await self._process.stdout.readline()
        except TimeoutError:
            raise WaitTimeout(name, timeout_s) from None

    async def expect_line(self, name: str, timeout_s: float) -> bytes:
        """Return the next line. Raises WaitTimeout, or RoleFailed if the child has ended."""
        line = await self.read_line(name, timeout_s)
        if not line:
            raise RoleFailed(f"{name} ended. Its error is printed above")
        return line

    async def wait(self, timeout_s: float) -> int:
        """Wait for the child to exit and return its exit code. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            return await self._process.wait()


async def request_all(
    name: str, children: Sequence[LineChild], requests: Sequence[Mapping[str, Any]], timeout_s: float
) -> list[Any]:
    """Send each child its request {"ask": X, ...} and return the answers in order.

    The children must run a `LineServer`. They work in parallel. Raises RoleFailed or WaitTimeout, which mention `name`.
    """
    for child, request in zip(children, requests, strict=True):
        child.write_line(json.dumps(request).encode() + b"\n")

    description = f"{name}, asked to {requests[0]['ask']}"
    answers = [json.loads(await child.expect_line(description, timeout_s)) for child in children]
    errors = [answer["error"] for answer in answers if "error" in answer]
    if errors:
        raise RoleFailed(f"{name} failed: {errors[0]}")
    return [answer["found"] for answer in answers]


class LineServer:
    """The child's end: reads requests as lines of JSON and writes one line of JSON per answer.

    Create it before importing libraries that print: from then on standard output carries only answers, and everything
    that is printed there goes to standard error.
    """

    def __init__(self) -> None:
        # Duplicate descriptor 1 for the answers, then point it at standard error. C++ libraries write to the
        # descriptor itself, so replacing sys.stdout would not be enough.
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    async def serve(self, side: Any) -> None:
        """Answer each request {"ask": X, ...} with `side.answer_X(...)` or its error until the input closes.

        Then close `side`.
        """
        try:
            while True:
                line = await asyncio.to_thread(sys.stdin.readline)
                if not line:
                    return
                request = json.loads(line)
                try:
                    handler = getattr(side, f"answer_{request.pop('ask')}")
                    answer = {"found": await handler(**request)}
                except Exception as error:  # any kind: the parent decides what an error means
                    traceback.print_exc()
                    answer = {"error": f"{type(error).__name__}: {error}"}
                print(json.dumps(answer), file=self._answers, flush=True)
        finally:
            await side.close()
