"""The store in which the ranks find each other: PyTorch's TCPStore, which carries bytes, on a socket bound by us.

    node 0 of a trainer that `trainer.node_main` starts --opens it--> RankStore <---- every rank
    rank 0, where a launcher has started the ranks -------opens it---'

By itself PyTorch would listen on all interfaces.
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
"""PyTorch's own variable: `True` where no rank is to open the store. torchrun sets it too."""

_ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
"""torchrun's variable: it keeps its store when it starts the ranks again."""


def listen(address: str, port: int) -> socket.socket:
    """A listening socket at that address and no other. Raises ConfigError."""
    try:
        return socket.create_server((address, port), backlog=128)
    except OSError as error:
        raise ConfigError(
            f"node 0 cannot listen at {address}:{port} (trainer.rendezvous): {error}. It must be an address of this "
            "machine, with this port and the next one free: another trainer may still be running here"
        ) from None


class RankStore:
    """The store itself, which answers ranks that connect before `open` once it is open."""

    def __init__(self, listener: socket.socket, timeout_s: float) -> None:
        """`listener` listens; it is closed with this."""
        self.port: int = listener.getsockname()[1]
        self._listener = listener
        self._timeout_s = timeout_s
        self._store: Any = None

    async def open(self) -> None:
        """Answer the ranks. Takes seconds, in a thread: PyTorch is imported."""
        if self._store is None:
            self._store = await asyncio.to_thread(_open, self._listener, self._timeout_s)

    def close(self) -> None:
        """Close the store."""
        self._store = None
        self._listener.close()


def join_store(timeout_s: float) -> Store:
    """The store of this rank, by PyTorch's environment (RANK, MASTER_ADDR, MASTER_PORT); rank 0 opens it if nobody has.

    Raises ConfigError, WaitTimeout, and NodeLost if this rank has joined it before, in a process that was replaced.
    """
    from torch.distributed import DistError, PrefixStore, TCPStore

    rank, address, port = os.environ["RANK"], os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        if rank == "0" and os.environ.get(OPENED) != "True":
            opened: Store = _open(listen(address, port), timeout_s)
        else:
            opened = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_s))
        store = PrefixStore(f"attempt {os.environ.get(_ATTEMPT, '0')}", opened)
        lives = store.add(f"lives of rank {rank}", 1)
    except DistError as error:
        raise WaitTimeout(
            f"the store of the ranks at {address}:{port}", timeout_s, f"Is rank 0 started, and the port open? ({error})"
        ) from None
    if lives > 1:
        raise NodeLost(
            f"rank {rank} was started again alone, and the others wait for its earlier process: all ranks have to be "
            "started again together"
        )
    return store


def _open(listener: socket.socket, timeout_s: float) -> Store:
    from torch.distributed import TCPStore

    address, port = listener.getsockname()
    timeout, listening = timedelta(seconds=timeout_s), listener.detach()
    return TCPStore(address, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listening)
