"""Commands that must travel over one connection, which redis-py's own calls do not promise."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ExecAbortError, ResponseError

Command = Sequence[object]


@asynccontextmanager
async def one_connection(client: Redis) -> AsyncIterator[Any]:
    """A connection of the pool, for the time of the block. redis-py closes one whose reply was not read to its
    end, for whatever reason: the pool never gets it back half-read."""
    connection = await client.connection_pool.get_connection()
    try:
        yield connection
    finally:
        # Shielded: a second cancellation may not keep it from the pool.
        await asyncio.shield(client.connection_pool.release(connection))


async def exchange(connection: Any, *commands: Command) -> list[Any]:
    """The replies to commands that are sent at once. Raises the first error, once all replies are read."""
    await connection.send_packed_command(connection.pack_commands(commands))
    replies = [await _reply(connection) for _ in commands]
    _raise_first(replies)
    return replies


async def transact(connection: Any, commands: Sequence[Command]) -> list[Any]:
    """The replies to commands that all happen, or none of them. Raises the first error."""
    *_, replies = await exchange(connection, ("MULTI",), *commands, ("EXEC",))
    _raise_first(replies)
    return list(replies)


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
