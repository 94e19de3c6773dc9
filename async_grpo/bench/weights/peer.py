"""The far end of a rival: `python -m async_grpo.bench.weights.peer tcp|gloo|disk WHERE TARGET`.

It takes one block after the other into TARGET, which lies in shared memory: a line on its standard input
announces each, a line on its standard output says that it is whole. It ends when its input closes.
"""

from __future__ import annotations

import mmap
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from async_grpo.bench.weights.signals import DONE, GO, WAIT_S

Take = Callable[[], None]


def take_tcp(where: str, target: memoryview) -> Take:
    """From the one socket at this port."""
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
    """As rank 1 of the group that meets in this file."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=where, rank=1, world_size=2, timeout=timedelta(seconds=WAIT_S))
    tensor = torch.frombuffer(target, dtype=torch.uint8)
    return lambda: dist.broadcast(tensor, src=0)


def take_disk(where: str, target: memoryview) -> Take:
    """From this safetensors file."""
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
    """Until the input closes."""
    rival, where, path = sys.argv[1:]
    with Path(path).open("r+b") as file:
        target = memoryview(mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))
    take = TAKES[rival](where, target)
    while sys.stdin.buffer.readline() == GO:
        take()
        sys.stdout.buffer.write(DONE)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
