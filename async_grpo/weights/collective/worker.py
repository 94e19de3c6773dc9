"""The thread of a process that takes part in broadcasts, and the store through which its group meets.

    loop --start--> thread: join the group, unless it is still in it --> broadcast bucket after bucket
    loop <--take--- thread: entries to send, bytes that came, the end

Members of a group exchange their addresses through a store. This one listens nowhere: what a member sets travels over
the control sockets of the transport, through the publisher, to the others. gloo puts addresses there, and executes
nothing that it reads.
"""

from __future__ import annotations

import os
import socket
import threading
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import structlog
import torch
import torch.distributed as dist

from async_grpo.errors import WaitTimeout, WeightsError
from async_grpo.utils.network import LOOPBACK, card_environment
from async_grpo.weights.manifest import WeightVersion
from async_grpo.weights.zmq.messages import GroupEntry, GroupInvitation

BUCKET_BYTES = 64 << 20
"""Bytes of one broadcast: many chunks, and few enough that hashing one takes no time beside the next."""
IN_FLIGHT = 2
"""Broadcasts that are queued, so that the next begins when one ends."""

log = structlog.get_logger()


class RelayedStore(dist.Store):
    """What the members of one group have set. `send` takes an entry to the others; theirs come by `put`."""

    def __init__(self, group: int, send: Callable[[GroupEntry], None], timeout_s: float) -> None:
        super().__init__()
        self._group = group
        self._send = send
        self._timeout_s = timeout_s
        self._entries: dict[str, bytes] = {}
        self._over = ""
        self._changed = threading.Condition()

    def put(self, entry: GroupEntry) -> None:
        """Take the entry of another member; one without a key says why the group will not come about."""
        with self._changed:
            if entry.key:
                self._entries[entry.key] = entry.value
            else:
                self._over = entry.value.decode()
            self._changed.notify_all()

    def set(self, key: str, value: bytes | str) -> None:
        """Keep the entry, and send it to the others."""
        entry = GroupEntry(group=self._group, key=key, value=value.encode() if isinstance(value, str) else bytes(value))
        self.put(entry)
        self._send(entry)

    def get(self, key: str) -> bytes:
        """Wait for an entry. Raises WaitTimeout, WeightsError if the group will not come about."""
        self.wait([key])
        return self._entries[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for all of these entries. Raises as `get` does."""
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        with self._changed:
            if not self._changed.wait_for(lambda: self._over or self._entries.keys() >= set(keys), timeout_s):
                missing = sorted(set(keys) - self._entries.keys())
                raise WaitTimeout(f"the members of group {self._group} to say {missing}", timeout_s)
            if self._over:
                raise WeightsError(f"group {self._group} will not come about: {self._over}")

    def check(self, keys: list[str]) -> bool:
        """Whether all of these entries are there."""
        with self._changed:
            return self._entries.keys() >= set(keys)


@dataclass(frozen=True, slots=True)
class BytesCame:
    """The first `count` bytes of the block have been broadcast."""

    count: int


@dataclass(frozen=True, slots=True)
class BroadcastOver:
    """The broadcast has ended. With an `error`, not all has come, and the group is gone."""

    identity: WeightVersion
    error: str = ""


Event = GroupEntry | BytesCame | BroadcastOver


class BroadcastWorker:
    """Takes part in one broadcast at a time. The descriptor `wake` becomes readable when there are events."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: for one bucket, and for the members to meet."""
        self.address = LOOPBACK
        """Of the card over which gloo connects, and at which it listens."""
        self._timeout_s = timeout_s
        self._events: deque[Event] = deque()
        self._store: RelayedStore | None = None
        self._group: int | None = None
        self._thread: threading.Thread | None = None
        self.wake, self._waker = os.pipe()
        os.set_blocking(self.wake, False)

    @property
    def busy(self) -> bool:
        """Whether a broadcast has been started and its end not been taken."""
        return self._thread is not None

    def start(self, invitation: GroupInvitation, identity: WeightVersion, block: memoryview) -> None:
        """Broadcast `block`, or receive into it: it must stay as it is until `BroadcastOver` was taken."""
        if invitation.number != self._group:
            self._store = RelayedStore(invitation.number, self._tell, self._timeout_s)
        self._thread = threading.Thread(target=self._run, args=(invitation, identity, block), daemon=True)
        self._thread.start()

    def put(self, entry: GroupEntry) -> None:
        """Take an entry that another member has set."""
        if self._store is not None:
            self._store.put(entry)

    def take(self) -> list[Event]:
        """What has happened since the last call."""
        with suppress(BlockingIOError):
            os.read(self.wake, 4096)
        events = [self._events.popleft() for _ in range(len(self._events))]
        if any(isinstance(event, BroadcastOver) for event in events) and self._thread is not None:
            self._thread.join()
            self._thread = None
        return events

    def close(self) -> None:
        """Wait for a broadcast that is under way, and leave the group."""
        if self._thread is not None:
            self._thread.join(self._timeout_s)
        self._leave()

    def _tell(self, event: Event) -> None:
        self._events.append(event)
        os.write(self._waker, b"!")

    def _run(self, invitation: GroupInvitation, identity: WeightVersion, block: memoryview) -> None:
        try:
            self._join(invitation)
            self._broadcast(block)
        except Exception as error:  # of any backend, and every one means that the rest will be fetched
            self._leave()
            self._tell(BroadcastOver(identity, f"{type(error).__name__}: {error}"))
        else:
            self._tell(BroadcastOver(identity))

    def _join(self, invitation: GroupInvitation) -> None:
        if invitation.number == self._group:
            return
        self._leave()
        os.environ.update(card_environment(socket.gethostbyname(self.address)))
        dist.init_process_group(
            "gloo",
            store=self._store,
            rank=invitation.rank,
            world_size=invitation.size,
            timeout=timedelta(seconds=self._timeout_s),
        )
        self._group = invitation.number

    def _leave(self) -> None:
        self._group = None
        if dist.is_initialized():
            dist.destroy_process_group()

    def _broadcast(self, block: memoryview) -> None:
        tensor = _tensor_of(block)
        queued: deque[tuple[int, Any]] = deque()
        try:
            for start in range(0, len(block), BUCKET_BYTES):
                stop = min(start + BUCKET_BYTES, len(block))
                queued.append((stop, dist.broadcast(tensor[start:stop], src=0, async_op=True)))
                if len(queued) >= IN_FLIGHT:
                    self._finish(queued)
            while queued:
                self._finish(queued)
        finally:
            for _, work in queued:  # nothing may write into the block afterwards
                with suppress(Exception):
                    work.wait()

    def _finish(self, queued: deque[tuple[int, Any]]) -> None:
        stop, work = queued.popleft()
        work.wait()
        self._tell(BytesCame(stop))


def _tensor_of(block: memoryview) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # the publisher only reads
        return torch.frombuffer(block, dtype=torch.uint8)
