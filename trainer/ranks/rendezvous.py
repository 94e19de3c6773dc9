"""How the nodes find each other before ranks are started, if no launcher starts the ranks themselves.

    node 0    listens, receives the Hello of every other node, sends Start
    node R    connects and sends Hello, until node 0 answers with Start

All nodes wait at most `rendezvous.timeout_s`. A node that arrives after all have met was restarted alone: then the
ranks of the others wait for its earlier process, so node 0 ends them, and the newcomer retries until all nodes have
been restarted. The ranks compare later what they would train (`trainer.ranks.agreement`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import structlog

from async_grpo.config.trainer import RendezvousConfig
from async_grpo.errors import ConfigError, NodeLost, WaitTimeout, WireError
from trainer.ranks.peers import Busy, Ended, Hello, PeerConnection, Refused, Start
from trainer.ranks.store import listen

HELLO_S = 10.0
"""Seconds that a new connection has to send its Hello."""

START_IT = "Start `async-grpo trainer CONFIG --node-rank R` there, and let it reach that port"
_RETRY_S = 0.5
log = structlog.get_logger()


def find_objection(own: Hello, other: Hello, place: str) -> str | None:
    """Return why node 0 (`own`, listening at `place`) cannot accept the other node; None if it can."""
    if other.id != own.id:
        return (
            f"node 0 at {place} trains {own.id!r}, and this node {other.id!r} (trainer.rendezvous.id, or the name of "
            "the run). Give each run its own port"
        )
    if (other.nodes, other.processes) != (own.nodes, own.processes):
        return (
            f"node {other.rank} has trainer.nodes {other.nodes} and trainer.processes {other.processes}, and node 0 "
            f"{own.nodes} and {own.processes}. Start all nodes with the same CONFIG and -o"
        )
    if not 0 < other.rank < own.nodes:
        return f"node {other.rank} connected to node 0, but trainer.nodes is {own.nodes}. Correct --node-rank"
    return None


@dataclass(frozen=True, slots=True)
class Invitation:
    """Address of the rendezvous, and the Hello of this node."""

    where: RendezvousConfig
    address: str
    hello: Hello

    @property
    def place(self) -> str:
        """Address at which node 0 listens, for error messages."""
        return f"trainer.rendezvous, {self.address}:{self.where.port}"


@dataclass(slots=True)
class Host:
    """Node 0 of the rendezvous, and the nodes that have joined."""

    invitation: Invitation
    connections: dict[int, PeerConnection] = field(default_factory=dict)
    """Connections by rank of the node."""
    node_restarted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a node arrives after all have met: it was restarted."""
    restarted_peer: str = ""
    last_rejection: str = ""
    """The node that was rejected last, and the reason; "" if there is none."""
    _complete: asyncio.Event = field(default_factory=asyncio.Event)

    async def receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle a new connection: accept the node, or send it the reason and close the connection."""
        address = writer.get_extra_info("peername")[0]
        connection = PeerConnection(reader, writer, f"a caller at {address}")
        accepted = False
        try:
            async with asyncio.timeout(HELLO_S):
                hello = await connection.expect(Hello)
            connection.peer = f"node {hello.rank} ({address})"
            accepted = await self._accept(connection, hello)
        except WireError as error:
            self._log_rejection(connection, str(error))
        except (TimeoutError, NodeLost):
            pass  # no Hello: a port scan, or a health check
        finally:
            if not accepted:
                await connection.close()

    async def _accept(self, connection: PeerConnection, hello: Hello) -> bool:
        """Accept a node that belongs to this trainer. Returns False if it was rejected."""
        reason = find_objection(self.invitation.hello, hello, self.invitation.place)
        if reason is not None:
            self._log_rejection(connection, reason)
            connection.send(Refused(reason=reason))
            return False
        if self._complete.is_set():
            self.restarted_peer = connection.peer
            self.node_restarted.set()
            connection.send(Busy())
            return False
        # Before all have met, a node may restart freely: its new connection replaces the old one.
        earlier = self.connections.get(hello.rank)
        self.connections[hello.rank] = connection
        if len(self.connections) == self.invitation.hello.nodes - 1:
            self._complete.set()
        if earlier is not None:
            await earlier.close()
        return True

    def _log_rejection(self, connection: PeerConnection, reason: str) -> None:
        log.warning("node rejected", node=connection.peer, reason=reason)
        self.last_rejection = f"{connection.peer} was rejected: {reason}"

    async def wait_for_all(self) -> None:
        """Wait until every node has joined. Raises WaitTimeout."""
        timeout_s = self.invitation.where.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._complete.wait()
        except TimeoutError:
            missing = ", ".join(
                str(rank) for rank in range(1, self.invitation.hello.nodes) if rank not in self.connections
            )
            fix = self.last_rejection or START_IT
            raise WaitTimeout(f"node {missing} of the trainer ({self.invitation.place})", timeout_s, fix) from None

    async def dismiss(self, error: WaitTimeout) -> None:
        """Send the reason to all nodes that have joined, before the trainer ends."""
        for connection in self.connections.values():
            connection.send(Ended(reason=str(error)))

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(connection.close() for connection in self.connections.values()))


@asynccontextmanager
async def host_rendezvous(invitation: Invitation) -> AsyncIterator[Host]:
    """Serve the rendezvous as node 0. Yields once all other nodes have joined and wait for `Start`.

    Raises ConfigError, and WaitTimeout, which is also sent to the nodes that have joined. All connections are closed on
    exit.
    """
    host = Host(invitation)
    listener = listen(invitation.address, invitation.where.port)
    server = await asyncio.start_server(host.receive, sock=listener)
    # Log the actual address: a host name may resolve to the loopback by mistake.
    address, port = listener.getsockname()
    log.info("waiting for the other nodes", listening=f"{address}:{port}", nodes=invitation.hello.nodes)
    try:
        try:
            await host.wait_for_all()
        except WaitTimeout as error:
            await host.dismiss(error)
            raise
        yield host
    finally:
        server.close()
        await host.close()


async def join_rendezvous(invitation: Invitation) -> PeerConnection:
    """Join as a node other than 0. Returns the connection to node 0 after its `Start`.

    Raises WaitTimeout, ConfigError, NodeLost, and WireError for a node 0 of another release.
    """
    timeout_s = invitation.where.timeout_s
    log.info("looking for node 0", at=f"{invitation.address}:{invitation.where.port}", node=invitation.hello.rank)
    state = "it does not answer: is it started, and is the port open?"
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                with contextlib.suppress(OSError):
                    connection = await _send_hello(invitation)
                    state = "it answers, but other nodes are missing, or it waits for an earlier process of this one"
                    if await _wait_for_start(connection):
                        return connection
                await asyncio.sleep(_RETRY_S)
    except TimeoutError:
        raise WaitTimeout(f"node 0 of the trainer ({invitation.place}) to start", timeout_s, state) from None


async def _send_hello(invitation: Invitation) -> PeerConnection:
    async with asyncio.timeout(HELLO_S):
        reader, writer = await asyncio.open_connection(invitation.address, invitation.where.port)
    connection = PeerConnection(reader, writer, f"node 0 ({invitation.address})")
    connection.send(invitation.hello)
    return connection


async def _wait_for_start(connection: PeerConnection) -> bool:
    """Return True after `Start`. Otherwise close the connection, and return False if it is worth to try again.

    Raises ConfigError, NodeLost, WireError.
    """
    async with contextlib.AsyncExitStack() as close_unless_started:
        close_unless_started.push_async_callback(connection.close)
        try:
            message = await connection.receive()
        except NodeLost:
            return False
        match message:
            case Start():
                close_unless_started.pop_all()
                return True
            case Refused(reason=reason):
                raise ConfigError(reason)
            case Ended(reason=reason):
                raise NodeLost(f"{connection.peer} has ended: {reason}")
            case _:
                return False
