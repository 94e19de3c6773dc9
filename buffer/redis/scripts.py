"""The Lua scripts: loaded from lua/*.lua, called by digest, sent again when the server has forgotten them."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError


@cache
def source(name: str) -> str:
    """The text of a script with the prelude in front of it."""
    folder = files("buffer.redis") / "lua"
    return (folder / "prelude.lua").read_text() + (folder / f"{name}.lua").read_text()


@cache
def _digest(name: str) -> str:
    return hashlib.sha1(source(name).encode(), usedforsecurity=False).hexdigest()


async def call(client: Redis, name: str, meta_key: str, *arguments: object) -> Any:
    """Run a script atomically; it touches only keys of the run that `meta_key` belongs to."""
    encoded = [str(argument) for argument in arguments]
    try:
        return await client.evalsha(_digest(name), 1, meta_key, *encoded)
    except NoScriptError:
        return await client.eval(source(name), 1, meta_key, *encoded)
