"""StatePlane: the server that holds a run's state, embedded or configured, with the connections to it."""

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
    """Buffer and board of a run; `config` has the URL at which every role reaches them."""

    config: RunConfig
    buffer: RedisBuffer
    board: RedisBoard
    server: EmbeddedServer | None


@asynccontextmanager
async def open_state_plane(config: RunConfig, folder: RunFolder, *, fresh: bool) -> AsyncIterator[StatePlane]:
    """Start or reach the server and connect; afterwards no server and no shared memory is left.

    Raises ServerRefused for a server that is too old or may drop data, ConfigError if a foreign run of this
    name is on it.
    """
    server = EmbeddedServer(folder.path / "server", config.redis) if config.redis.url is None else None
    if server is not None:
        os.environ.pop(PASSWORD_VARIABLE, None)  # it is another server's; ours has none and would refuse it
    elif not fresh and (run := await _on_server(config)) is not None and not folder.owns(run[0]):
        raise _foreign(config, run[0])
    try:
        # Launched by this thread, because the server dies with the one that starts it; waited for by another.
        if server is not None:
            server.launch()
        url = await asyncio.to_thread(server.wait_until_ready) if server is not None else config.redis.url
        config = config.model_copy(update={"redis": config.redis.model_copy(update={"url": url})})
        async with _connected(config, server, fresh=fresh) as plane:
            if server is None:
                await plane.board.set_origin(folder.origin)
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


async def check_fresh(config: RunConfig, confirm: Callable[[str], bool]) -> None:
    """Check what `--fresh` may delete. A run on its own server has nothing outside its folder. From a shared server a
    run is deleted only if it belongs to this folder, no process works for it and `confirm` agrees.

    Raises ConfigError for any other run, ServerRefused or ServerLost if the server cannot be used.
    """
    if config.redis.url is None or (run := await _on_server(config)) is None:
        return
    folder, (origin, servers) = RunFolder(config.run_dir.absolute()), run
    if not (folder.owns(origin) or (origin or "").partition(" ")[2] == folder.place):
        raise _foreign(config, origin)
    if servers:
        raise ConfigError(
            f"the run {config.name} on the server at redis.url is alive: its rollout servers "
            f"{', '.join(servers)} have just been heard of. --fresh would destroy it. "
            "Stop it first, or give this run another name (-o name=...)"
        )
    if not confirm(f"Delete the run {config.name} from the server at {config.redis.url}, and {folder.path}?"):
        raise ConfigError(f"--fresh was not confirmed: nothing of the run {config.name} is deleted. Leave --fresh out")


async def _on_server(config: RunConfig) -> tuple[str | None, list[str]] | None:
    """The origin of the run of this name on the configured server, and its live rollout servers; None if none is
    there."""
    if not await run_exists(config.redis, config.name):
        return None
    board = await connect_board(config.redis, config.name)
    try:
        return await board.origin(), [beat.name for beat in await board.live_servers()]
    finally:
        await board.aclose()


def _foreign(config: RunConfig, origin: str | None) -> ConfigError:
    begun = f"begun in {origin.partition(' ')[2]}" if origin else "begun elsewhere"
    return ConfigError(
        f"the server at redis.url already holds a run named {config.name}, {begun}, and that is not the run of "
        f"{config.run_dir}. Nothing of it is touched. Give this run another name (-o name=...), or delete the other "
        "one by --fresh where it was begun"
    )
