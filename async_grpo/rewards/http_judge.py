"""HTTP judges: one POST per completion, JSON in both directions.

    item --POST {completion, answer, prompt, metadata, tool_calls, ...extra}--> judge
    item <-- {"score": 0.5}, or wherever `score_pointer` points ---- judge

At most `concurrency` requests run at a time; the others wait. Each attempt waits at most `timeout_s` for the reply. The
event loop is never blocked.

Because the token and the completions must not leak, redirects are not followed, proxies and passwords from the
environment are ignored, and no error message contains the token. At most `max_reply_bytes` of a reply are read.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec

from async_grpo.config.rewards import HttpRewardConfig
from async_grpo.errors import ConfigError
from async_grpo.rewards.base import Outcome, RewardFailure, RewardInput, parse_score

_RETRIED_STATUSES = frozenset({408, 425, 429, *range(500, 600)})
_READ_BYTES = 16 << 10


class HttpJudge:
    """One reward function of kind `http`. Use it on one event loop."""

    def __init__(self, name: str, config: HttpRewardConfig, environment: Mapping[str, str]) -> None:
        """Raises ConfigError if the environment variable of the token is empty or not set."""
        self._name = name
        self._config = config
        self._headers = {**config.headers, "Accept-Encoding": "identity", **_token_header(name, config, environment)}
        self._capacity = asyncio.Semaphore(config.concurrency)
        self._random = random.Random()
        self._session: aiohttp.ClientSession | None = None

    async def judge(self, item: RewardInput) -> dict[str, Outcome]:
        """Return the score, or the failure of the last attempt, under the name of this reward function."""
        async with self._capacity:
            for attempt in range(self._config.retries + 1):
                if attempt > 0:
                    await asyncio.sleep(retry_delay_s(self._config, attempt, self._random.random()))
                outcome, is_worth_retrying = await self._attempt(item)
                if not is_worth_retrying:
                    break
        return {self._name: outcome}

    async def aclose(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def _attempt(self, item: RewardInput) -> tuple[Outcome, bool]:
        """Return the outcome, and True if another attempt may succeed."""
        try:
            async with asyncio.timeout(self._config.timeout_s):
                status, reply = await self._post(item)
        except TimeoutError:
            return RewardFailure("http_timeout", f"no reply within {self._config.timeout_s:g} s"), True
        except (aiohttp.ClientError, OSError) as error:
            return RewardFailure("http_connection", f"the judge cannot be reached: {type(error).__name__}"), True
        if status != 200:
            failure = RewardFailure("http_status", f"the judge answered with status {status}")
            return failure, status in _RETRIED_STATUSES
        if len(reply) > self._config.max_reply_bytes:
            return RewardFailure("http_bad_reply", f"the reply is above {self._config.max_reply_bytes} bytes"), False
        return read_score(reply, self._config.score_pointer), False

    async def _post(self, item: RewardInput) -> tuple[int, bytes]:
        """Return status and body. The body is cut just above the size limit, and empty for an error."""
        body = msgspec.json.encode({**self._config.extra, **item._asdict()})
        headers = {"Content-Type": "application/json", **self._headers}
        session = self._open_session()
        async with session.post(self._config.url, data=body, headers=headers, allow_redirects=False) as response:
            reply = bytearray()
            if response.status == 200:
                async for chunk in response.content.iter_chunked(_READ_BYTES):
                    reply += chunk
                    if len(reply) > self._config.max_reply_bytes:
                        response.close()
                        break
            return response.status, bytes(reply)

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self._config.concurrency)
            timeout = aiohttp.ClientTimeout(total=self._config.timeout_s)
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=timeout, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
            )
        return self._session


def retry_delay_s(config: HttpRewardConfig, attempt: int, jitter: float) -> float:
    """Seconds before retry 1, 2, ...: exponential with full jitter. `jitter` is random in [0, 1)."""
    return min(config.backoff_max_s, config.backoff_s * 2.0 ** min(attempt, 64)) * (1.0 - jitter)


def read_score(reply: bytes, pointer: str) -> Outcome:
    """Return the score at `pointer` in a JSON reply, or a failure. null means that the judge cannot judge (`none`)."""
    try:
        value = look_up(msgspec.json.decode(reply), pointer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return RewardFailure("http_bad_reply", f"the reply is not JSON: {error}")
    except LookupError as error:
        return RewardFailure("http_bad_reply", f"the reply has nothing at {pointer!r}: {error}")
    if value is None:
        return RewardFailure("none", "the judge answered null")
    try:
        return parse_score(value)
    except ValueError as error:
        return RewardFailure("http_bad_reply", f"the reply has no score at {pointer!r}: {error}")


def look_up(document: Any, pointer: str) -> Any:
    """Return the value at a JSON pointer (RFC 6901). Raises LookupError if there is none.

    >>> look_up({"choices": [{"score": 0.5}]}, "/choices/0/score")
    0.5
    """
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(document, list):
            if not (key.isascii() and key.isdigit()):
                raise LookupError(f"{key!r} is not a position in a list")
            document = document[int(key)]
        elif isinstance(document, dict):
            document = document[key]
        else:
            raise LookupError(f"{key!r} below a {type(document).__name__}")
    return document


def _token_header(name: str, config: HttpRewardConfig, environment: Mapping[str, str]) -> dict[str, str]:
    if config.token_env is None:
        return {}
    token = environment.get(config.token_env, "").strip()
    if not token:
        raise ConfigError(
            f"rewards.functions: {name!r} reads its token from the environment variable {config.token_env}, which is "
            "empty or not set. Set it where the rollout server starts"
        )
    return {config.token_header: config.token_prefix + token}
