"""The run board on Redis, with the same hash tag as the buffer of the run."""

from __future__ import annotations

import uuid

from async_grpo.errors import WaitTimeout
from async_grpo.wire import decode, encode
from async_grpo.wire.board import Evaluation, Probe, PublisherAddress, ReplayProgress, ServerBeat
from buffer.redis.client import RunClient
from buffer.redis.retrying import Payload, RetryingClient, RetryLater
from buffer.redis.scripts import RunKeys, load_script

REMEMBER_REQUEST_MS = 120_000
"""Time for which a repeated `add_to_counter` is recognised."""


class RedisBoard:
    """The `RunBoard` that all processes of a run share. Made by `buffer.connect_board`."""

    def __init__(self, client: RunClient, run: str, *, timeout_s: float = 30.0) -> None:
        """`aclose` closes `client`."""
        self._link = RetryingClient(client, timeout_s)
        self._client = self._link.client
        self._prefix = RunKeys(run).key("board:")

    async def set_origin(self, origin: str) -> None:
        """Store the run folder that the run belongs to."""
        await self._link.call(lambda: self._client.set(self._key("origin"), origin))

    async def origin(self) -> str | None:
        """Return the stored run folder; None for a run whose roles were started one by one."""
        (payload,) = await self._link.fetch_values([self._key("origin")])
        return None if payload is None else payload.decode()

    async def set_publisher(self, address: PublisherAddress) -> None:
        await self._set_unless_older("publisher", address)

    async def publisher_address(self) -> PublisherAddress | None:
        (payload,) = await self._link.fetch_values([self._key("publisher")])
        return None if payload is None else decode(payload, PublisherAddress)

    async def report_replay(self, progress: ReplayProgress) -> None:
        await self._set_unless_older("replay", progress)

    async def replay_progress(self) -> ReplayProgress | None:
        (payload,) = await self._link.fetch_values([self._key("replay")])
        return None if payload is None else decode(payload, ReplayProgress)

    async def announce_server(self, beat: ServerBeat, *, ttl_s: float) -> None:
        await self._link.call(lambda: self._store_beat(beat, _milliseconds(ttl_s)))

    async def live_servers(self) -> list[ServerBeat]:
        # The set has every name that was ever announced; only the heartbeats expire.
        names = await self._link.call(lambda: self._client.smembers(self._key("servers")))
        payloads = await self._link.fetch_values([self._key(f"server:{name.decode()}") for name in sorted(names)])
        return [decode(payload, ServerBeat) for payload in payloads if payload is not None]

    async def add_to_counter(self, name: str, amount: int) -> None:
        keys = [self._key("counters"), self._key(f"counted:{uuid.uuid4().hex}")]
        await self._link.run_script(load_script("board_count"), keys, name, amount, REMEMBER_REQUEST_MS)

    async def counters(self) -> dict[str, int]:
        counters = await self._link.call(lambda: self._client.hgetall(self._key("counters")))
        return {name.decode(): int(value) for name, value in counters.items()}

    async def claim_job(self, job: str, holder: str, *, ttl_s: float) -> bool:
        keys = [self._key(f"claim:{job}")]
        return bool(await self._link.run_script(load_script("board_claim"), keys, holder, _milliseconds(ttl_s)))

    async def put_evaluation(self, evaluation: Evaluation) -> None:
        version = str(evaluation.version)
        payload = encode(evaluation)
        await self._link.call(lambda: self._client.hsetnx(self._key("evaluations"), version, payload))

    async def evaluations(self) -> list[Evaluation]:
        payloads = await self._link.call(lambda: self._client.hvals(self._key("evaluations")))
        evaluations = [decode(payload, Evaluation) for payload in payloads]
        return sorted(evaluations, key=lambda evaluation: evaluation.version)

    async def put_probe(self, probe: Probe) -> None:
        keys = [self._key(name) for name in ("stage", "probe", "probe:version", "wake:probe")]
        staged = [Payload(keys[0], encode(probe))]
        await self._link.run_script(load_script("board_probe"), keys, probe.version, payloads=staged)

    async def wait_for_probe(self, version: int, *, timeout_s: float) -> Probe:
        waited_for = f"the probe of version {version} from a rollout server"

        async def read_probe() -> Probe | RetryLater:
            (payload,) = await self._link.fetch_values([self._key("probe")])
            if payload is None:
                return RetryLater()
            probe = decode(payload, Probe)
            if probe.version < version:
                return RetryLater()
            if probe.version > version:
                raise WaitTimeout(waited_for, 0, f"The probe of version {probe.version} has already replaced it")
            return probe

        return await self._link.retry_until(
            self._key("wake:probe"), read_probe, waited_for=waited_for, timeout_s=timeout_s
        )

    async def aclose(self) -> None:
        await self._link.aclose()

    async def _set_unless_older(self, name: str, record: PublisherAddress | ReplayProgress) -> None:
        """Store a fact of the trainer, unless a newer trainer has stored it."""
        keys = [self._key(name), self._key(f"{name}:epoch")]
        await self._link.run_script(load_script("board_epoch"), keys, record.epoch, encode(record))

    async def _store_beat(self, beat: ServerBeat, ttl_ms: int) -> None:
        async with self._client.pipeline(transaction=True) as pipe:
            pipe.set(self._key(f"server:{beat.name}"), encode(beat), px=ttl_ms)
            pipe.sadd(self._key("servers"), beat.name)
            await pipe.execute()

    def _key(self, name: str) -> str:
        return self._prefix + name


def _milliseconds(seconds: float) -> int:
    return max(1, round(1000 * seconds))
