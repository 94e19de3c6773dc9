"""StatePlane: the Redis server with a run's state, embedded or configured, and the connections to it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from async_grpo.app.launch.run_folder import RunFolder
from async_grpo.config import RunConfig
from async_grpo.errors import ConfigError
from async_grpo.weights.shared_memory import remove_stores
from buffer import (
    PASSWORD_VARIABLE,
    EmbeddedServer,
    RedisBoard,
    RedisBuffer,
    connect_board,
    open_run,
    run_exists,
    wipe_run,
)


@dataclass(frozen=True, slots=True)
class StatePlane:
    """Buffer and board of a run. `config` has the URL at which all roles reach the server."""

    config: RunConfig
    buffer: RedisBuffer
    board: RedisBoard
    server: EmbeddedServer | None


@asynccontextmanager
async def open_state_plane(config: RunConfig, folder: RunFolder, *, fresh: bool) -> AsyncIterator[StatePlane]:
    """Start the embedded server, or use the configured one, and connect. On exit, stop an embedded server and remove
    the run's shared memory.

    Raises ServerRefused for a server that is too old or may drop data, ConfigError if it holds another run of this
    name.
    """
    server = EmbeddedServer(folder.path / "server", config.redis) if config.redis.url is None else None
    if server is not None:
        # The password belongs to another server. The embedded one has none, and would refuse a client that sends one.
        os.environ.pop(PASSWORD_VARIABLE, None)
    elif not fresh:
        run = await _find_run_on_server(config)
        if run is not None and not folder.owns(run[0]):
            raise _foreign_run_error(config, run[0])
    try:
        url = config.redis.url
        if server is not None:
            # Launch in this thread, because the server dies with the thread that starts it. Only the wait may block
            # another one.
            server.launch()
            url = await asyncio.to_thread(server.wait_until_ready)
        config = config.model_copy(update={"redis": config.redis.model_copy(update={"url": url})})
        async with _connected(config, server, fresh=fresh) as plane:
            if server is None:
                await plane.board.set_origin(folder.origin)
            yield plane
    finally:
        if server is not None:
            await asyncio.to_thread(server.stop)
        remove_stores(config.name_with_digest)


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


async def check_fresh(config: RunConfig, confirm: Callable[[str], bool]) -> None:
    """Check that `--fresh` may delete the run from a shared server. Does nothing for a run with an embedded server.

    Raises ConfigError unless the run belongs to this folder, has no live rollout servers and `confirm` agrees;
    ServerRefused or ServerLost if the server cannot be used.
    """
    if config.redis.url is None:
        return
    run = await _find_run_on_server(config)
    if run is None:
        return

    origin, servers = run
    folder = RunFolder(config.run_dir.absolute())
    if not (folder.owns(origin) or (origin or "").partition(" ")[2] == folder.place):
        raise _foreign_run_error(config, origin)
    if servers:
        raise ConfigError(
            f"the run {config.name} on the server at redis.url is alive: its rollout servers "
            f"{', '.join(servers)} send heartbeats. --fresh would destroy it. "
            "Stop it first, or give this run another name (-o name=...)"
        )
    if not confirm(f"Delete the run {config.name} from the server at {config.redis.url}, and {folder.path}?"):
        raise ConfigError(f"--fresh was not confirmed, so the run {config.name} was not deleted. Omit --fresh")


async def _find_run_on_server(config: RunConfig) -> tuple[str | None, list[str]] | None:
    """Return the origin and the live rollout servers of the run of this name on the configured server; None without
    such a run."""
    if not await run_exists(config.redis, config.name):
        return None
    board = await connect_board(config.redis, config.name)
    try:
        return await board.origin(), [beat.name for beat in await board.live_servers()]
    finally:
        await board.aclose()


def _foreign_run_error(config: RunConfig, origin: str | None) -> ConfigError:
    place = f"in {origin.partition(' ')[2]}" if origin else "elsewhere"
    return ConfigError(
        f"the server at redis.url already holds a run named {config.name}, started {place}, which is not the run of "
        f"{config.run_dir}. It was not changed. Give this run another name (-o name=...), or delete the other one with "
        "--fresh where it was started"
    )
