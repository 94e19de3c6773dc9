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
from collections.abc import Sequence

from async_grpo.errors import ConfigError
from async_grpo.rewards.frames import Answer, Assignment, Hello, pack, read_frame_blocking
from async_grpo.rewards.item import Item
from async_grpo.rewards.resolve import Judge, resolve_verifier
from async_grpo.rewards.score import as_score

_REASON_CHARACTERS = 500


def serve(channel: socket.socket, names: Sequence[str]) -> None:
    """Until the channel closes."""
    judges: dict[str, Judge] = {}
    broken: dict[str, str] = {}
    for name in names:
        try:
            judges[name] = resolve_verifier(name)
        except ConfigError as error:
            broken[name] = str(error)
        except BaseException as error:  # a module may call sys.exit
            broken[name] = f"rewards.functions: importing {name!r} ended with {_described(error)}. Mend the module"
    requests, me = channel.makefile("rb"), os.getpid()
    channel.sendall(pack(Hello(broken)))
    with asyncio.Runner() as runner:
        while (assignment := read_frame_blocking(requests, Assignment)) is not None:
            item = Item(assignment.completion, assignment.answer, assignment.prompt, assignment.metadata)
            for name in assignment.names:
                answer = _judge(runner, judges[name], item)
                if os.getpid() != me:
                    os._exit(0)  # a verifier has forked and its child came back here: only one may answer
                channel.sendall(pack(answer))


def _judge(runner: asyncio.Runner, judge: Judge, item: Item) -> Answer:
    try:
        value = judge(item)
        if inspect.isawaitable(value):
            value = runner.run(_finish(value))
    except MemoryError as error:
        return Answer(kind="memory", reason=_described(error))
    except BaseException as error:  # whatever a verifier raises, SystemExit included, costs its own item only
        return Answer(kind="raised", reason=_described(error))
    if value is None:
        return Answer(kind="none", reason="it returned None")
    try:
        return Answer(score=as_score(value))
    except ValueError as error:
        return Answer(kind="bad_value", reason=f"it returned no score: {error}"[:_REASON_CHARACTERS])


async def _finish(value: object) -> object:
    assert inspect.isawaitable(value)
    return await value


def _described(error: BaseException) -> str:
    """Bounded, also for exceptions whose text cannot be had."""
    try:
        return f"{type(error).__name__}: {error}"[:_REASON_CHARACTERS]
    except Exception:  # the __str__ of an exception of the user's
        return type(error).__name__
