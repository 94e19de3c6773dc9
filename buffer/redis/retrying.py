"""Calls to the server that survive a lost connection, a restart, a failover, a full memory and lost scripts.

    call         --attempts, with backoff, until timeout_s--> server     (every call made here is idempotent)
    run_script   --script, then WAIT on the same connection--> server, and replicas if redis.replicas_to_wait_for
    retry_until  --BLPOP on a separate connection----------> wake list  (filled by the Lua scripts)

`call` waits for the server, but only a limited time on one connection. The next attempt uses a new connection, because
a connection may be silent although the server is well (a dropped NAT entry). `retry_until` waits for an element of a
wake list. An element that is lost together with its waiter delays the others by at most RECHECK_S.

Time limits of a call with timeout_s 30, if nothing answers:

    attempt 1: 5 s, attempt 2: 10 s, attempt 3: the rest
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from redis import exceptions as server_errors
from redis.asyncio import Redis

from async_grpo.errors import ReplicasBehind, WaitTimeout
from buffer.redis.client import RunClient
from buffer.redis.connection import Command, send_commands, send_transaction, use_connection
from buffer.redis.errors import LOST, can_pass, describe_fault, find_cause
from buffer.redis.scripts import Script, load_script

T = TypeVar("T")

RECHECK_S = 5.0
FIRST_BACKOFF_S = 0.02
MAX_BACKOFF_S = 1.0
FIRST_ATTEMPT_FRACTION = 1 / 6
"""The first attempt may take this fraction of timeout_s, within the two bounds below, and each further one twice as
long as the one before. The last attempt thus has about half of timeout_s, which suffices for a slow server."""
MIN_FIRST_ATTEMPT_S = 1.0
MAX_FIRST_ATTEMPT_S = 5.0
CLOSE_S = 0.5
"""Time limit for closing idle connections, because a peer that is gone does not answer."""
LATE_WAKE_S = 5.0
"""Seconds that a BLPOP may overrun before its connection counts as lost."""
PAGE = 64
"""Maximum number of payloads fetched by one command, which bounds the size of a reply."""
MAX_CONCURRENT_CALLS = 32
"""Maximum number of connections of one client, without those that wait by BLPOP. Further calls queue."""
CONFIRM_MARGIN_FRACTION = 0.1
"""Fraction of timeout_s, at least MIN_CONFIRM_MARGIN_S, by which the wait for replicas ends early. Otherwise silent
replicas would look like a silent server."""
MIN_CONFIRM_MARGIN_S = 0.25
BARRIER = load_script("barrier")


@dataclass(frozen=True, slots=True)
class RetryLater:
    """Result of an attempt that must be repeated, after at most `max_s` seconds."""

    max_s: float = RECHECK_S
    listens: bool = True
    """False if the waiter must not take an element of the wake list, which would be for others."""


@dataclass(frozen=True, slots=True)
class Payload:
    """A value to SET. `only_new` keeps an existing value."""

    key: str
    value: bytes
    only_new: bool = False


@dataclass(frozen=True, slots=True)
class ScriptCall:
    """A script with its arguments and the payloads to store before it."""

    script: Script
    keys: Sequence[str]
    args: Command
    payloads: Sequence[Payload]
    together: bool

    @property
    def needs_transaction(self) -> bool:
        """True if the payloads and the script must happen both or not at all."""
        return self.together and len(self.payloads) > 0

    def commands(self) -> list[Command]:
        """Return the commands to send, payloads first."""
        commands: list[Command] = []
        for payload in self.payloads:
            if payload.only_new:
                commands.append(("SET", payload.key, payload.value, "NX"))
            else:
                commands.append(("SET", payload.key, payload.value))
        commands.append(("EVALSHA", self.script.digest, len(self.keys), *self.keys, *self.args))
        return commands


class RetryingClient:
    """A client that repeats idempotent calls until they succeed or time out."""

    def __init__(self, client: RunClient, timeout_s: float) -> None:
        self.client: Any = client  # redis-py types replies as bytes | str; this client never decodes: bytes
        self._timeout_s = timeout_s
        self._replicas = client.replicas_to_wait_for
        self._call_slots = asyncio.Semaphore(MAX_CONCURRENT_CALLS)

    async def call(self, function: Callable[[], Awaitable[Any]]) -> Any:
        """Return the result of the idempotent `function`, which is repeated until it succeeds or timeout_s has passed.

        Raises ServerLost, ServerFull, ServerRefused, or BufferFault for any other error of the server.
        """
        return await self._retry(lambda _: function())

    async def run_script(
        self,
        script: Script,
        keys: Sequence[str],
        *args: bytes | str | float,
        payloads: Sequence[Payload] = (),
        together: bool = True,
    ) -> Any:
        """Run a script and return its reply. The payloads are stored in the same transaction.

        A restarted server stores the payloads and then rejects the unknown script; nothing refers to them until the
        script has run. With `together` False they are stored just before the script, which is faster; the script then
        checks that they exist. Raises as `call` does, and ReplicasBehind if the change was made but too few replicas
        confirmed it.
        """
        call = ScriptCall(script, keys, args, payloads, together)
        return await self._retry(lambda deadline: self._run_script(call, deadline))

    async def fetch_values(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values of the keys, in their order; None for a key that does not exist."""
        values: list[bytes | None] = []
        for start in range(0, len(keys), PAGE):
            page = keys[start : start + PAGE]
            values += await self.call(partial(self.client.mget, page))
        return values

    async def retry_until(
        self, wake: str, attempt: Callable[[], Awaitable[T | RetryLater]], *, waited_for: str, timeout_s: float
    ) -> T:
        """Return the first result of `attempt` other than RetryLater. Raises WaitTimeout.

        The attempt is repeated whenever the list `wake` has an element.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            result = await attempt()
            if not isinstance(result, RetryLater):
                return result
            remaining_s = deadline - loop.time()
            if remaining_s <= 0:
                raise WaitTimeout(waited_for, timeout_s)
            if result.listens:
                await self._wait_for_element(wake, min(remaining_s, result.max_s, RECHECK_S))
            else:
                await asyncio.sleep(min(remaining_s, result.max_s))

    async def aclose(self) -> None:
        """Close all connections."""
        await close_client(self.client)

    async def _retry(self, attempt: Callable[[float], Awaitable[Any]]) -> Any:
        """Repeat `attempt`, which gets the loop time at which it will be cancelled."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        attempt_s = FIRST_ATTEMPT_FRACTION * self._timeout_s
        attempt_s = min(MAX_FIRST_ATTEMPT_S, max(MIN_FIRST_ATTEMPT_S, attempt_s))
        pause_s = FIRST_BACKOFF_S
        cause: Exception | None = None
        # The caller may be handling an exception, which Python chains to ours although it is not the cause.
        unrelated = sys.exc_info()[1]

        while True:
            try:
                # The time in the queue for a slot counts for the deadline of the call, not for that of the attempt.
                async with asyncio.timeout_at(deadline) as call_timeout, self._call_slots:
                    attempt_deadline = loop.time() + attempt_s
                    # Near the end only the outer timeout applies, so that `call_timeout` reports that it expired.
                    async with asyncio.timeout_at(attempt_deadline if attempt_deadline < deadline else None):
                        return await attempt(min(attempt_deadline, deadline))
            except (server_errors.RedisError, OSError, ReplicasBehind) as error:
                # A timeout has less information about the cause than the error of the attempt before it.
                if cause is None or not call_timeout.expired():
                    cause = find_cause(error, unrelated)
                if not can_pass(cause) or loop.time() + pause_s > deadline:
                    raise describe_fault(cause, self.client.endpoint, self._timeout_s) from error
            await self._reset_connections(cause)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_BACKOFF_S)
            attempt_s *= 2

    async def _reset_connections(self, cause: Exception) -> None:
        """Let the next attempt use new connections, and search for the node again if the run may have moved.

        If one connection was lost or silent, idle ones may be, too.
        """
        if self.client.discovery is not None:
            self.client.discovery.forget_node()
        if self.client.discovery is not None or isinstance(cause, LOST):
            with contextlib.suppress(server_errors.RedisError, OSError):
                async with asyncio.timeout(CLOSE_S):
                    await self.client.connection_pool.disconnect(inuse_connections=False)

    async def _wait_for_element(self, wake: str, max_s: float) -> None:
        """Wait at most `max_s` for an element of the list. If the connection is lost, the next attempt will notice."""
        unrelated = sys.exc_info()[1]
        try:
            async with asyncio.timeout(max_s + min(self._timeout_s, LATE_WAKE_S)):
                async with use_connection(self.client) as connection:
                    await send_commands(connection, ("BLPOP", wake, max(max_s, 0.01)))  # 0 would mean no limit
        except (server_errors.RedisError, OSError) as error:
            cause = find_cause(error, unrelated)
            if not can_pass(cause):
                raise describe_fault(cause, self.client.endpoint, self._timeout_s) from error
            await asyncio.sleep(FIRST_BACKOFF_S)

    async def _run_script(self, call: ScriptCall, deadline: float) -> Any:
        try:
            return await self._send_script(call, deadline)
        except server_errors.NoScriptError:  # a new server, or one that was restarted
            await self.client.script_load(call.script.source)
            if self._replicas:
                await self.client.script_load(BARRIER.source)
            return await self._send_script(call, deadline)

    async def _send_script(self, call: ScriptCall, deadline: float) -> Any:
        commands = call.commands()
        async with use_connection(self.client) as connection:
            if call.needs_transaction:
                replies = await send_transaction(connection, commands)
            else:
                replies = await send_commands(connection, *commands)
            # On the same connection: WAIT counts the writes of its own connection only.
            if self._replicas and not call.script.only_reads:
                await self._wait_for_replicas(connection, deadline)
            return replies[-1]

    async def _wait_for_replicas(self, connection: Any, deadline: float) -> None:
        """Wait until enough replicas have everything that the server had when it answered. Raises ReplicasBehind."""
        margin_s = max(CONFIRM_MARGIN_FRACTION * self._timeout_s, MIN_CONFIRM_MARGIN_S)
        remaining_s = deadline - asyncio.get_running_loop().time() - margin_s
        barrier = ("EVALSHA", BARRIER.digest, 1, self.client.barrier_key)
        wait = ("WAIT", self._replicas, max(1, int(1000 * remaining_s)))  # 0 would mean no limit
        _, confirmed = await send_commands(connection, barrier, wait)
        if confirmed < self._replicas:
            raise ReplicasBehind(
                f"{confirmed} of {self._replicas} replicas of the server at {self.client.endpoint} have confirmed a "
                f"change within {self._timeout_s:g} s. The primary has made it, and repeating the call is "
                "harmless, but a failover now could undo it. Bring the replicas back, or lower "
                "redis.replicas_to_wait_for"
            )


async def close_client(client: Redis) -> None:
    """Close all connections, also those to a server that is gone."""
    with contextlib.suppress(server_errors.RedisError, OSError):
        await client.aclose()
