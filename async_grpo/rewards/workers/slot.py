"""One place in the pool: a worker, and its replacement when it hangs, dies or has served its time.

    pool --judge(item)--> WorkerSlot --Assignment--> worker --one Answer a verifier--> WorkerSlot

It waits for one answer at a time, at most `deadline_s`: the worker's next frame unblocks it, or the end of its
channel, or the deadline, at which the worker is killed. Before a new worker is asked for, it waits until nothing
of the last one is left, so that never more workers run than there are slots.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from async_grpo.errors import WaitTimeout, WireError
from async_grpo.rewards.base import FailureKind, Outcome, RewardFailure, RewardInput
from async_grpo.rewards.workers.client import SupervisorClient, WorkerHandle
from async_grpo.rewards.workers.messages import (
    MAX_ANSWER_BYTES,
    VerifierReply,
    VerifierRequest,
    WorkerExited,
    WorkerReady,
    pack,
    unpack,
)
from async_grpo.utils.frames import FrameReader

_GRACE_S = 0.05
"""The event loop may be late, and not the verifier: an answer that is there by now counts."""
_END_GRACE_S = 1.0
"""For a worker whose channel has closed to end by itself, so that its own exit code is known."""
_KILL_TIMEOUT_S = 30.0
_SHOWN_OUTPUT = 300
_TOO_LARGE = "used more than rewards.memory_bytes and was killed"

_WITH_WORKER: frozenset[FailureKind] = frozenset({"timeout", "crashed", "output", "memory", "start"})
"""Failures after which the worker is not used again."""


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Of every worker."""

    deadline_s: float
    start_timeout_s: float
    items: int


@dataclass(eq=False)
class _Worker:
    """One that has said hello."""

    ward: WorkerHandle
    frames: FrameReader
    writer: asyncio.StreamWriter
    broken: dict[str, str] = field(default_factory=dict)
    items: int = 0


class WorkerSlot:
    """Used by one caller at a time."""

    def __init__(self, link: SupervisorClient, names: Sequence[str], limits: WorkerLimits) -> None:
        self._link = link
        self._names = names
        self._limits = limits
        self._worker: _Worker | None = None
        self._ward: WorkerHandle | None = None
        """The last that was asked for, until it has ended."""
        self.extracting: frozenset[str] = frozenset()
        """Verifiers that find answers, as the last worker said."""

    async def judge(self, item: RewardInput) -> dict[str, Outcome]:
        """An outcome for every verifier. One that hangs or crashes costs the worker, not the other verifiers."""
        answers = await self._ask_all(item, self._names)
        return {name: _outcome(answer) for name, answer in answers.items()}

    async def extract(self, completion: str, name: str) -> str | RewardFailure | None:
        """The answer in a completion, as this verifier finds it; None if there is none."""
        answers = await self._ask_all(RewardInput(completion, ""), [name], extract=True)
        answer = answers[name]
        return answer if isinstance(answer, RewardFailure) else answer.text

    async def warm(self) -> None:
        """Have a worker, so that the first item need not wait for it. A failure shows when it is needed."""
        if self._worker is None:
            await self._start()

    async def _ask_all(
        self, item: RewardInput, names: Sequence[str], *, extract: bool = False
    ) -> dict[str, VerifierReply | RewardFailure]:
        """Of every verifier, or why there is none."""
        answers: dict[str, VerifierReply | RewardFailure] = {}
        self._drop_the_dead()
        try:
            while left := [name for name in names if name not in answers]:
                worker = self._worker or await self._start()
                if isinstance(worker, RewardFailure):
                    return {**answers, **dict.fromkeys(left, worker)}
                answers |= await self._ask(worker, item, left, extract=extract)
        except BaseException:
            self._drop()  # answers may still be on their way: never reuse it
            raise
        self._count_item()
        return answers

    def _count_item(self) -> None:
        if self._worker is not None:
            self._worker.items += 1
            if self._worker.items >= self._limits.items or self._worker.broken:  # an import may do better next time
                self._drop()

    def _drop_the_dead(self) -> None:
        """A worker that died while it had nothing to do, of what an earlier item left behind."""
        if self._worker is not None and self._worker.ward.ended.done():
            self._drop()

    def _drop(self) -> None:
        """Kill the worker, if there is one; its end is awaited before the next is started."""
        if self._ward is not None:
            self._link.kill(self._ward)
        if self._worker is not None:
            self._worker.writer.transport.abort()
            self._worker = None

    async def _start(self) -> _Worker | RewardFailure:
        """A worker that has loaded its verifiers, or why there is none."""
        await self._bury()
        ward = self._ward = await self._link.spawn()
        reader, writer = await asyncio.open_unix_connection(sock=ward.channel)
        worker = _Worker(ward, FrameReader(reader, MAX_ANSWER_BYTES), writer)
        try:
            async with asyncio.timeout(self._limits.start_timeout_s):
                hello = unpack(await worker.frames.next(), WorkerReady)
                worker.broken, self.extracting = hello.broken, frozenset(hello.extracting)
        except TimeoutError:
            return RewardFailure("start", f"not loaded within {self._limits.start_timeout_s:g} s. Does an import hang?")
        except (asyncio.IncompleteReadError, ConnectionError, WireError):
            return RewardFailure("start", f"while the verifiers were loaded, the process {await self._end_of(ward)}")
        else:
            self._worker = worker
            return worker
        finally:
            if self._worker is None:
                writer.transport.abort()
                self._link.kill(ward)

    async def _ask(
        self, worker: _Worker, item: RewardInput, names: Sequence[str], *, extract: bool
    ) -> dict[str, VerifierReply | RewardFailure]:
        """Answers of the verifiers, in order, up to and including the first that the worker did not survive."""
        answers: dict[str, VerifierReply | RewardFailure] = {
            name: RewardFailure("import", worker.broken[name]) for name in names if name in worker.broken
        }
        asked = [name for name in names if name not in answers]
        task = (item.completion, item.answer, item.prompt, dict(item.metadata), item.tool_calls)
        frame = pack(VerifierRequest(asked, *task, extract=extract))
        worker.writer.write(frame)  # not drained: the worker reads it all before it answers, under the deadline
        for name in asked:
            answers[name] = answer = await self._heard(worker)
            if isinstance(answer, RewardFailure) and answer.kind in _WITH_WORKER:
                self._drop()
                break
        return answers

    async def _heard(self, worker: _Worker) -> VerifierReply | RewardFailure:
        """The next answer, or what kept it from coming, or what the worker says that went wrong."""
        try:
            answer = await self._answer(worker.frames)
            return RewardFailure(cast(FailureKind, answer.kind), answer.reason) if answer.kind else answer
        except TimeoutError:
            return RewardFailure("timeout", f"it took longer than {self._limits.deadline_s:g} s and was killed")
        except (asyncio.IncompleteReadError, ConnectionError):
            return await self._autopsy(worker.ward)
        except WireError as error:
            return RewardFailure("output", f"something wrote to the pool's channel: {error}")

    async def _answer(self, frames: FrameReader) -> VerifierReply:
        """Raises TimeoutError."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.deadline_s):
                return unpack(await frames.next(), VerifierReply)
        async with asyncio.timeout(_GRACE_S):
            return unpack(await frames.next(), VerifierReply)

    async def _autopsy(self, ward: WorkerHandle) -> RewardFailure:
        how = await self._end_of(ward)
        kind: FailureKind = "memory" if how == _TOO_LARGE else "crashed"
        return RewardFailure(kind, f"its process {how}")

    async def _end_of(self, ward: WorkerHandle) -> str:
        """How a worker whose channel has closed came to its end."""
        await asyncio.wait([ward.ended], timeout=_END_GRACE_S)
        self._link.kill(ward)
        return _how_it_ended(await self._bury())

    async def _bury(self) -> WorkerExited | None:
        """Wait until nothing is left of the last worker. Raises WaitTimeout if the kernel does not end it."""
        ward = self._ward
        if ward is None:
            return None
        await asyncio.wait([ward.ended], timeout=_KILL_TIMEOUT_S)
        if not ward.ended.done():
            raise WaitTimeout(f"verifier process {ward.number} to end after SIGKILL", _KILL_TIMEOUT_S)
        self._ward = None
        return ward.ended.result()


def _outcome(answer: VerifierReply | RewardFailure) -> Outcome:
    """Of judging."""
    if isinstance(answer, RewardFailure):
        return answer
    return RewardFailure("output", "it gave no score") if answer.score is None else answer.score


def _how_it_ended(ended: WorkerExited | None) -> str:
    if ended is None or ended.cause == "lost":
        return "ended with its warden"
    if ended.cause == "memory":
        return _TOO_LARGE
    if ended.cause:
        return "closed its channel and was killed"
    how = f"ended with code {ended.code}" if ended.code >= 0 else f"was ended by {_signal_name(-ended.code)}"
    output = _shown(ended.output.strip())
    return f"{how}. It wrote: {output}" if output else how


def _shown(output: str) -> str:
    """Of what Python's fault handler wrote the beginning, else the end."""
    start = output.rfind("Fatal Python error")
    return output[start:][:_SHOWN_OUTPUT] if start >= 0 else output[-_SHOWN_OUTPUT:]


def _signal_name(number: int) -> str:
    """SIGKILL that is not the pool's own comes from the kernel when the machine has no memory left, as a rule."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
