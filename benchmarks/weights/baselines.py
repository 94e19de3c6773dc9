"""Baselines: other ways to copy the same bytes into the shared memory of another process.

    tcp      one socket: sendall of the whole block, recv_into the target
    gloo     torch.distributed.broadcast of one flat tensor to one other rank
    disk     safetensors: save, then load and copy to the target; nothing waits for the disk itself

Each baseline has a worker process, `python -m benchmarks.weights.baselines tcp|gloo|disk WHERE TARGET`. It receives one
block after the other into TARGET, a file in shared memory. The bench sends a line GO per block to its standard input,
and the worker answers with a line DONE when the block is complete. It ends when its input closes.
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
"""Request to receive the next block."""
DONE = b"done\n"
"""Answer: the block is complete."""
WAIT_S = 120.0
"""Timeout of both sides: a bench that takes longer is broken."""
ReceiveBlock = Callable[[], None]


def tcp_worker(where: str, target: memoryview) -> ReceiveBlock:
    """Receive blocks from port `where`."""
    connection = socket.create_connection(("127.0.0.1", int(where)), WAIT_S)

    def receive() -> None:
        offset = 0
        while offset < len(target):
            received_bytes = connection.recv_into(target[offset:])
            if not received_bytes:
                raise ConnectionError("the bench has closed the connection")
            offset += received_bytes

    return receive


def gloo_worker(where: str, target: memoryview) -> ReceiveBlock:
    """Receive blocks as rank 1 of the group whose rendezvous file is `where`."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=where, rank=1, world_size=2, timeout=timedelta(seconds=WAIT_S))
    tensor = torch.frombuffer(target, dtype=torch.uint8)
    return lambda: dist.broadcast(tensor, src=0)


def disk_worker(where: str, target: memoryview) -> ReceiveBlock:
    """Read blocks from the safetensors file `where`."""
    from safetensors import safe_open

    block = np.frombuffer(target, np.uint8)

    def receive() -> None:
        offset = 0
        with safe_open(where, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118
                array = file.get_tensor(name).reshape(-1).view(np.uint8)
                block[offset : offset + array.nbytes] = array
                offset += array.nbytes

    return receive


WORKERS: dict[str, Callable[[str, memoryview], ReceiveBlock]] = {
    "tcp": tcp_worker,
    "gloo": gloo_worker,
    "disk": disk_worker,
}


def main() -> None:
    """Entry point of the worker process: receive blocks until the input closes."""
    baseline, where, path = sys.argv[1:]
    with Path(path).open("r+b") as file:
        target = memoryview(mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))
    receive_block = WORKERS[baseline](where, target)
    while sys.stdin.buffer.readline() == GO:
        receive_block()
        sys.stdout.buffer.write(DONE)
        sys.stdout.buffer.flush()


class TransferBaseline:
    """One baseline with its worker process."""

    def __init__(
        self, name: str, worker: LineChild, send: Callable[[memoryview], object], *, concurrent: bool = True
    ) -> None:
        """`send` is this side's part of a transfer. `concurrent`: the worker receives while it runs, not after it."""
        self._description = f"the worker of the bench's {name} baseline"
        self._worker = worker
        self._send = send
        self._concurrent = concurrent

    @property
    def process_ids(self) -> list[int]:
        """PIDs of this process and the worker."""
        return [os.getpid(), self._worker.process_id]

    async def time_transfer(self, block: memoryview) -> float:
        """Copy the block to the worker. Returns the seconds until it is complete. Raises RoleFailed, WaitTimeout."""
        with Stopwatch() as stopwatch:
            if self._concurrent:
                self._worker.write_line(GO)
            await asyncio.to_thread(self._send, block)
            if not self._concurrent:
                self._worker.write_line(GO)
            if await self._worker.expect_line(self._description, WAIT_S) != DONE:
                raise RoleFailed(f"{self._description} ended; see its error above")
        return stopwatch.seconds


def _start_worker(baseline: str, where: str, target: Path) -> LineChild:
    return LineChild("benchmarks.weights.baselines", baseline, where, str(target))


@asynccontextmanager
async def tcp(target: Path) -> AsyncIterator[TransferBaseline]:
    """One connection over the loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(WAIT_S)
        async with _start_worker("tcp", str(listener.getsockname()[1]), target) as worker:
            connection, _ = await asyncio.to_thread(listener.accept)
            with connection:
                connection.settimeout(WAIT_S)
                yield TransferBaseline("tcp", worker, connection.sendall)


@asynccontextmanager
async def gloo(target: Path, folder: Path) -> AsyncIterator[TransferBaseline]:
    """A broadcast over the loopback. This process is rank 0 of two; the rendezvous file is in `folder`."""
    import torch
    import torch.distributed as dist

    for name, value in card_environment(LOOPBACK).items():
        os.environ.setdefault(name, value)  # the worker inherits it
    where = f"file://{folder / 'gloo'}"
    timeout = timedelta(seconds=WAIT_S)
    async with _start_worker("gloo", where, target) as worker:
        await asyncio.to_thread(
            lambda: dist.init_process_group("gloo", init_method=where, rank=0, world_size=2, timeout=timeout)
        )
        try:
            yield TransferBaseline(
                "gloo", worker, lambda block: dist.broadcast(torch.frombuffer(block, dtype=torch.uint8), src=0)
            )
        finally:
            dist.destroy_process_group()


@asynccontextmanager
async def disk(target: Path, folder: Path, layout: TensorLayout) -> AsyncIterator[TransferBaseline]:
    """A file in `folder`, rewritten for every block."""
    from safetensors.numpy import save_file

    file = folder / "weights.safetensors"

    def save(block: memoryview) -> None:
        flat = np.frombuffer(block, np.uint16)
        tensors = {
            spec.name: flat[spec.offset // 2 : (spec.offset + spec.nbytes) // 2].reshape(spec.shape)
            for spec in layout.tensors
        }
        save_file(tensors, file)

    async with _start_worker("disk", str(file), target) as worker:
        yield TransferBaseline("disk", worker, save, concurrent=False)


if __name__ == "__main__":
    main()
