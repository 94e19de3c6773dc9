"""How the nodes find each other, and what they check before a rank is started.

    node 0    listens --> Hello of every other node --> do they agree? --> do they see one folder? --> Start
    node R    connects, again and again, until node 0 is there and begins

Node 0 waits for the others and they wait for node 0, all of them for `rendezvous.timeout_s`. A node that comes when all
have met already was started again. Node 0 is told, because its ranks wait for the earlier process of that node. The
newcomer asks again until all nodes have been started again.

Two nodes agree if they have the same configuration and first policy. All nodes see the same folder of checkpoints if
each finds there the file that the other has left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import structlog
import xxhash
import yaml

from async_grpo.config.load import differing_keys
from async_grpo.config.trainer import RendezvousConfig
from async_grpo.errors import AsyncGrpoError, ConfigError, NodeLost, WaitTimeout, WireError
from trainer.peers import Busy, CheckFolder, Ended, FolderChecked, Hello, PeerConnection, Refused, Start

_ENDS_BYTES = 1 << 20

LOOK_S = 30.0
"""Seconds that a file of another machine may take to appear: as long as NFS caches a folder without it."""

_LOOK_EVERY_S = 0.1

HELLO_S = 10.0
"""Seconds that a new connection has to send its Hello."""

START_IT = "Start `async-grpo trainer CONFIG --node-rank R` there, and let it reach that port"
_RETRY_S = 0.5
_ANSWER_S = 2 * LOOK_S
log = structlog.get_logger()


def objection(own: Hello, other: Hello, *, nodes: int, place: str) -> str | None:
    """Why node 0, which says `own` of itself at `place`, cannot take the other node in. Value, rule and fix."""
    if other.id != own.id:
        return (
            f"node 0 at {place} trains {own.id!r}, and this one {other.id!r} (trainer.rendezvous.id, or the name of "
            "the run). Give each run its own port"
        )
    if not 0 < other.rank < nodes:
        return f"a node {other.rank} came to node 0, but trainer.nodes is {nodes}. Correct --node-rank"
    if keys := differing_keys(yaml.safe_load(own.config), yaml.safe_load(other.config)):
        return (
            f"node {other.rank} has other values than node 0 of {', '.join(keys)}: their ranks would not do the same. "
            "Start all nodes with the same CONFIG and -o"
        )
    if other.model != own.model:
        return (
            f"node {other.rank} has another first policy than node 0: their ranks would train parts of different "
            "models. Set model.path to one folder that all see, or to copies of the same files"
        )
    return None


def fingerprint(model: Path) -> str:
    """A hash of a model's configuration and weights: names, sizes, and the first and last MiB of every file.

    Enough to tell models apart that were made or fetched differently, without reading all of one.
    """
    state = xxhash.xxh3_128()
    for file in sorted([*model.glob("*.safetensors"), *model.glob("*.json")]):
        size = file.stat().st_size
        state.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            state.update(stream.read(_ENDS_BYTES))
            stream.seek(max(0, size - _ENDS_BYTES))
            state.update(stream.read(_ENDS_BYTES))
    return state.hexdigest()


@contextlib.contextmanager
def marker_file(folder: Path) -> Iterator[str]:
    """Make a file in the folder (and the folder) for the length of the block; yields its name. Raises ConfigError."""
    file = folder / f".met-{os.urandom(8).hex()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.touch()
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written to ({error}), and every node writes its part of a checkpoint there. Mount "
            "runs_dir for writing on each of them"
        ) from None
    try:
        yield file.name
    finally:
        file.unlink(missing_ok=True)


async def file_appears(folder: Path, name: str, look_s: float = LOOK_S) -> bool:
    """Whether the file appears in the folder within `look_s`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(look_s):
            while not (folder / Path(name).name).exists():  # noqa: ASYNC110  (no one could set an event)
                await asyncio.sleep(_LOOK_EVERY_S)
            return True
    return False


@dataclass(frozen=True, slots=True)
class Invitation:
    """What a node knows about the rendezvous before it begins."""

    where: RendezvousConfig
    address: str
    nodes: int
    hello: Hello
    """How this node introduces itself."""
    folder: Path
    """Folder of the checkpoints."""

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
        reason = objection(self.invitation.hello, hello, nodes=self.invitation.nodes, place=self.invitation.place)
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
        if len(self.connections) == self.invitation.nodes - 1:
            self._complete.set()
        if earlier_life is not None:
            await earlier_life.close()
        return True

    def _turn_away(self, connection: PeerConnection, reason: str) -> None:
        log.warning("a node is turned away", node=connection.peer, reason=reason)
        self.turned_away = f"{connection.peer} was turned away: {reason}"

    async def gather(self) -> None:
        """Wait until every node has come, agrees, and sees the same folder.

        Raises WaitTimeout, ConfigError, NodeLost, and WireError for a node of another release.
        """
        timeout_s = self.invitation.where.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._complete.wait()
        except TimeoutError:
            missing = ", ".join(str(rank) for rank in range(1, self.invitation.nodes) if rank not in self.connections)
            fix = self.turned_away or START_IT
            raise WaitTimeout(f"node {missing} of the trainer ({self.invitation.place})", timeout_s, fix) from None
        with marker_file(self.invitation.folder) as name:
            for connection in self.connections.values():
                connection.send(CheckFolder(name=name))
            await asyncio.gather(*(self._check_folder(connection) for connection in self.connections.values()))

    async def _check_folder(self, connection: PeerConnection) -> None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                seen = await connection.expect(FolderChecked)
        except TimeoutError:
            raise WaitTimeout(
                f"{connection.peer} to look into its run folder", _ANSWER_S, "Does its file system hang?"
            ) from None
        if not (seen.found and await file_appears(self.invitation.folder, seen.name)):
            raise ConfigError(
                f"{self.invitation.folder} of node 0 is not the folder that {connection.peer} has as {seen.folder}: a "
                f"file written to one was not seen in the other within {LOOK_S:g} s, and no checkpoint would be whole. "
                "Set runs_dir to a folder that all nodes share (NFS, Lustre)"
            )

    async def dismiss(self, error: AsyncGrpoError) -> None:
        """Tell all nodes that have come why there will be no training."""
        for connection in self.connections.values():
            connection.send(Refused(reason=str(error)) if isinstance(error, ConfigError) else Ended(reason=str(error)))

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(connection.close() for connection in self.connections.values()))


@asynccontextmanager
async def hosted(invitation: Invitation) -> AsyncIterator[Host]:
    """Serve the rendezvous as node 0: yields once all others are there and wait for `Start`.

    Raises WaitTimeout, ConfigError, NodeLost, WireError; the others are told. No connection is open afterwards.
    """
    host = Host(invitation)
    listener = listen(invitation.address, invitation.where.port)
    server = await asyncio.start_server(host.receive, sock=listener)
    found, port = listener.getsockname()  # not what was meant, where a name stands for the loopback
    log.info("waiting for the other nodes", listening=f"{found}:{port}", nodes=invitation.nodes)
    try:
        try:
            await host.gather()
        except AsyncGrpoError as error:
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
                    if await _begins(connection, invitation):
                        return connection
                await asyncio.sleep(_RETRY_S)
    except TimeoutError:
        raise WaitTimeout(f"node 0 of the trainer ({invitation.place}) to begin", timeout_s, state) from None


def listen(address: str, port: int) -> socket.socket:
    """A listening socket at that address and no other. Raises ConfigError."""
    try:
        return socket.create_server((address, port), backlog=128)
    except OSError as error:
        raise ConfigError(
            f"node 0 cannot listen at {address}:{port} (trainer.rendezvous): {error}. It must be an address of this "
            "machine, with this port and the next one free: another trainer may still be running here"
        ) from None


async def _call(invitation: Invitation) -> PeerConnection:
    async with asyncio.timeout(HELLO_S):
        reader, writer = await asyncio.open_connection(invitation.address, invitation.where.port)
    connection = PeerConnection(reader, writer, f"node 0 ({invitation.address})")
    connection.send(invitation.hello)
    return connection


async def _begins(connection: PeerConnection, invitation: Invitation) -> bool:
    """Whether the training starts; if not, node 0 is to be asked again, and the connection is closed.

    Raises ConfigError, NodeLost, WireError.
    """
    async with contextlib.AsyncExitStack() as unless_it_starts:
        unless_it_starts.push_async_callback(connection.close)
        files = unless_it_starts.enter_context(contextlib.ExitStack())
        while True:
            try:
                message = await connection.receive()
            except NodeLost:
                return False
            match message:
                case CheckFolder(name=name):
                    own = files.enter_context(marker_file(invitation.folder))
                    found = await file_appears(invitation.folder, name)
                    connection.send(FolderChecked(found=found, folder=str(invitation.folder), name=own))
                case Start():
                    files.close()
                    unless_it_starts.pop_all()
                    return True
                case Busy():
                    return False
                case Refused(reason=reason):
                    raise ConfigError(reason)
                case Ended(reason=reason):
                    raise NodeLost(f"{connection.peer} has ended: {reason}")
