"""A receiver's part: takes what is broadcast into its slot, proves it, and leaves the rest to be fetched."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from async_grpo.weights.collective.worker import BroadcastOver, BroadcastWorker, BytesCame
from async_grpo.weights.manifest import WeightVersion
from async_grpo.weights.node.fetch import Fetch
from async_grpo.weights.zmq.messages import GroupEntry, GroupInvitation

log = structlog.get_logger()


class BroadcastMember:
    """Takes part in the broadcast of one fetch at a time. Never waits."""

    def __init__(self, worker: BroadcastWorker) -> None:
        self.worker = worker
        self._send: Callable[[GroupEntry], None] | None = None
        self._fetch: Fetch | None = None
        self._next_chunk = 0

    def connect(self, address: str, send: Callable[[GroupEntry], None]) -> None:
        """`address`: of the card that gloo uses. `send` takes entries to the publisher."""
        self.worker.address, self._send = address, send

    def join(self, invitation: GroupInvitation, fetch: Fetch) -> None:
        """Receive the version of this fetch; nothing else may write into its block meanwhile."""
        self._fetch, self._next_chunk = fetch, 0
        self.worker.start(invitation, fetch.identity, fetch.served.block)

    def decline(self, invitation: GroupInvitation) -> None:
        """Tell the group that it will not come about with this receiver."""
        self._tell(GroupEntry(group=invitation.number, key="", value=b"a receiver is not ready any more"))

    def advance(self, arrived: Callable[[WeightVersion, int], None]) -> None:
        """Take what the broadcast has to tell, and report chunks that have `arrived`."""
        for event in self.worker.take():
            if isinstance(event, GroupEntry):
                self._tell(event)
            elif isinstance(event, BytesCame):
                self._prove(event.count, arrived)
            elif isinstance(event, BroadcastOver):
                if event.error:
                    log.info("a broadcast of weights failed; fetching the rest", reason=event.error)
                self._fetch = None

    def _tell(self, entry: GroupEntry) -> None:
        if self._send is not None:
            self._send(entry)

    def _prove(self, count: int, arrived: Callable[[WeightVersion, int], None]) -> None:
        fetch = self._fetch
        assert fetch is not None
        chunks = fetch.served.chunks
        while self._next_chunk < len(chunks) and chunks[self._next_chunk].stop <= count:
            if fetch.prove(self._next_chunk):
                arrived(fetch.identity, self._next_chunk)
            self._next_chunk += 1
