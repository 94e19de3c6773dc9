"""Sends several commands over one connection, which redis-py's own calls do not guarantee."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import hiredis
from redis.asyncio import Redis
from redis.exceptions import ExecAbortError, ResponseError

LARGE_BYTES = 1 << 14
"""Size in bytes from which a value is passed to the socket without a copy."""

Command = Sequence[bytes | str | int | float]


@asynccontextmanager
async def use_connection(client: Redis) -> AsyncIterator[Any]:
    """Take a connection of the client for the duration of the block.

    redis-py closes a connection whose reply was not read completely, so a half-read connection is never reused.
    """
    pool = client.connection_pool
    connection = await pool.get_connection()
    try:
        yield connection
    except BaseException:
        # Shielded: a second cancellation here would leave the connection in use for ever, and the pool has a limit.
        await asyncio.shield(pool.release(connection))
        raise
    await pool.release(connection)


async def send_commands(connection: Any, *commands: Command) -> list[Any]:
    """Send commands together and return their replies. Raises the first error once all replies are read."""
    await connection.send_packed_command(pack_commands(commands))
    replies = [await _read_reply(connection) for _ in commands]
    _raise_first(replies)
    return replies


async def send_transaction(connection: Any, commands: Sequence[Command]) -> list[Any]:
    """Send commands as a transaction and return their replies. Raises the first error."""
    *_, replies = await send_commands(connection, ("MULTI",), *commands, ("EXEC",))
    _raise_first(replies)
    return list(replies)


def pack_commands(commands: Sequence[Command]) -> list[bytes]:
    """Return the commands in the protocol of Redis, as chunks for the socket."""
    chunks: list[bytes] = []
    for command in commands:
        if any(_is_large(part) for part in command):
            chunks += _pack_uncopied(command)
        else:
            chunks.append(hiredis.pack_command(tuple(command)))  # type: ignore[arg-type]  # its stub: one part only
    return chunks


def _pack_uncopied(command: Command) -> list[bytes]:
    """Pack a command with a large value without copying it. hiredis would copy it, which takes longer than the rest."""
    chunks: list[bytes] = []
    small = [b"*%d\r\n" % len(command)]
    for part in command:
        raw = part if isinstance(part, bytes) else str(part).encode()
        small.append(b"$%d\r\n" % len(raw))
        if len(raw) < LARGE_BYTES:
            small += [raw, b"\r\n"]
        else:
            chunks += [b"".join(small), raw]
            small = [b"\r\n"]
    return [*chunks, b"".join(small)]


def _is_large(part: bytes | str | float) -> bool:
    return isinstance(part, bytes) and len(part) >= LARGE_BYTES


async def _read_reply(connection: Any) -> Any:
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error


def _raise_first(replies: Sequence[Any]) -> None:
    errors = [reply for reply in replies if isinstance(reply, Exception)]
    if not errors:
        return
    # EXECABORT only repeats that an earlier command of the transaction was refused, so prefer the error of that one.
    for error in errors:
        if not isinstance(error, ExecAbortError):
            raise error
    raise errors[0]
