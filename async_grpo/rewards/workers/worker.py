"""The worker process: loads the verifiers, then answers requests until its channel closes.

    slot --VerifierRequest--> verifiers --one reply per verifier, in order--> slot

It waits only for the slot's next request. It enforces no limits: the slot enforces the deadline and the supervisor the
memory limit, from outside, where a verifier cannot block them.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
from collections.abc import Sequence

from async_grpo.errors import ConfigError
from async_grpo.rewards.base import ExtractedAnswer, Outcome, RewardFailure, RewardInput, parse_score
from async_grpo.rewards.registry import Extract, Judge, load_verifier
from async_grpo.rewards.workers.messages import (
    MAX_FRAME_BYTES,
    VerifierRequest,
    WorkerReady,
    pack,
    unpack,
)
from async_grpo.utils.frames import read_frame

_REASON_CHARACTERS = 500
_MAX_ANSWER_CHARACTERS = 1000
"""A longer text counts as no answer. No two completions would share it, and maj@k counts equal answers."""


def serve(channel: socket.socket, names: Sequence[str]) -> None:
    """Load the verifiers `names`, then answer requests until the channel closes."""
    judges: dict[str, Judge] = {}
    extractions: dict[str, Extract] = {}
    broken: dict[str, str] = {}
    for name in names:
        try:
            judges[name], extract = load_verifier(name)
            if extract is not None:
                extractions[name] = extract
        except ConfigError as error:
            broken[name] = str(error)
        except BaseException as error:  # a module may call sys.exit
            broken[name] = f"rewards.functions: importing {name!r} raised {_describe_error(error)}. Fix the module"
    channel.sendall(pack(WorkerReady(broken, list(extractions))))

    requests = channel.makefile("rb")
    worker_pid = os.getpid()
    with asyncio.Runner() as runner:
        while (payload := read_frame(requests, MAX_FRAME_BYTES)) is not None:
            request: VerifierRequest = unpack(payload, VerifierRequest)
            for name in request.names:
                reply: Outcome | ExtractedAnswer
                if request.extract:
                    reply = _extract(extractions[name], request.item.completion)
                else:
                    reply = _judge(runner, judges[name], request.item)
                # A verifier may fork, and its child then returns here too. Only the worker may answer.
                if os.getpid() != worker_pid:
                    os._exit(0)
                channel.sendall(pack(reply))


def _judge(runner: asyncio.Runner, judge: Judge, item: RewardInput) -> Outcome:
    try:
        value = judge(item)
        if inspect.isawaitable(value):
            value = runner.run(_await(value))
    except MemoryError as error:
        return RewardFailure("memory", _describe_error(error))
    except BaseException as error:  # a verifier may raise anything, even SystemExit; other items are not affected
        return RewardFailure("raised", _describe_error(error))
    if value is None:
        return RewardFailure("none", "it returned None")
    try:
        return parse_score(value)
    except ValueError as error:
        return RewardFailure("bad_value", f"it returned no score: {error}"[:_REASON_CHARACTERS])


def _extract(extract: Extract, completion: str) -> ExtractedAnswer:
    try:
        answer = extract(completion)
    except BaseException as error:  # as in _judge
        return RewardFailure("extraction", _describe_error(error))
    if answer is not None and not isinstance(answer, str):
        return RewardFailure("extraction", f"it returned a {type(answer).__name__}, not a string or None")
    if not answer or len(answer) > _MAX_ANSWER_CHARACTERS:
        return None
    return answer


async def _await(value: object) -> object:
    assert inspect.isawaitable(value)
    return await value


def _describe_error(error: BaseException) -> str:
    """Return type and message of an exception, truncated; only the type if its __str__ raises."""
    try:
        return f"{type(error).__name__}: {error}"[:_REASON_CHARACTERS]
    except Exception:  # from the __str__ of a user's exception
        return type(error).__name__
