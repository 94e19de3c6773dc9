"""Find the node that serves a run if the URL names several: a cluster, or a primary under Sentinel.

    connection --find--> NodeDiscovery --asks a seed (a cluster node, a sentinel)--> address of the node --> connection
    RetryingClient --forget, after every failure that another node may mend--> NodeDiscovery

All keys of a run have one hash tag, so one node serves all of them at a time: transactions, scripts and BLPOP use
plain connections to that node. When the node changes (a failover, a moved slot), calls fail, `RetryingClient` forgets
the node and repeats them, and the next connection asks again. Every question has a time limit and the seeds take turns,
so a seed that hangs or is out of date delays calls only briefly.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from typing import Any

from redis import exceptions as server_errors
from redis.asyncio.connection import Connection, SSLConnection
from redis.crc import key_slot

from async_grpo.errors import ServerRefused
from buffer.redis.errors import can_pass, find_cause
from buffer.redis.url import HostPort, RedisUrl


class NodeDiscovery(ABC):
    """Asks the seeds for the node, and remembers the answer until `forget`."""

    def __init__(self, address: RedisUrl, options: dict[str, Any], patience_s: float) -> None:
        """`options` are those of a connection to a seed. `patience_s` is the time limit for one seed."""
        self._address = address
        self._seeds = deque(address.nodes)
        self._options = options
        self._patience_s = patience_s
        self._found: HostPort | None = None

    def __str__(self) -> str:
        return f"{self._address} (now at {self._found})" if self._found else str(self._address)

    async def find(self) -> HostPort:
        """The node's address. Raises redis-py's ConnectionError if no seed knows it now, ServerRefused if none will."""
        if self._found is None:
            self._found = await self._search()
        return self._found

    def forget(self) -> None:
        """Ask again next time, starting with another seed."""
        self._found = None
        self._seeds.rotate(-1)

    @property
    @abstractmethod
    def _sought(self) -> str:
        """What is looked for, in words."""

    @abstractmethod
    async def _ask(self, seed: HostPort) -> HostPort | None:
        """The address that one seed gives; None if it does not know."""

    async def confirm(self, connection: Any) -> None:
        """Raises if a new connection has reached a node that cannot serve the run. The default checks nothing, because
        a node of a cluster refuses every such command itself."""
        return None

    async def _search(self) -> HostPort:
        heard = []
        for seed in list(self._seeds):
            try:
                async with asyncio.timeout(self._patience_s):
                    if found := await self._ask(seed):
                        return found
                heard.append(f"{seed} knows no {self._sought}")
            except (server_errors.RedisError, OSError) as error:
                if not can_pass(find_cause(error)):
                    raise
                heard.append(f"{seed}: {str(error) or 'no reply'}")
        raise server_errors.ConnectionError(f"no node could be found ({'; '.join(heard)})")

    async def _exchange(self, seed: HostPort, *command: str) -> Any:
        kind = SSLConnection if self._address.tls else Connection
        connection = kind(host=seed.host, port=seed.port, **self._options)
        try:
            await connection.connect()
            await connection.send_command(*command)
            return await connection.read_response()
        finally:
            await connection.disconnect(nowait=True)


class ClusterDiscovery(NodeDiscovery):
    """Finds the primary of a run's slot. Every node that the cluster names becomes a seed."""

    def __init__(self, address: RedisUrl, key: str, options: dict[str, Any], patience_s: float) -> None:
        super().__init__(address, options, patience_s)
        self._slot: int = key_slot(key.encode())

    @property
    def _sought(self) -> str:
        return f"node for slot {self._slot}"

    async def _ask(self, seed: HostPort) -> HostPort | None:
        try:
            ranges = await self._exchange(seed, "CLUSTER", "SLOTS")
        except server_errors.ResponseError as error:
            if "cluster support disabled" not in str(error):
                raise
            raise ServerRefused(f"the server at {seed} is not part of a cluster. Use redis://{seed}") from error
        found, met = None, set[HostPort]()
        for first, last, *entries in ranges:
            nodes = [_node(entry, seed) for entry in entries]
            met.update(nodes)
            if first <= self._slot <= last:
                found = nodes[0]
        self._learn(met)
        return found

    def _learn(self, met: set[HostPort]) -> None:
        """Keep the configured seeds, and of the others those that are in the cluster now."""
        kept = [node for node in self._seeds if node in self._address.nodes or node in met]
        self._seeds = deque([*kept, *sorted(met.difference(kept))])


class SentinelDiscovery(NodeDiscovery):
    """Asks the sentinels for the primary."""

    @property
    def _sought(self) -> str:
        return f"service {self._address.service}"

    async def _ask(self, seed: HostPort) -> HostPort | None:
        command = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._address.service)
        answer = await self._exchange(seed, *command)
        return HostPort(answer[0].decode(), int(answer[1])) if answer else None

    async def confirm(self, connection: Any) -> None:
        """A sentinel that lags behind may name the old primary, which as a replica would answer reads with old data."""
        await connection.send_command("INFO", "replication")
        if b"role:master" not in await connection.read_response():
            raise server_errors.ReadOnlyError(f"{connection.host}:{connection.port} is a replica")


class FoundConnection(Connection):
    """A connection to the node that the discovery finds."""

    def __init__(self, *, discovery: NodeDiscovery, **options: Any) -> None:
        super().__init__(redis_connect_func=_greet, **options)
        self.discovery = discovery

    async def _connect(self) -> None:
        self.host, self.port = await self.discovery.find()
        await super()._connect()


class FoundTlsConnection(FoundConnection, SSLConnection):
    """An encrypted connection to the node that the discovery finds."""


async def _greet(connection: Any) -> None:
    await connection.on_connect()
    await connection.discovery.confirm(connection)


def _node(entry: list[Any], seed: HostPort) -> HostPort:
    """An address in the reply to CLUSTER SLOTS. A missing host means the node that was asked."""
    host, port = entry[0], entry[1]
    return HostPort(host.decode() if host and host != b"?" else seed.host, port)
