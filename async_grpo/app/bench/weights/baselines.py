"""Other ways to bring the same bytes into the shared memory of another process, to compare with.

    tcp      one socket: sendall of the whole block, recv_into where it belongs
    gloo     torch.distributed.broadcast of one flat tensor to one other rank
    disk     safetensors: save, then load and copy to where it belongs; nothing waits for the disk itself

Each baseline has a worker process at its other end, `python -m async_grpo.app.bench.weights.baselines tcp|gloo|disk
WHERE TARGET`. It takes one block after the other into TARGET, which lies in shared memory: a line GO on its standard
input announces each, a line DONE on its standard output says that it is complete. It ends when its input closes.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from async_grpo.errors import RoleFailed, WaitTimeout
from async_grpo.utils.child_process import child_argv
from async_grpo.utils.network import LOOPBACK, card_environment
from async_grpo.weights.manifest import TensorLayout

GO = b"go\n"
"""The next block is on its way."""
DONE = b"done\n"
"""All of it is here."""
WAIT_S = 120.0
"""Longest wait of either end: a bench that takes longer is broken."""
Take = Callable[[], None]


def take_tcp(where: str, target: memoryview) -> Take:
    """Take blocks from the socket at this port."""
    connection = socket.create_connection(("127.0.0.1", int(where)), WAIT_S)

    def take() -> None:
        at = 0
        while at < len(target):
            received = connection.recv_into(target[at:])
            if not received:
                raise ConnectionError("the bench has closed the connection")
            at += received

    return take


def take_gloo(where: str, target: memoryview) -> Take:
    """Take blocks as rank 1 of the group that meets in this file."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=where, rank=1, world_size=2, timeout=timedelta(seconds=WAIT_S))
    tensor = torch.frombuffer(target, dtype=torch.uint8)
    return lambda: dist.broadcast(tensor, src=0)


def take_disk(where: str, target: memoryview) -> Take:
    """Take blocks from this safetensors file."""
    import numpy as np
    from safetensors import safe_open

    block = np.frombuffer(target, np.uint8)

    def take() -> None:
        at = 0
        with safe_open(where, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118
                array = file.get_tensor(name).reshape(-1).view(np.uint8)
                block[at : at + array.nbytes] = array
                at += array.nbytes

    return take


TAKES: dict[str, Callable[[str, memoryview], Take]] = {"tcp": take_tcp, "gloo": take_gloo, "disk": take_disk}


def main() -> None:
    """Entry point of the worker process: take blocks until the input closes."""
    baseline, where, path = sys.argv[1:]
    with Path(path).open("r+b") as file:
        target = memoryview(mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))
    take = TAKES[baseline](where, target)
    while sys.stdin.buffer.readline() == GO:
        take()
        sys.stdout.buffer.write(DONE)
        sys.stdout.buffer.flush()


STOP_S = 5.0


class BaselineProcess:
    """The process that takes blocks; it ends with the `async with` block, and with this process."""

    def __init__(self, baseline: str, where: str, target: Path) -> None:
        self._baseline = baseline
        self._arguments = (baseline, where, str(target))
        self._process: asyncio.subprocess.Process

    async def __aenter__(self) -> BaselineProcess:
        self._process = await asyncio.create_subprocess_exec(
            *child_argv([sys.executable, "-m", "async_grpo.app.bench.weights.baselines", *self._arguments]),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the bench, which ends it
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(STOP_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    @property
    def process_id(self) -> int:
        """Its PID."""
        return self._process.pid

    def go(self) -> None:
        """Take the next block."""
        assert self._process.stdin is not None
        self._process.stdin.write(GO)

    async def done(self) -> None:
        """It has it. Raises RoleFailed, WaitTimeout."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(WAIT_S):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise WaitTimeout(f"the other end of the bench's {self._baseline} loop", WAIT_S) from None
        if line != DONE:
            raise RoleFailed(f"the other end of the bench's {self._baseline} loop ended. Its error stands above")


class TransferBaseline(ABC):
    """One way, ready to move blocks."""

    def __init__(self, far: BaselineProcess) -> None:
        self._far = far

    @property
    def process_ids(self) -> list[int]:
        """Of both ends."""
        return [os.getpid(), self._far.process_id]

    async def seconds(self, block: memoryview) -> float:
        """To move the block until the far end has all of it."""
        started_s = time.monotonic()
        await self._move(self._far, block)
        await self._far.done()
        return time.monotonic() - started_s

    @abstractmethod
    async def _move(self, far: BaselineProcess, block: memoryview) -> None:
        """Tell the far end to go, and do this end's half."""


class Tcp(TransferBaseline):
    """One connection."""

    def __init__(self, far: BaselineProcess, connection: socket.socket) -> None:
        super().__init__(far)
        self._connection = connection

    async def _move(self, far: BaselineProcess, block: memoryview) -> None:
        far.go()
        await asyncio.to_thread(self._connection.sendall, block)


class Gloo(TransferBaseline):
    """Rank 0 of two."""

    async def _move(self, far: BaselineProcess, block: memoryview) -> None:
        import torch
        import torch.distributed as dist

        far.go()
        await asyncio.to_thread(dist.broadcast, torch.frombuffer(block, dtype=torch.uint8), src=0)


class Disk(TransferBaseline):
    """A file, written anew for every block."""

    def __init__(self, far: BaselineProcess, file: Path, layout: TensorLayout) -> None:
        super().__init__(far)
        self._file = file
        self._layout = layout

    async def _move(self, far: BaselineProcess, block: memoryview) -> None:
        from safetensors.numpy import save_file

        await asyncio.to_thread(save_file, self._tensors(block), self._file)
        far.go()

    def _tensors(self, block: memoryview) -> dict[str, Any]:
        flat = np.frombuffer(block, np.uint16)
        return {
            spec.name: flat[spec.offset // 2 : (spec.offset + spec.nbytes) // 2].reshape(spec.shape)
            for spec in self._layout.tensors
        }


@asynccontextmanager
async def tcp(target: Path) -> AsyncIterator[TransferBaseline]:
    """Over the loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(WAIT_S)
        async with BaselineProcess("tcp", str(listener.getsockname()[1]), target) as far:
            connection, _ = await asyncio.to_thread(listener.accept)
            with connection:
                connection.settimeout(WAIT_S)
                yield Tcp(far, connection)


@asynccontextmanager
async def gloo(target: Path, folder: Path) -> AsyncIterator[TransferBaseline]:
    """Over the loopback; the two ranks meet in a file of `folder`."""
    import torch.distributed as dist

    for name, value in card_environment(LOOPBACK).items():
        os.environ.setdefault(name, value)  # for the far end, too
    where = f"file://{folder / 'gloo'}"
    timeout = timedelta(seconds=WAIT_S)
    async with BaselineProcess("gloo", where, target) as far:
        await asyncio.to_thread(
            lambda: dist.init_process_group("gloo", init_method=where, rank=0, world_size=2, timeout=timeout)
        )
        try:
            yield Gloo(far)
        finally:
            dist.destroy_process_group()


@asynccontextmanager
async def disk(target: Path, folder: Path, layout: TensorLayout) -> AsyncIterator[TransferBaseline]:
    """Through a file of `folder`."""
    file = folder / "weights.safetensors"
    async with BaselineProcess("disk", str(file), target) as far:
        yield Disk(far, file, layout)


if __name__ == "__main__":
    main()
