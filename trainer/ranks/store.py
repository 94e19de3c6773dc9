"""The key-value store in which the ranks find each other: PyTorch's TCPStore, on a socket that we bind.

    node 0, if `trainer.node_main` starts the ranks --opens--> RankStore <---- every rank
    rank 0, if a launcher starts the ranks -----------opens--------^

We bind the socket ourselves because PyTorch would listen on all interfaces.
"""

from __future__ import annotations

import asyncio
import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from async_grpo.errors import ConfigError, NodeLost, WaitTimeout

if TYPE_CHECKING:
    from torch.distributed import Store

OPENED = "TORCHELASTIC_USE_AGENT_STORE"
"""Variable of PyTorch, also set by torchrun: `True` if no rank should open the store."""

_ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
"""Variable of torchrun, which keeps its store when it restarts the ranks."""


def listen(address: str, port: int) -> socket.socket:
    """Listen at this address only. Raises ConfigError."""
    try:
        return socket.create_server((address, port), backlog=128)
    except OSError as error:
        raise ConfigError(
            f"node 0 cannot listen at {address}:{port} (trainer.rendezvous): {error}. It must be an address of this "
            "machine, with this port and the next one free: another trainer may still be running here"
        ) from None


class RankStore:
    """The store of a node. Ranks that connect before `open` are answered after it."""

    def __init__(self, listener: socket.socket, timeout_s: float) -> None:
        """`listener`: a listening socket, which the store closes."""
        self.port: int = listener.getsockname()[1]
        self._listener = listener
        self._timeout_s = timeout_s
        self._store: Any = None

    async def open(self) -> None:
        """Start to answer ranks. Takes seconds, in a thread, because it imports PyTorch."""
        if self._store is None:
            self._store = await asyncio.to_thread(_open, self._listener, self._timeout_s)

    def close(self) -> None:
        """Close the store."""
        self._store = None
        self._listener.close()


def join_store(timeout_s: float) -> Store:
    """Connect this rank to the store named by RANK, MASTER_ADDR and MASTER_PORT; rank 0 opens it if no node has.

    Raises ConfigError, WaitTimeout, and NodeLost if an earlier process of this rank has joined already.
    """
    from torch.distributed import DistError, PrefixStore, TCPStore

    rank = os.environ["RANK"]
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    try:
        if rank == "0" and os.environ.get(OPENED) != "True":
            opened: Store = _open(listen(address, port), timeout_s)
        else:
            opened = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_s))
        store = PrefixStore(f"attempt {os.environ.get(_ATTEMPT, '0')}", opened)
        starts = store.add(f"lives of rank {rank}", 1)
    except DistError as error:
        raise WaitTimeout(
            f"the store of the ranks at {address}:{port}", timeout_s, f"Is rank 0 started, and the port open? ({error})"
        ) from None
    if starts > 1:
        raise NodeLost(
            f"rank {rank} was restarted alone, and the other ranks wait for its earlier process. Restart all ranks "
            "together"
        )
    return store


def _open(listener: socket.socket, timeout_s: float) -> Store:
    from torch.distributed import TCPStore

    address, port = listener.getsockname()
    return TCPStore(
        address,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store owns the socket now
    )
