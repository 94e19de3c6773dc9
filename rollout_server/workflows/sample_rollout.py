"""Runs the workflow of one sample within its deadline.

    Dispatcher, EvalRunner --generate_sample--> WorkflowRunner --asyncio task--> workflow --> SampleSession --> engine

`generate_sample` waits until the workflow returns or the deadline passes. A workflow that does not end after it was
cancelled is abandoned. `utils.aio.watched_loop` detects a workflow that blocks the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import structlog

from async_grpo.config import RunConfig
from async_grpo.errors import SampleOverdue, WorkflowFailed
from async_grpo.wire import Sample, Task
from rollout_server.workflows.base import Workflow
from rollout_server.workflows.session import SampleSession

SLACK = 10
"""Factor of a derived deadline over the average time for a sample of full length."""
MIN_DERIVED_S = 120.0
"""Minimum of a derived deadline: pauses for new weights, and tools, do not get shorter with short samples."""
MIN_POLL_S = 0.05
"""Minimum poll interval; the clock stops while the engine sleeps, so waiting for the remaining time is not enough."""
CANCEL_TIMEOUT_S = 1.0
"""Seconds that a cancelled workflow gets to end."""

log = structlog.get_logger()


@dataclass
class SampleDeadline:
    """Time limit per sample: `max_s` seconds (None: no limit), or less once the server's speed is measured.

    `max_tokens` is the length of a full sample, for a derived deadline; None if the deadline is always `max_s`.
    """

    max_s: float | None
    max_tokens: int | None = None
    measured_s: float = 0.0
    measured_tokens: int = 0

    @classmethod
    def for_training(cls, config: RunConfig) -> SampleDeadline:
        """Training's deadline: rollout.sample_deadline_s if it is set, otherwise derived."""
        if config.rollout.sample_deadline_s is not None:
            return cls(config.max_sample_s)
        return cls(config.max_sample_s, config.sampling.max_tokens)

    def record_sample(self, seconds: float, tokens: int) -> None:
        """Count a sample of this server towards the measured speed."""
        self.measured_s += seconds
        self.measured_tokens += tokens

    @property
    def deadline_s(self) -> float | None:
        """Seconds for the next sample, or None.

        A derived deadline is SLACK * max_tokens * measured_s / measured_tokens, within [MIN_DERIVED_S, max_s].
        """
        if self.max_s is None or not self.max_tokens or not self.measured_tokens:
            return self.max_s
        derived_s = SLACK * self.max_tokens * self.measured_s / self.measured_tokens
        return min(self.max_s, max(MIN_DERIVED_S, derived_s))


class WorkflowRunner:
    """Runs a workflow within its deadline. `name` is the configured name, for error texts."""

    def __init__(
        self, workflow: Workflow, name: str, deadline: SampleDeadline, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._workflow = workflow
        self._name = name
        self._deadline = deadline
        self._clock_s = clock_s

    async def generate_sample(self, task: Task, session: SampleSession) -> Sample:
        """Run the workflow once and return its sample, which is unfinished only if the engine interrupted it.

        Raises SampleOverdue, WorkflowFailed, and the workflow's own errors.
        """
        name = f"sample {session.index} of task {task.index}, workflow {self._name}"
        deadline_s = self._deadline.deadline_s
        started_s = self._clock_s()
        # A task, so that its stack can be read at the deadline, and so that we can abandon it if it ignores its
        # cancellation.
        running = asyncio.create_task(self._workflow.run(task, session), name=name)
        try:
            if deadline_s is None:
                await asyncio.wait([running])
            else:
                await self._wait_until_deadline(running, started_s, deadline_s)
                if not running.done():
                    raise SampleOverdue(name, deadline_s, " < ".join(suspended_stack(running)))
            sample = _take_result(running, name)
        finally:
            await _end_workflow(running)

        if sample.finish_reason == "" and not session.is_cut_short:
            # The dispatcher would take it for an interrupted sample and have the group generated again, forever.
            raise WorkflowFailed(
                f"{name} returned an unfinished sample, although the engine has not interrupted it. Call "
                "`await session.turn()` before `session.sample(text)`"
            )
        self._deadline.record_sample(self._clock_s() - started_s, sample.length)
        return sample

    async def _wait_until_deadline(self, running: asyncio.Task[Sample], started_s: float, deadline_s: float) -> None:
        remaining_s = deadline_s
        while not running.done() and remaining_s > 0:
            await asyncio.wait([running], timeout=max(remaining_s, MIN_POLL_S))
            remaining_s = deadline_s - (self._clock_s() - started_s)


def _take_result(running: asyncio.Task[Sample], name: str) -> Sample:
    """Return the sample of a workflow that has ended, or raise its error. Raises WorkflowFailed if it has neither."""
    if running.cancelled():
        # We have not cancelled it. If we passed the CancelledError on, it would look like a cancellation of the whole
        # group, whose task would end silently while its lease is renewed forever.
        raise WorkflowFailed(
            f"{name} ended with CancelledError, although the server has not cancelled it. Something that it awaits was "
            "cancelled, such as a task shared with other samples. Catch CancelledError in the workflow"
        )
    sample = running.result()
    if not isinstance(sample, Sample):
        raise WorkflowFailed(f"{name} returned {type(sample).__name__}, not a Sample. Return `session.sample(text)`")
    return sample


async def _end_workflow(running: asyncio.Task[Sample]) -> None:
    """Cancel the task if it has not ended, and wait at most CANCEL_TIMEOUT_S for its end."""
    if not running.done():
        running.cancel()
        await asyncio.wait([running], timeout=CANCEL_TIMEOUT_S)
    if not running.done():
        log.error("a workflow did not end after it was cancelled, and is abandoned", what=running.get_name())
    elif not running.cancelled():
        running.exception()  # it may have failed after the deadline: asyncio logs errors that are never retrieved


def suspended_stack(task: asyncio.Task[Any]) -> list[str]:
    """Stack of a suspended task, innermost frame first. (`Task.get_stack` returns only its outermost frame.)"""
    frames = list(_coroutine_frames(task.get_coro()))
    return frames[::-1]


def _coroutine_frames(awaited: Any) -> Iterator[str]:
    """Frames of a coroutine or generator-based awaitable, and of those that it awaits, outermost first."""
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is not None:
            yield f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
