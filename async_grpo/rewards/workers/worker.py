"""What runs in a verifier process: load the verifiers, then answer assignments until the channel closes.

    slot --Assignment--> verifiers --one Answer a verifier, in order--> slot

It waits for the slot's next assignment. It has no limits of its own: the slot holds the deadline and the
warden the memory, from outside, where a verifier cannot hold them up.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
from collections.abc import Iterator, Mapping, Sequence

from async_grpo.errors import ConfigError
from async_grpo.rewards.base import RewardInput, as_score
from async_grpo.rewards.registry import Extract, Judge, resolve_with_extraction
from async_grpo.rewards.workers.messages import (
    MAX_FRAME_BYTES,
    VerifierReply,
    VerifierRequest,
    WorkerReady,
    pack,
    unpack,
)
from async_grpo.utils.frames import read_frame

_REASON_CHARACTERS = 500
_LONGEST_ANSWER = 1000
"""Characters; what is longer is no answer that two completions would share."""


def serve(channel: socket.socket, names: Sequence[str]) -> None:
    """Until the channel closes."""
    judges: dict[str, Judge] = {}
    extractions: dict[str, Extract] = {}
    broken: dict[str, str] = {}
    for name in names:
        try:
            judges[name], extract = resolve_with_extraction(name)
            if extract is not None:
                extractions[name] = extract
        except ConfigError as error:
            broken[name] = str(error)
        except BaseException as error:  # a module may call sys.exit
            broken[name] = f"rewards.functions: importing {name!r} ended with {_described(error)}. Mend the module"
    requests, me = channel.makefile("rb"), os.getpid()
    channel.sendall(pack(WorkerReady(broken, list(extractions))))
    with asyncio.Runner() as runner:
        while (payload := read_frame(requests, MAX_FRAME_BYTES)) is not None:
            assignment = unpack(payload, VerifierRequest)
            item = RewardInput(
                assignment.completion,
                assignment.answer,
                assignment.prompt,
                assignment.metadata,
                assignment.tool_calls,
            )
            for answer in _answers(runner, assignment, item, judges, extractions):
                if os.getpid() != me:
                    os._exit(0)  # a verifier has forked and its child came back here: only one may answer
                channel.sendall(pack(answer))


def _answers(
    runner: asyncio.Runner,
    assignment: VerifierRequest,
    item: RewardInput,
    judges: Mapping[str, Judge],
    extractions: Mapping[str, Extract],
) -> Iterator[VerifierReply]:
    for name in assignment.names:
        if assignment.extract:
            yield _extract(extractions[name], item.completion)
        else:
            yield _judge(runner, judges[name], item)


def _judge(runner: asyncio.Runner, judge: Judge, item: RewardInput) -> VerifierReply:
    try:
        value = judge(item)
        if inspect.isawaitable(value):
            value = runner.run(_finish(value))
    except MemoryError as error:
        return VerifierReply(kind="memory", reason=_described(error))
    except BaseException as error:  # whatever a verifier raises, SystemExit included, costs its own item only
        return VerifierReply(kind="raised", reason=_described(error))
    if value is None:
        return VerifierReply(kind="none", reason="it returned None")
    try:
        return VerifierReply(score=as_score(value))
    except ValueError as error:
        return VerifierReply(kind="bad_value", reason=f"it returned no score: {error}"[:_REASON_CHARACTERS])


def _extract(extract: Extract, completion: str) -> VerifierReply:
    try:
        found = extract(completion)
    except BaseException as error:  # likewise
        return VerifierReply(kind="extraction", reason=_described(error))
    if found is not None and not isinstance(found, str):
        return VerifierReply(kind="extraction", reason=f"it returned a {type(found).__name__}, not a text or None")
    return VerifierReply(text=found if found and len(found) <= _LONGEST_ANSWER else None)


async def _finish(value: object) -> object:
    assert inspect.isawaitable(value)
    return await value


def _described(error: BaseException) -> str:
    """Bounded, also for exceptions whose text cannot be had."""
    try:
        return f"{type(error).__name__}: {error}"[:_REASON_CHARACTERS]
    except Exception:  # the __str__ of an exception of the user's
        return type(error).__name__
