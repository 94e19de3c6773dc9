"""What an error of the server means: whether waiting may help, and which error says how to fix it."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass

from redis import exceptions as server_errors

from async_grpo.errors import AsyncGrpoError, BufferFault, ReplicasBehind, ServerFull, ServerLost, ServerRefused

PASSWORD_VARIABLE = "ASYNC_GRPO_REDIS_PASSWORD"
USERNAME_VARIABLE = "ASYNC_GRPO_REDIS_USERNAME"
SENTINEL_PASSWORD_VARIABLE = "ASYNC_GRPO_SENTINEL_PASSWORD"

LOST = (server_errors.ConnectionError, server_errors.TimeoutError, OSError)
_DEEPEST_CAUSE = 8


@dataclass(frozen=True, slots=True)
class _Rule:
    """How to report a kind of error. `text` may contain {where}, {said} (the server's words) and {timeout} (s)."""

    matches: Callable[[Exception], bool]
    fault: type[BufferFault]
    text: str
    passes: bool = True
    """Whether waiting may help."""


def _is(*kinds: type[Exception]) -> Callable[[Exception], bool]:
    return lambda error: isinstance(error, kinds)


def _begins(code: str) -> Callable[[Exception], bool]:
    return lambda error: isinstance(error, server_errors.ResponseError) and str(error).startswith(code)


def _untrusted(error: Exception) -> bool:
    """Whether a TLS handshake failed for its content. One that was cut off may succeed the next time."""
    cut_off = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)
    return isinstance(error, ssl.SSLError) and not isinstance(error, cut_off)


_RULES = (
    _Rule(
        _is(server_errors.AuthenticationError, server_errors.AuthorizationError),
        ServerRefused,
        f"the server at {{where}} refuses this client: {{said}}. Set {PASSWORD_VARIABLE}, and for another user than "
        f"the default one {USERNAME_VARIABLE} (or write redis://USER@HOST); for sentinels {SENTINEL_PASSWORD_VARIABLE}",
        passes=False,
    ),
    _Rule(
        lambda error: isinstance(error, server_errors.NoPermissionError) or "ACL failure" in str(error),
        ServerRefused,
        "the server at {where} does not permit this user to do that: {said}. Widen its ACL: it needs ~agrpo:{{RUN}}:* "
        "and the commands listed in docs/buffer-redis.md. Or use the run that the user is for",
        passes=False,
    ),
    _Rule(
        _untrusted,
        ServerRefused,
        "no encrypted connection to the server at {where}: {said}. Check that redis.tls_ca holds the CA of its "
        "certificate, that the certificate names this host, and whether the server speaks TLS (else use redis://) "
        "or asks for redis.tls_cert",
        passes=False,
    ),
    _Rule(
        _is(server_errors.OutOfMemoryError),
        ServerFull,
        "the server at {where} has been at its memory limit for {timeout} s: nothing more can be "
        "stored. Raise redis.max_memory_bytes (the server's maxmemory), or lower max_staleness",
    ),
    _Rule(
        _is(server_errors.BusyLoadingError),
        ServerLost,
        "the server at {where} has been reading its file for {timeout} s. Wait until it has, or raise redis.timeout_s",
    ),
    _Rule(
        _is(server_errors.AskError, server_errors.TryAgainError, server_errors.ClusterDownError),
        ServerLost,
        "no node of the cluster at {where} has served this run for {timeout} s: {said}. Wait until CLUSTER INFO says "
        "cluster_state:ok and no slot is on the move, or raise redis.timeout_s; with redis:// use redis+cluster://",
    ),
    _Rule(
        _is(server_errors.ReadOnlyError),
        ServerLost,
        "the server at {where} has been a read-only replica for {timeout} s. Point redis.url at the primary, "
        "or at the sentinels (redis+sentinel://)",
    ),
    _Rule(
        _begins("MISCONF"),
        ServerLost,
        "the server at {where} has not been able to write its file for {timeout} s, and takes no changes: {said}. "
        "Free space on its disk",
    ),
    _Rule(
        _begins("NOREPLICAS"),
        ServerLost,
        "the server at {where} has had fewer replicas than its min-replicas-to-write for {timeout} s. "
        "Bring them back, or lower that setting",
    ),
    _Rule(
        lambda error: isinstance(error, LOST) or _begins("BUSY")(error) or _begins("UNBLOCKED")(error),
        ServerLost,
        "the server at {where} has not answered for {timeout} s: {said}. Check that it runs and can be reached, and "
        "that redis.url begins with rediss:// exactly if it speaks TLS (with redis.tls_cert if it asks for a "
        "certificate of ours), or raise redis.timeout_s",
    ),
)
_OTHER = _Rule(lambda _: True, BufferFault, "the server at {where} failed: {said}", passes=False)


def cause_of(error: Exception, before: BaseException | None = None) -> Exception:
    """The cause of an error: redis-py reports everything that fails while it connects as a lost connection.

    `before` is the exception that was being handled when the call began. It is in the chain, but is not a cause.
    """
    link: BaseException | None = error
    for _ in range(_DEEPEST_CAUSE):
        if link is before:
            break
        if isinstance(link, AsyncGrpoError):
            return link
        if isinstance(link, Exception) and _rule(link) not in (_RULES[-1], _OTHER):
            return link
        link = link and (link.__cause__ or link.__context__)
    return error


def may_pass(cause: Exception) -> bool:
    """Whether waiting may help: the server may restart, another may take over, or someone may drain it."""
    return isinstance(cause, ReplicasBehind) or _rule(cause).passes


def named(cause: Exception, where: str, timeout_s: float) -> AsyncGrpoError:
    """The error to raise, which says what failed, where, and how to fix it."""
    if isinstance(cause, AsyncGrpoError):
        return cause
    rule, said = _rule(cause), str(cause).rstrip(". ") or "no reply"
    return rule.fault(rule.text.format(where=where, said=said, timeout=f"{timeout_s:g}"))


def _rule(error: Exception) -> _Rule:
    return next((rule for rule in _RULES if rule.matches(error)), _OTHER)
