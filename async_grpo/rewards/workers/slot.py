"""One slot of the pool: a worker, and its replacement when it hangs, dies or has served its number of items.

    pool --judge(items)--> WorkerSlot --a VerifierRequest per item--> worker --a reply per verifier--> WorkerSlot

All requests of a call are sent in one write, and the worker answers them in order. (A separate exchange for every item
costs the server more than most verifiers take.) The slot waits for one reply at a time, for `deadline_s` at most. The
worker's next frame unblocks it, or the end of its channel, or the deadline, at which the worker is killed. Before it
requests a new worker, it waits until the last one and all that it started are gone. So there are never more workers
than slots.
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
"""After a missed deadline: the event loop may be late, not the verifier, so a reply that has arrived counts."""
_END_GRACE_S = 1.0
"""Time for a worker whose channel has closed to exit by itself, so that its own exit code is known."""
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
    """Runs verifiers in one worker at a time. One caller at a time may use it."""

    def __init__(self, supervisor: SupervisorClient, names: Sequence[str], limits: RewardsConfig) -> None:
        self._supervisor = supervisor
        self._names = names
        self._limits = limits
        self._worker: _Worker | None = None
        self._handle: WorkerHandle | None = None
        """The last worker that was requested, until it has exited."""
        self.extracting: frozenset[str] = frozenset()
        """Names of the verifiers that can extract answers, as the last worker reported them."""

    async def judge(self, items: Sequence[RewardInput]) -> list[dict[str, Outcome]]:
        """For every item the outcome of each verifier, by name. A verifier that hangs or crashes costs the worker, not
        the other outcomes."""
        names = list(self._names)
        return await self._collect_replies(
            [VerifierRequest(names, item._replace(metadata=dict(item.metadata))) for item in items]
        )

    async def extract(self, completion: str, name: str) -> ExtractedAnswer:
        """The answer that the verifier `name` finds in the completion."""
        request = VerifierRequest([name], RewardInput(completion, ""), extract=True)
        replies: list[dict[str, ExtractedAnswer]] = await self._collect_replies([request])
        return replies[0][name]

    async def warm(self) -> None:
        """Start a worker ahead of the first item. A failure shows when the worker is needed."""
        if self._worker is None:
            await self._start()

    async def _collect_replies(self, requests: Sequence[VerifierRequest]) -> list[dict[str, Any]]:
        """For every request the reply of each verifier, or why it has none."""
        replies: list[dict[str, Any]] = [{} for _ in requests]
        if self._worker is not None and self._worker.handle.exited.done():
            self._drop()  # it died while it was idle, because of what an earlier item left behind

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
            self._drop()  # replies may still be on their way: never reuse the worker
            raise

        return replies

    def _drop(self) -> None:
        """Kill the worker, if there is one; its end is awaited before the next is started."""
        if self._handle is not None:
            self._supervisor.kill(self._handle)
        if self._worker is not None:
            self._worker.writer.transport.abort()
            self._worker = None

    async def _start(self) -> _Worker | RewardFailure:
        """A worker that has loaded its verifiers, or why there is none."""
        await self._wait_for_exit()
        handle = self._handle = await self._supervisor.spawn()
        reader, writer = await asyncio.open_unix_connection(sock=handle.channel)
        worker = _Worker(handle, FrameReader(reader, MAX_REPLY_BYTES), writer)
        try:
            async with asyncio.timeout(self._limits.start_timeout_s):
                ready = unpack(await worker.frames.next(), WorkerReady)
                worker.broken, self.extracting = ready.broken, frozenset(ready.extracting)
        except TimeoutError:
            return RewardFailure("start", f"not loaded within {self._limits.start_timeout_s:g} s. Does an import hang?")
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
        """Send the requests and add their replies, in order, up to the first that the worker did not survive."""
        sent = {}
        for index, request in requests.items():
            broken = {
                name: RewardFailure("import", why) for name, why in worker.broken.items() if name in request.names
            }
            replies[index] |= broken
            sent[index] = msgspec.structs.replace(request, names=[n for n in request.names if n not in broken])

        # Not drained: the worker reads a request only after it has answered the one before, under its deadline.
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
            self._drop()  # what is broken may be imported the next time

    async def _reply(self, worker: _Worker, kind: Any) -> Any:
        """The next reply, of this type, or why no reply came."""
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limits.deadline_s):
                    return unpack(await worker.frames.next(), kind)
            async with asyncio.timeout(_GRACE_S):
                return unpack(await worker.frames.next(), kind)
        except TimeoutError:
            return RewardFailure("timeout", f"it took longer than {self._limits.deadline_s:g} s and was killed")
        except (asyncio.IncompleteReadError, ConnectionError):
            how = await self._exit_reason(worker.handle)
            return RewardFailure("memory" if how == _OUT_OF_MEMORY else "crashed", f"its process {how}")
        except WireError as error:
            return RewardFailure("output", f"something wrote to the pool's channel: {error}")

    async def _exit_reason(self, handle: WorkerHandle) -> str:
        """How a worker whose channel has closed came to exit."""
        await asyncio.wait([handle.exited], timeout=_END_GRACE_S)
        self._supervisor.kill(handle)
        return _describe_exit(await self._wait_for_exit())

    async def _wait_for_exit(self) -> WorkerExited | None:
        """Wait until the last worker and all that it started are gone. Raises WaitTimeout."""
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
    """The requests that still lack a reply, by index, each with the verifiers that have not replied."""
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
    how = f"ended with code {exited.code}" if exited.code >= 0 else f"was ended by {signal_name(-exited.code)}"
    output = _excerpt(exited.output.strip())
    return f"{how}. It wrote: {output}" if output else how


def _excerpt(output: str) -> str:
    """The beginning of what Python's fault handler wrote, if it wrote anything; else the end of the output."""
    start = output.rfind("Fatal Python error")
    return output[start:][:_SHOWN_OUTPUT] if start >= 0 else output[-_SHOWN_OUTPUT:]
