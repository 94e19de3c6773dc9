"""Finds the node that serves a run in a cluster, or the primary through Sentinel.

    connection --find_node--> NodeDiscovery --query a seed (a cluster node, a sentinel)--> address --> connection
    RetryingClient --forget_node, after each failure that another node may not have--> NodeDiscovery

All keys of a run have one hash tag, so one node serves all of them at a time: transactions, scripts and BLPOP use
plain connections to that node. When the node changes (a failover, a moved slot), calls fail. `RetryingClient` then
forgets the node and repeats the calls, and the next connection queries the seeds again. Every query has a time limit,
and the seeds take turns, so a seed that hangs or is out of date delays calls only briefly.
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
    """Queries the seeds for the node, and caches the result until `forget_node`."""

    def __init__(self, address: RedisUrl, options: dict[str, Any], seed_timeout_s: float) -> None:
        """`options`: of a connection to a seed. `seed_timeout_s`: time limit for the query of one seed."""
        self._address = address
        self._seeds = deque(address.nodes)
        self._options = options
        self._seed_timeout_s = seed_timeout_s
        self._node: HostPort | None = None

    def __str__(self) -> str:
        return f"{self._address} (now at {self._node})" if self._node else str(self._address)

    async def find_node(self) -> HostPort:
        """Return the node's address.

        Raises redis-py's ConnectionError if no seed can tell it now, ServerRefused if waiting cannot help.
        """
        if self._node is None:
            self._node = await self._query_seeds()
        return self._node

    def forget_node(self) -> None:
        """Query the seeds again next time, starting with another one."""
        self._node = None
        self._seeds.rotate(-1)

    @property
    @abstractmethod
    def _target(self) -> str:
        """Description of the node for error messages."""

    @abstractmethod
    async def _query_seed(self, seed: HostPort) -> HostPort | None:
        """Return the address of the node; None if the seed does not have it."""

    async def confirm_node(self, connection: Any) -> None:
        """Raise if a new connection has reached a node that cannot serve the run.

        The default checks nothing: a node of a cluster rejects commands for slots of other nodes.
        """
        return None

    async def _query_seeds(self) -> HostPort:
        failures = []
        for seed in list(self._seeds):
            try:
                async with asyncio.timeout(self._seed_timeout_s):
                    node = await self._query_seed(seed)
                if node is not None:
                    return node
                failures.append(f"{seed} knows no {self._target}")
            except (server_errors.RedisError, OSError) as error:
                if not can_pass(find_cause(error)):
                    raise
                failures.append(f"{seed}: {str(error) or 'no reply'}")
        raise server_errors.ConnectionError(f"no node could be found ({'; '.join(failures)})")

    async def _send_to_seed(self, seed: HostPort, *command: str) -> Any:
        connection_class = SSLConnection if self._address.tls else Connection
        connection = connection_class(host=seed.host, port=seed.port, **self._options)
        try:
            await connection.connect()
            await connection.send_command(*command)
            return await connection.read_response()
        finally:
            await connection.disconnect(nowait=True)


class ClusterDiscovery(NodeDiscovery):
    """Finds the primary of a run's slot. All nodes of the cluster become seeds."""

    def __init__(self, address: RedisUrl, key: str, options: dict[str, Any], seed_timeout_s: float) -> None:
        super().__init__(address, options, seed_timeout_s)
        self._slot: int = key_slot(key.encode())

    @property
    def _target(self) -> str:
        return f"node for slot {self._slot}"

    async def _query_seed(self, seed: HostPort) -> HostPort | None:
        try:
            ranges = await self._send_to_seed(seed, "CLUSTER", "SLOTS")
        except server_errors.ResponseError as error:
            if "cluster support disabled" not in str(error):
                raise
            raise ServerRefused(f"the server at {seed} is not part of a cluster. Use redis://{seed}") from error

        primary = None
        cluster_nodes: set[HostPort] = set()
        for first, last, *entries in ranges:
            nodes = [_parse_slot_node(entry, seed) for entry in entries]
            cluster_nodes.update(nodes)
            if first <= self._slot <= last:
                primary = nodes[0]  # its replicas follow it
        self._update_seeds(cluster_nodes)
        return primary

    def _update_seeds(self, cluster_nodes: set[HostPort]) -> None:
        """Use the nodes of the cluster as seeds, and keep the configured ones, which may come back."""
        kept = [node for node in self._seeds if node in self._address.nodes or node in cluster_nodes]
        self._seeds = deque([*kept, *sorted(cluster_nodes.difference(kept))])


class SentinelDiscovery(NodeDiscovery):
    """Queries the sentinels for the primary."""

    @property
    def _target(self) -> str:
        return f"service {self._address.service}"

    async def _query_seed(self, seed: HostPort) -> HostPort | None:
        command = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._address.service)
        reply = await self._send_to_seed(seed, *command)
        if not reply:
            return None
        host, port = reply
        return HostPort(host.decode(), int(port))

    async def confirm_node(self, connection: Any) -> None:
        """Raise ReadOnlyError unless the node is a primary.

        A sentinel that lags behind may return the old primary. That is a replica now, and would answer with old data.
        """
        await connection.send_command("INFO", "replication")
        if b"role:master" not in await connection.read_response():
            raise server_errors.ReadOnlyError(f"{connection.host}:{connection.port} is a replica")


class DiscoveredConnection(Connection):
    """A connection to the node that the discovery finds."""

    def __init__(self, *, discovery: NodeDiscovery, **options: Any) -> None:
        super().__init__(redis_connect_func=_set_up_connection, **options)
        self.discovery = discovery

    async def _connect(self) -> None:
        self.host, self.port = await self.discovery.find_node()
        await super()._connect()


class DiscoveredTlsConnection(DiscoveredConnection, SSLConnection):
    """An encrypted connection to the node that the discovery finds."""


async def _set_up_connection(connection: Any) -> None:
    await connection.on_connect()
    await connection.discovery.confirm_node(connection)


def _parse_slot_node(entry: list[Any], seed: HostPort) -> HostPort:
    """Parse an address in the reply to CLUSTER SLOTS. A missing host means the node that was queried."""
    host = entry[0]
    port = entry[1]
    if not host or host == b"?":
        return HostPort(seed.host, port)
    return HostPort(host.decode(), port)
