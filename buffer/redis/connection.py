"""Commands that must be sent over one connection, which redis-py's own calls do not guarantee."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from redis.asyncio import Redis
from redis.exceptions import ExecAbortError, ResponseError

LARGE = 1 << 14
"""Values of at least this many bytes are passed to the socket without being copied."""


@dataclass(frozen=True, slots=True)
class Call:
    """A command whose first `head_size` parts are packed already, because a script and its keys never change."""

    head: bytes
    head_size: int
    arguments: Sequence[object]


Command = Sequence[object] | Call


@lru_cache(maxsize=256)
def script_head(digest: str, keys: tuple[str, ...]) -> tuple[bytes, int]:
    """EVALSHA up to its last key, packed, and the number of its parts."""
    parts = ("EVALSHA", digest, len(keys), *keys)
    return b"".join(_parts(parts)), len(parts)


_kept: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()
"""Free connections by pool. They are not returned to it, because the pool checks every connection that it hands out for
stray data with a timeout, which takes longer than a short command."""


@asynccontextmanager
async def one_connection(client: Redis) -> AsyncIterator[Any]:
    """A connection of the client for the duration of the block. redis-py closes a connection whose reply was not read
    to its end, so that none is reused half-read."""
    pool = client.connection_pool
    kept = _kept.setdefault(pool, [])
    connection = kept.pop() if kept else await pool.get_connection()
    try:
        yield connection
    except BaseException:
        # Shielded: a second cancellation may not keep it from the pool.
        await asyncio.shield(pool.release(connection))
        raise
    kept.append(connection)


async def release_kept(client: Redis) -> None:
    """Return free connections to the pool, which checks them before they are used again."""
    kept = _kept.pop(client.connection_pool, [])
    for connection in kept:
        await client.connection_pool.release(connection)


async def exchange(connection: Any, *commands: Command) -> list[Any]:
    """Send commands together and return their replies. Raises the first error once all replies are read."""
    await connection.send_packed_command(pack(commands))
    replies = [await _reply(connection) for _ in commands]
    _raise_first(replies)
    return replies


async def transact(connection: Any, commands: Sequence[Command]) -> list[Any]:
    """Send commands as a transaction: all or none. Returns their replies and raises the first error."""
    *_, replies = await exchange(connection, ("MULTI",), *commands, ("EXEC",))
    _raise_first(replies)
    return list(replies)


def pack(commands: Sequence[Command]) -> list[bytes]:
    """Commands in Redis's protocol (RESP 2, https://redis.io/docs/latest/develop/reference/protocol-spec).

    redis-py packs every part of every command each time, which took longer than the server took for a script.
    """
    chunks: list[bytes] = []
    small: list[bytes] = []
    for command in commands:
        head, size, arguments = (
            (command.head, command.head_size, command.arguments) if isinstance(command, Call) else (b"", 0, command)
        )
        small += [b"*%d\r\n" % (size + len(arguments)), head]
        for part in _parts(arguments):
            if len(part) < LARGE:
                small.append(part)
            else:
                chunks += [b"".join(small), part]
                small = []
    return [*chunks, b"".join(small)]


def _parts(values: Sequence[object]) -> Iterator[bytes]:
    for value in values:
        raw = value if isinstance(value, bytes) else str(value).encode()
        yield b"$%d\r\n" % len(raw)
        yield raw
        yield b"\r\n"


async def _reply(connection: Any) -> Any:
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error


def _raise_first(replies: Sequence[Any]) -> None:
    errors = [reply for reply in replies if isinstance(reply, Exception)]
    # EXECABORT only repeats that an earlier command was refused.
    for error in sorted(errors, key=lambda error: isinstance(error, ExecAbortError)):
        raise error
