"""Classifies errors of the server: those that may pass by themselves, and the error to raise for the others."""

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
_MAX_CAUSES = 8


@dataclass(frozen=True, slots=True)
class _Rule:
    """Error to raise for a kind of error. `text` may contain {where}, {reply} (the server's text) and {timeout} (s)."""

    matches: Callable[[Exception], bool]
    fault: type[BufferFault]
    text: str
    can_pass: bool = True
    """True if waiting may help."""


def _is(*kinds: type[Exception]) -> Callable[[Exception], bool]:
    return lambda error: isinstance(error, kinds)


def _starts_with(code: str) -> Callable[[Exception], bool]:
    return lambda error: isinstance(error, server_errors.ResponseError) and str(error).startswith(code)


def _is_tls_refusal(error: Exception) -> bool:
    """True if a TLS handshake failed for its content. A handshake that was cut off may succeed the next time."""
    cut_off = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)
    return isinstance(error, ssl.SSLError) and not isinstance(error, cut_off)


_CONNECTION_LOST = _Rule(
    lambda error: isinstance(error, LOST) or _starts_with("BUSY")(error) or _starts_with("UNBLOCKED")(error),
    ServerLost,
    "the server at {where} has not answered for {timeout} s: {reply}. Check that it runs and can be reached, and "
    "that redis.url begins with rediss:// exactly if it speaks TLS (with redis.tls_cert if it asks for a "
    "certificate of ours), or raise redis.timeout_s",
)

_RULES = (
    _Rule(
        _is(server_errors.AuthenticationError, server_errors.AuthorizationError),
        ServerRefused,
        f"the server at {{where}} refuses this client: {{reply}}. Set {PASSWORD_VARIABLE}, and for another user than "
        f"the default one {USERNAME_VARIABLE} (or write redis://USER@HOST); for sentinels {SENTINEL_PASSWORD_VARIABLE}",
        can_pass=False,
    ),
    _Rule(
        lambda error: isinstance(error, server_errors.NoPermissionError) or "ACL failure" in str(error),
        ServerRefused,
        "the server at {where} does not permit this user to do that: {reply}. Widen its ACL: it needs ~agrpo:{{RUN}}:* "
        "and the commands listed in docs/buffer-redis.md. Or use the run that the user is for",
        can_pass=False,
    ),
    _Rule(
        _is_tls_refusal,
        ServerRefused,
        "no encrypted connection to the server at {where}: {reply}. Check that redis.tls_ca holds the CA of its "
        "certificate, that the certificate names this host, and whether the server speaks TLS (else use redis://) "
        "or asks for redis.tls_cert",
        can_pass=False,
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
        "the server at {where} has been loading its file for {timeout} s. Wait until it is done, or raise "
        "redis.timeout_s",
    ),
    _Rule(
        _is(server_errors.AskError, server_errors.TryAgainError, server_errors.ClusterDownError),
        ServerLost,
        "no node of the cluster at {where} has served this run for {timeout} s: {reply}. Wait until CLUSTER INFO "
        "reports cluster_state:ok and no slot is migrating, or raise redis.timeout_s; with redis:// use "
        "redis+cluster://",
    ),
    _Rule(
        _is(server_errors.ReadOnlyError),
        ServerLost,
        "the server at {where} has been a read-only replica for {timeout} s. Point redis.url at the primary, "
        "or at the sentinels (redis+sentinel://)",
    ),
    _Rule(
        _starts_with("MISCONF"),
        ServerLost,
        "the server at {where} has not been able to write its file for {timeout} s, and refuses changes: {reply}. "
        "Free space on its disk",
    ),
    _Rule(
        _starts_with("NOREPLICAS"),
        ServerLost,
        "the server at {where} has had fewer replicas than its min-replicas-to-write for {timeout} s. "
        "Bring them back, or lower that setting",
    ),
    _CONNECTION_LOST,
)
"""The first rule that matches an error applies."""
_OTHER = _Rule(lambda _: True, BufferFault, "the server at {where} failed: {reply}", can_pass=False)


def find_cause(error: Exception, unrelated: BaseException | None = None) -> Exception:
    """Return the cause of an error: redis-py reports everything that fails while it connects as a lost connection.

    `unrelated` is the exception that was being handled when the call started. It is in the chain, but is not a cause.
    """
    link: BaseException | None = error
    for _ in range(_MAX_CAUSES):
        if link is None or link is unrelated:
            break
        if isinstance(link, AsyncGrpoError):
            return link
        if isinstance(link, Exception) and _find_rule(link) not in (_CONNECTION_LOST, _OTHER):
            return link
        link = link.__cause__ or link.__context__
    return error


def can_pass(cause: Exception) -> bool:
    """True if waiting may help: the server may restart, another may take over, or memory may be freed."""
    return isinstance(cause, ReplicasBehind) or _find_rule(cause).can_pass


def describe_fault(cause: Exception, where: str, timeout_s: float) -> AsyncGrpoError:
    """Return the error to raise, with what failed, where, and how to fix it."""
    if isinstance(cause, AsyncGrpoError):
        return cause
    rule = _find_rule(cause)
    reply = str(cause).rstrip(". ") or "no reply"
    return rule.fault(rule.text.format(where=where, reply=reply, timeout=f"{timeout_s:g}"))


def _find_rule(error: Exception) -> _Rule:
    for rule in _RULES:
        if rule.matches(error):
            return rule
    return _OTHER
