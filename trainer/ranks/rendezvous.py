"""How the nodes find each other before a rank is started, where no launcher starts the ranks themselves.

    node 0    listens --> Hello of every other node --> Start
    node R    connects, again and again, until node 0 is there and begins

Node 0 waits for the others and they wait for node 0, all of them for `rendezvous.timeout_s`. A node that comes when all
have met already was started again. Node 0 is told, because its ranks wait for the earlier process of that node. The
newcomer asks again until all nodes have been started again. What the nodes would train is compared by their ranks
(`trainer.ranks.agreement`).
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


def objection(own: Hello, other: Hello, place: str) -> str | None:
    """Why node 0, which says `own` of itself at `place`, cannot take the other node in. Value, rule and fix."""
    if other.id != own.id:
        return (
            f"node 0 at {place} trains {own.id!r}, and this one {other.id!r} (trainer.rendezvous.id, or the name of "
            "the run). Give each run its own port"
        )
    if (other.nodes, other.processes) != (own.nodes, own.processes):
        return (
            f"node {other.rank} has trainer.nodes {other.nodes} and trainer.processes {other.processes}, and node 0 "
            f"{own.nodes} and {own.processes}. Start all nodes with the same CONFIG and -o"
        )
    if not 0 < other.rank < own.nodes:
        return f"a node {other.rank} came to node 0, but trainer.nodes is {own.nodes}. Correct --node-rank"
    return None


@dataclass(frozen=True, slots=True)
class Invitation:
    """What a node knows about the rendezvous before it begins."""

    where: RendezvousConfig
    address: str
    hello: Hello
    """How this node introduces itself."""

    @property
    def place(self) -> str:
        """Where node 0 listens, for error messages."""
        return f"trainer.rendezvous, {self.address}:{self.where.port}"


@dataclass(slots=True)
class Host:
    """Node 0 of the rendezvous, and who has come."""

    invitation: Invitation
    connections: dict[int, PeerConnection] = field(default_factory=dict)
    """Connections by rank of the node."""
    again: asyncio.Event = field(default_factory=asyncio.Event)
    """A node that had come has been started again."""
    again_peer: str = ""
    turned_away: str = ""
    """The last node that was turned away, and why."""
    _complete: asyncio.Event = field(default_factory=asyncio.Event)

    async def receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle a new connection: accept the node, or tell it why not and hang up."""
        address = writer.get_extra_info("peername")[0]
        connection = PeerConnection(reader, writer, f"a caller at {address}")
        stays = False
        try:
            async with asyncio.timeout(HELLO_S):
                hello = await connection.expect(Hello)
            connection.peer = f"node {hello.rank} ({address})"
            stays = await self._takes_in(connection, hello)
        except WireError as error:
            self._turn_away(connection, str(error))
        except (TimeoutError, NodeLost):
            pass  # it sent no Hello: a port scan, or a health check
        finally:
            if not stays:
                await connection.close()

    async def _takes_in(self, connection: PeerConnection, hello: Hello) -> bool:
        """Whether the node belongs to this trainer; if it does not, it is told why."""
        reason = objection(self.invitation.hello, hello, self.invitation.place)
        if reason is not None:
            self._turn_away(connection, reason)
            connection.send(Refused(reason=reason))
            return False
        if self._complete.is_set():
            self.again_peer = connection.peer
            self.again.set()
            connection.send(Busy())
            return False
        earlier_life = self.connections.get(hello.rank)
        self.connections[hello.rank] = connection
        if len(self.connections) == self.invitation.hello.nodes - 1:
            self._complete.set()
        if earlier_life is not None:
            await earlier_life.close()
        return True

    def _turn_away(self, connection: PeerConnection, reason: str) -> None:
        log.warning("a node is turned away", node=connection.peer, reason=reason)
        self.turned_away = f"{connection.peer} was turned away: {reason}"

    async def gather(self) -> None:
        """Wait until every node has come. Raises WaitTimeout."""
        timeout_s = self.invitation.where.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._complete.wait()
        except TimeoutError:
            missing = ", ".join(
                str(rank) for rank in range(1, self.invitation.hello.nodes) if rank not in self.connections
            )
            fix = self.turned_away or START_IT
            raise WaitTimeout(f"node {missing} of the trainer ({self.invitation.place})", timeout_s, fix) from None

    async def dismiss(self, error: WaitTimeout) -> None:
        """Tell all nodes that have come why there will be no training."""
        for connection in self.connections.values():
            connection.send(Ended(reason=str(error)))

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(connection.close() for connection in self.connections.values()))


@asynccontextmanager
async def hosted(invitation: Invitation) -> AsyncIterator[Host]:
    """Serve the rendezvous as node 0: yields once all others are there and wait for `Start`.

    Raises ConfigError, and WaitTimeout, of which the others are told. No connection is open afterwards.
    """
    host = Host(invitation)
    listener = listen(invitation.address, invitation.where.port)
    server = await asyncio.start_server(host.receive, sock=listener)
    found, port = listener.getsockname()  # not what was meant, where a name stands for the loopback
    log.info("waiting for the other nodes", listening=f"{found}:{port}", nodes=invitation.hello.nodes)
    try:
        try:
            await host.gather()
        except WaitTimeout as error:
            await host.dismiss(error)
            raise
        yield host
    finally:
        server.close()
        await host.close()


async def join(invitation: Invitation) -> PeerConnection:
    """Join as a node other than 0: returns the connection to node 0 once its `Start` has come.

    Raises WaitTimeout, ConfigError, NodeLost, and WireError for a node 0 of another release; it is closed then.
    """
    timeout_s = invitation.where.timeout_s
    log.info("looking for node 0", at=f"{invitation.address}:{invitation.where.port}", node=invitation.hello.rank)
    state = "it does not answer: is it started, and is the port open?"
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                with contextlib.suppress(OSError):
                    connection = await _call(invitation)
                    state = "it answers, but other nodes are missing, or it waits for an earlier process of this one"
                    if await _begins(connection):
                        return connection
                await asyncio.sleep(_RETRY_S)
    except TimeoutError:
        raise WaitTimeout(f"node 0 of the trainer ({invitation.place}) to begin", timeout_s, state) from None


async def _call(invitation: Invitation) -> PeerConnection:
    async with asyncio.timeout(HELLO_S):
        reader, writer = await asyncio.open_connection(invitation.address, invitation.where.port)
    connection = PeerConnection(reader, writer, f"node 0 ({invitation.address})")
    connection.send(invitation.hello)
    return connection


async def _begins(connection: PeerConnection) -> bool:
    """Whether the training starts; if not, node 0 is to be asked again, and the connection is closed.

    Raises ConfigError, NodeLost, WireError.
    """
    async with contextlib.AsyncExitStack() as unless_it_starts:
        unless_it_starts.push_async_callback(connection.close)
        try:
            message = await connection.receive()
        except NodeLost:
            return False
        match message:
            case Start():
                unless_it_starts.pop_all()
                return True
            case Refused(reason=reason):
                raise ConfigError(reason)
            case Ended(reason=reason):
                raise NodeLost(f"{connection.peer} has ended: {reason}")
            case _:
                return False
