"""Other ways to bring the same bytes into the shared memory of another process, to compare with.

    tcp      one socket: sendall of the whole block, recv_into where it belongs
    gloo     torch.distributed.broadcast of one flat tensor to one other rank
    disk     safetensors: save, then load and copy to where it belongs; nothing waits for the disk itself

Each baseline has a worker process at its other end, `python -m benchmarks.weights.baselines tcp|gloo|disk
WHERE TARGET`. It takes one block after the other into TARGET, which lies in shared memory: a line GO on its standard
input announces each, a line DONE on its standard output says that it is complete. It ends when its input closes.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import numpy as np

from async_grpo.errors import RoleFailed
from async_grpo.lab.bench.measure import Stopwatch
from async_grpo.lab.bench.rig import LineChild
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


class TransferBaseline:
    """One way, ready to move blocks to its worker process."""

    def __init__(
        self, name: str, far: LineChild, send: Callable[[memoryview], object], *, announced: bool = True
    ) -> None:
        """`send`: this end's half of a move. `announced`: whether the worker is told to go before it, or after."""
        self._who = f"the other end of the bench's {name} loop"
        self._far = far
        self._send = send
        self._announced = announced

    @property
    def process_ids(self) -> list[int]:
        """The processes of both ends."""
        return [os.getpid(), self._far.process_id]

    async def seconds(self, block: memoryview) -> float:
        """Seconds to move the block until the far end has all of it. Raises RoleFailed, WaitTimeout."""
        with Stopwatch() as spent:
            if self._announced:
                self._far.tell(GO)
            await asyncio.to_thread(self._send, block)
            if not self._announced:
                self._far.tell(GO)
            if await self._far.hear(self._who, WAIT_S) != DONE:
                raise RoleFailed(f"{self._who} ended. Its error stands above")
        return spent.seconds


def _worker(baseline: str, where: str, target: Path) -> LineChild:
    return LineChild("benchmarks.weights.baselines", baseline, where, str(target))


@asynccontextmanager
async def tcp(target: Path) -> AsyncIterator[TransferBaseline]:
    """One connection over the loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(WAIT_S)
        async with _worker("tcp", str(listener.getsockname()[1]), target) as far:
            connection, _ = await asyncio.to_thread(listener.accept)
            with connection:
                connection.settimeout(WAIT_S)
                yield TransferBaseline("tcp", far, connection.sendall)


@asynccontextmanager
async def gloo(target: Path, folder: Path) -> AsyncIterator[TransferBaseline]:
    """A broadcast over the loopback; this process is rank 0 of two, which meet in a file of `folder`."""
    import torch
    import torch.distributed as dist

    for name, value in card_environment(LOOPBACK).items():
        os.environ.setdefault(name, value)  # for the far end, too
    where = f"file://{folder / 'gloo'}"
    timeout = timedelta(seconds=WAIT_S)
    async with _worker("gloo", where, target) as far:
        await asyncio.to_thread(
            lambda: dist.init_process_group("gloo", init_method=where, rank=0, world_size=2, timeout=timeout)
        )
        try:
            yield TransferBaseline(
                "gloo", far, lambda block: dist.broadcast(torch.frombuffer(block, dtype=torch.uint8), src=0)
            )
        finally:
            dist.destroy_process_group()


@asynccontextmanager
async def disk(target: Path, folder: Path, layout: TensorLayout) -> AsyncIterator[TransferBaseline]:
    """A file of `folder`, written again for every block."""
    from safetensors.numpy import save_file

    file = folder / "weights.safetensors"

    def save(block: memoryview) -> None:
        flat = np.frombuffer(block, np.uint16)
        tensors = {
            spec.name: flat[spec.offset // 2 : (spec.offset + spec.nbytes) // 2].reshape(spec.shape)
            for spec in layout.tensors
        }
        save_file(tensors, file)

    async with _worker("disk", str(file), target) as far:
        yield TransferBaseline("disk", far, save, announced=False)


if __name__ == "__main__":
    main()
