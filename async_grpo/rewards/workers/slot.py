"""One slot of the pool: a worker, which is replaced if it hangs or dies, and after `items_per_worker` items.

    pool --judge(items)--> WorkerSlot --a VerifierRequest per item--> worker --a reply per verifier--> WorkerSlot

All requests of a call are sent in one write, and the worker answers them in order. (A round trip per item would cost
the server more than most verifiers take.) The slot waits for one reply at a time, for at most `deadline_s`: until the
worker's next frame, the end of its channel, or the deadline, at which the worker is killed.

The slot requests a new worker only when the previous one and all its descendants are gone. So there are never more
workers than slots, and a verifier that leaks processes cannot pile them up.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec

from async_grpo.config.rewards import RewardsConfig
from async_grpo.errors import WaitTimeout, WireError
from async_grpo.rewards.base import ExtractedAnswer, FailureKind, Outcome, RewardFailure, RewardInput
from async_grpo.rewards.workers.client import SupervisorClient, WorkerHandle
from async_grpo.rewards.workers.messages import (
    MAX_REPLY_BYTES,
    VerifierRequest,
    WorkerExited,
    WorkerReady,
    pack,
    unpack,
)
from async_grpo.utils.child_process import signal_name
from async_grpo.utils.frames import FrameReader

_GRACE_S = 0.05
"""Extra time after a missed deadline. If the event loop was late and not the verifier, the reply has already arrived
and counts."""
_END_GRACE_S = 1.0
"""Time for a worker whose channel has closed to exit by itself. Killing it earlier would hide its own exit code."""
_KILL_TIMEOUT_S = 30.0
_SHOWN_OUTPUT = 300
_OUT_OF_MEMORY = "used more than rewards.memory_bytes and was killed"

_FATAL_KINDS: frozenset[FailureKind] = frozenset({"timeout", "crashed", "output", "memory", "start"})
"""Failures after which the worker is not used again."""


@dataclass(eq=False)
class _Worker:
    """A running worker that has loaded its verifiers."""

    handle: WorkerHandle
    frames: FrameReader
    writer: asyncio.StreamWriter
    broken: dict[str, str] = field(default_factory=dict)
    items: int = 0


class WorkerSlot:
    """Runs verifiers in at most one worker at a time. Only one caller may use it at a time."""

    def __init__(self, supervisor: SupervisorClient, names: Sequence[str], limits: RewardsConfig) -> None:
        self._supervisor = supervisor
        self._names = names
        self._limits = limits
        self._worker: _Worker | None = None
        self._handle: WorkerHandle | None = None
        """The last requested worker, until it has exited."""
        self.extracting: frozenset[str] = frozenset()
        """Names of the verifiers that can extract answers, as the last worker reported them."""

    async def judge(self, items: Sequence[RewardInput]) -> list[dict[str, Outcome]]:
        """Return the outcomes per item, by verifier. If a verifier hangs or crashes, the others still run in a new
        worker."""
        names = list(self._names)
        requests = []
        for item in items:
            plain_item = item._replace(metadata=dict(item.metadata))  # msgspec does not encode other mappings
            requests.append(VerifierRequest(names, plain_item))
        return await self._collect_replies(requests)

    async def extract(self, completion: str, name: str) -> ExtractedAnswer:
        """Return the answer that the verifier `name` extracts from the completion."""
        request = VerifierRequest([name], RewardInput(completion, ""), extract=True)
        replies: list[dict[str, ExtractedAnswer]] = await self._collect_replies([request])
        return replies[0][name]

    async def warm(self) -> None:
        """Start a worker before the first item. A failure is reported when the worker is needed."""
        if self._worker is None:
            await self._start()

    async def _collect_replies(self, requests: Sequence[VerifierRequest]) -> list[dict[str, Any]]:
        """Return the replies per request, by verifier; RewardFailure for a verifier without a reply."""
        replies: list[dict[str, Any]] = [{} for _ in requests]
        if self._worker is not None and self._worker.handle.exited.done():
            self._drop()  # it died while idle, for example in a thread that an earlier item left behind

        try:
            while unanswered := _find_unanswered(requests, replies):
                worker = self._worker or await self._start()
                if isinstance(worker, RewardFailure):
                    for index, request in unanswered.items():
                        replies[index] |= dict.fromkeys(request.names, worker)
                else:
                    lifetime_left = self._limits.items_per_worker - worker.items
                    await self._exchange(worker, dict(islice(unanswered.items(), lifetime_left)), replies)
        except BaseException:
            # Replies of this call may still arrive. Reusing the worker would assign them to the next call.
            self._drop()
            raise

        return replies

    def _drop(self) -> None:
        """Kill the worker, if any, without waiting. `_start` waits until it is gone."""
        if self._handle is not None:
            self._supervisor.kill(self._handle)
        if self._worker is not None:
            self._worker.writer.transport.abort()
            self._worker = None

    async def _start(self) -> _Worker | RewardFailure:
        """Return a worker that has loaded its verifiers, or the reason why it could not start."""
        await self._wait_for_exit()
        handle = self._handle = await self._supervisor.spawn()
        reader, writer = await asyncio.open_unix_connection(sock=handle.channel)
        worker = _Worker(handle, FrameReader(reader, MAX_REPLY_BYTES), writer)
        try:
            async with asyncio.timeout(self._limits.start_timeout_s):
                ready = unpack(await worker.frames.next(), WorkerReady)
                worker.broken, self.extracting = ready.broken, frozenset(ready.extracting)
        except TimeoutError:
            return RewardFailure(
                "start",
                f"the verifiers were not loaded within rewards.start_timeout_s ({self._limits.start_timeout_s:g} s). "
                "Raise it, or fix the import that hangs",
            )
        except (asyncio.IncompleteReadError, ConnectionError, WireError):
            return RewardFailure(
                "start", f"while the verifiers were loaded, the process {await self._exit_reason(handle)}"
            )
        else:
            self._worker = worker
            return worker
        finally:
            if self._worker is None:
                writer.transport.abort()
                self._supervisor.kill(handle)

    async def _exchange(
        self, worker: _Worker, requests: Mapping[int, VerifierRequest], replies: list[dict[str, Any]]
    ) -> None:
        """Send the requests and add their replies, in order. Stop after a reply that cost the worker."""
        sent = {}
        for index, request in requests.items():
            for name in request.names:
                if name in worker.broken:
                    replies[index][name] = RewardFailure("import", worker.broken[name])
            loaded = [name for name in request.names if name not in worker.broken]
            sent[index] = msgspec.structs.replace(request, names=loaded)

        # Do not drain: the worker reads a request only after it has answered the previous one, so draining would wait
        # for verifiers without their deadline.
        worker.writer.write(b"".join(pack(request) for request in sent.values()))
        for index, request in sent.items():
            kind = ExtractedAnswer if request.extract else Outcome
            for name in request.names:
                replies[index][name] = reply = await self._reply(worker, kind)
                if isinstance(reply, RewardFailure) and reply.kind in _FATAL_KINDS:
                    self._drop()
                    return

        worker.items += len(sent)
        if worker.items >= self._limits.items_per_worker or worker.broken:
            self._drop()  # a new worker may be able to import the broken verifiers

    async def _reply(self, worker: _Worker, kind: Any) -> Any:
        """Return the next reply, of type `kind`, or the reason why there is none."""
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limits.deadline_s):
                    return unpack(await worker.frames.next(), kind)
            async with asyncio.timeout(_GRACE_S):
                return unpack(await worker.frames.next(), kind)
        except TimeoutError:
            return RewardFailure("timeout", f"it took longer than {self._limits.deadline_s:g} s and was killed")
        except (asyncio.IncompleteReadError, ConnectionError):
            reason = await self._exit_reason(worker.handle)
            kind_of_failure: FailureKind = "memory" if reason == _OUT_OF_MEMORY else "crashed"
            return RewardFailure(kind_of_failure, f"its process {reason}")
        except WireError as error:
            return RewardFailure("output", f"other code in the process wrote to the pool's channel: {error}")

    async def _exit_reason(self, handle: WorkerHandle) -> str:
        """Wait for a worker whose channel has closed, and return how it exited."""
        await asyncio.wait([handle.exited], timeout=_END_GRACE_S)
        self._supervisor.kill(handle)
        return _describe_exit(await self._wait_for_exit())

    async def _wait_for_exit(self) -> WorkerExited | None:
        """Wait until the last worker and all its descendants are gone. Raises WaitTimeout."""
        handle = self._handle
        if handle is None:
            return None
        await asyncio.wait([handle.exited], timeout=_KILL_TIMEOUT_S)
        if not handle.exited.done():
            raise WaitTimeout(f"verifier process {handle.number} to end after SIGKILL", _KILL_TIMEOUT_S)
        self._handle = None
        return handle.exited.result()


def _find_unanswered(
    requests: Sequence[VerifierRequest], replies: Sequence[Mapping[str, Any]]
) -> dict[int, VerifierRequest]:
    """Return the requests that lack replies, by index, each with the verifiers that have not replied."""
    unanswered = {}
    for index, request in enumerate(requests):
        names = [name for name in request.names if name not in replies[index]]
        if names:
            unanswered[index] = msgspec.structs.replace(request, names=names)
    return unanswered


def _describe_exit(exited: WorkerExited | None) -> str:
    if exited is None or exited.cause == "lost":
        return "ended with its supervisor"
    if exited.cause == "memory":
        return _OUT_OF_MEMORY
    if exited.cause:
        return "closed its channel and was killed"
    reason = f"exited with code {exited.code}" if exited.code >= 0 else f"was killed by {signal_name(-exited.code)}"
    output = _excerpt(exited.output.strip())
    return f"{reason}. Output: {output}" if output else reason


def _excerpt(output: str) -> str:
    """Return the start of the report of Python's fault handler, if there is one; else the end of the output."""
    start = output.rfind("Fatal Python error")
    return output[start:][:_SHOWN_OUTPUT] if start >= 0 else output[-_SHOWN_OUTPUT:]
