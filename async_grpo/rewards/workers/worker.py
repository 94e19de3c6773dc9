"""What runs in a verifier process: load the verifiers, then answer requests until the channel closes.

    slot --VerifierRequest--> verifiers --one reply a verifier, in order--> slot

It waits for the slot's next request. It enforces no limits itself: the slot watches the deadline and the supervisor
the memory, both from outside, where a verifier cannot block them.
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
"""A longer text counts as no answer: no two completions would share it."""


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
            broken[name] = f"rewards.functions: importing {name!r} ended with {_described(error)}. Fix the module"
    requests, me = channel.makefile("rb"), os.getpid()
    channel.sendall(pack(WorkerReady(broken, list(extractions))))
    with asyncio.Runner() as runner:
        while (payload := read_frame(requests, MAX_FRAME_BYTES)) is not None:
            request: VerifierRequest = unpack(payload, VerifierRequest)
            for name in request.names:
                reply = (
                    _extract(extractions[name], request.item.completion)
                    if request.extract
                    else _judge(runner, judges[name], request.item)
                )
                if os.getpid() != me:
                    os._exit(0)  # a verifier has forked and its child came back here: only one may answer
                channel.sendall(pack(reply))


def _judge(runner: asyncio.Runner, judge: Judge, item: RewardInput) -> Outcome:
    try:
        value = judge(item)
        if inspect.isawaitable(value):
            value = runner.run(_finish(value))
    except MemoryError as error:
        return RewardFailure("memory", _described(error))
    except BaseException as error:  # a verifier may raise anything, SystemExit included: it costs only its own item
        return RewardFailure("raised", _described(error))
    if value is None:
        return RewardFailure("none", "it returned None")
    try:
        return parse_score(value)
    except ValueError as error:
        return RewardFailure("bad_value", f"it returned no score: {error}"[:_REASON_CHARACTERS])


def _extract(extract: Extract, completion: str) -> ExtractedAnswer:
    try:
        found = extract(completion)
    except BaseException as error:  # as in _judge
        return RewardFailure("extraction", _described(error))
    if found is not None and not isinstance(found, str):
        return RewardFailure("extraction", f"it returned a {type(found).__name__}, not a text or None")
    return found if found and len(found) <= _MAX_ANSWER_CHARACTERS else None


async def _finish(value: object) -> object:
    assert inspect.isawaitable(value)
    return await value


def _described(error: BaseException) -> str:
    """Type and text of the exception, bounded. The type alone if its __str__ raises."""
    try:
        return f"{type(error).__name__}: {error}"[:_REASON_CHARACTERS]
    except Exception:  # from the __str__ of a user's exception
        return type(error).__name__
