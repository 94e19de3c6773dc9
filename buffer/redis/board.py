"""`RunBoard` on Redis: one hash for what is kept, one key with a time to live for what must be renewed."""

from __future__ import annotations

import time
from typing import Any

from redis.asyncio import Redis

from async_grpo.config.schema import RedisConfig
from async_grpo.errors import WaitTimeout
from async_grpo.wire import decode, encode
from async_grpo.wire.board import Evaluation, Probe, PublisherAddress, ServerBeat
from buffer.redis.client import make_client
from buffer.redis.keys import Keys

_LONGEST_SLEEP_S = 2.0

_SET_IF_NEWER = """
local epoch = tonumber(redis.call('HGET', KEYS[1], 'publisher_epoch') or '-1')
if tonumber(ARGV[1]) < epoch then return 0 end
redis.call('HSET', KEYS[1], 'publisher_epoch', ARGV[1], 'publisher', ARGV[2])
return 1
"""
_CLAIM = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""


class RedisBoard:
    """See `buffer.board.RunBoard`. Made by `buffer.connect_board`."""

    def __init__(self, client: Redis, sleeper: Redis, run: str) -> None:
        self._client: Any = client  # typed by redis-py as bytes | str; these clients never decode, so bytes
        self._sleeper = sleeper
        self._keys = Keys(run)

    @classmethod
    def over(cls, config: RedisConfig, run: str) -> RedisBoard:
        """The board of `run`."""
        return cls(make_client(config), make_client(config, blocking_s=_LONGEST_SLEEP_S), run)

    async def set_publisher(self, address: PublisherAddress) -> None:
        await self._client.eval(_SET_IF_NEWER, 1, self._name("facts"), str(address.epoch), encode(address))

    async def publisher(self) -> PublisherAddress | None:
        payload = await self._client.hget(self._name("facts"), "publisher")
        return decode(payload, PublisherAddress) if payload else None

    async def beat(self, beat: ServerBeat, *, ttl_s: float) -> None:
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.sadd(self._name("servers"), beat.name)
            pipe.set(self._name("server", beat.name), encode(beat), px=int(ttl_s * 1000))
            await pipe.execute()

    async def servers(self) -> list[ServerBeat]:
        names = sorted(name.decode() for name in await self._client.smembers(self._name("servers")))
        if not names:
            return []
        payloads = await self._client.mget([self._name("server", name) for name in names])
        return [decode(payload, ServerBeat) for payload in payloads if payload]

    async def count(self, name: str, amount: int) -> None:
        await self._client.hincrby(self._name("counters"), name, amount)

    async def counters(self) -> dict[str, int]:
        found = await self._client.hgetall(self._name("counters"))
        return {name.decode(): int(value) for name, value in found.items()}

    async def claim(self, what: str, holder: str, *, ttl_s: float) -> bool:
        return bool(await self._client.eval(_CLAIM, 1, self._name("claim", what), holder, str(int(ttl_s * 1000))))

    async def put_evaluation(self, evaluation: Evaluation) -> None:
        await self._client.hsetnx(self._name("evaluations"), str(evaluation.version), encode(evaluation))

    async def evaluations(self) -> list[Evaluation]:
        found = await self._client.hvals(self._name("evaluations"))
        return sorted((decode(payload, Evaluation) for payload in found), key=lambda one: one.version)

    async def put_probe(self, probe: Probe) -> None:
        async with self._client.pipeline(transaction=True) as pipe:
            pipe.set(self._name("probe"), encode(probe))
            pipe.delete(self._name("wake", "probe"))
            pipe.lpush(self._name("wake", "probe"), 1)
            await pipe.execute()

    async def probe(self, version: int, *, timeout_s: float) -> Probe:
        deadline = time.monotonic() + timeout_s
        while True:
            payload = await self._client.get(self._name("probe"))
            if payload and (found := decode(payload, Probe)).version == version:
                return found
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise WaitTimeout(f"probe samples of version {version} from a rollout server", timeout_s)
            await self._sleeper.blpop([self._name("wake", "probe")], timeout=min(left_s, _LONGEST_SLEEP_S))

    async def aclose(self) -> None:
        await self._client.aclose()
        await self._sleeper.aclose()

    def _name(self, *parts: object) -> str:
        return self._keys("board", *parts)
