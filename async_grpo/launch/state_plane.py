"""The server that holds a run's state: embedded and private, or the configured one; checked, connected."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from async_grpo.config import RunConfig
from async_grpo.errors import ConfigError
from async_grpo.launch.run_folder import RunFolder
from async_grpo.weights.store import remove_stores
from buffer import (
    PASSWORD_VARIABLE,
    EmbeddedServer,
    RedisBoard,
    RedisBuffer,
    connect_board,
    knows_run,
    open_run,
    wipe_run,
)


@dataclass(frozen=True, slots=True)
class StatePlane:
    """Buffer and board of a run; `config` carries the URL under which every role reaches them."""

    config: RunConfig
    buffer: RedisBuffer
    board: RedisBoard
    server: EmbeddedServer | None


@asynccontextmanager
async def open_state_plane(config: RunConfig, folder: RunFolder, *, fresh: bool) -> AsyncIterator[StatePlane]:
    """Start or reach the server, connect, and afterwards leave nothing running and no shared memory behind.

    Raises ServerRefused for a server that is too old or may drop data, ConfigError if a foreign run of this
    name is on it.
    """
    server = EmbeddedServer(folder.path / "server", config.redis) if config.redis.url is None else None
    if server is not None:
        os.environ.pop(PASSWORD_VARIABLE, None)  # it is another server's; ours has none and would refuse it
    elif not fresh and not folder.config_file.exists():
        await _refuse_foreign(config)
    try:
        # Launched by this thread, because the server dies with the one that starts it; waited for by another.
        if server is not None:
            server.launch()
        url = await asyncio.to_thread(server.wait_until_ready) if server is not None else config.redis.url
        config = config.model_copy(update={"redis": config.redis.model_copy(update={"url": url})})
        async with _connected(config, server, fresh=fresh) as plane:
            yield plane
    finally:
        if server is not None:
            await asyncio.to_thread(server.stop)
        remove_stores(config.local_name)


@asynccontextmanager
async def _connected(config: RunConfig, server: EmbeddedServer | None, *, fresh: bool) -> AsyncIterator[StatePlane]:
    if fresh:
        await wipe_run(config.redis, config.name)
    buffer = await open_run(config)
    try:
        board = await connect_board(config.redis, config.name)
        try:
            yield StatePlane(config, buffer, board, server)
        finally:
            await board.aclose()
    finally:
        await buffer.aclose()


async def _refuse_foreign(config: RunConfig) -> None:
    """A new run folder, but the server knows the name: it is somebody's run, or an old one's rest. Nothing of it
    is touched."""
    if await knows_run(config.redis, config.name):
        raise ConfigError(
            f"the server at redis.url already holds a run named {config.name}, but {config.run_dir} is "
            "new. Give this run another name (-o name=...), or delete the old one's data with --fresh"
        )
