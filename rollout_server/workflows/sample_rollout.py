"""Makes one sample within its deadline.

    Dispatcher, EvalRunner --make--> SampleMaker --asyncio task--> workflow --> SampleSession --> engine

`make` waits for the workflow; its return unblocks it, or the deadline. A workflow that does not end when it is
cancelled is left behind. A workflow that blocks the event loop is found by `utils.aio.watched_loop`.
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
"""A sample may take SLACK times as long as a sample of full length takes on average."""
LEAST_S = 120.0
"""Least derived deadline in seconds: pauses for new weights, and tools, take as long for short samples."""
LEAST_LOOK_S = 0.05
"""Least number of seconds between two looks at a clock that may stand still."""
END_S = 1.0
"""Seconds that a cancelled workflow gets to end."""

log = structlog.get_logger()


@dataclass
class SampleDeadline:
    """How long a sample may take: `most_s` seconds (None: no limit), or less once the speed of the server is known."""

    most_s: float | None
    longest: int = 0
    """Most tokens of a sample, for a derived deadline; 0 if the deadline is always most_s."""
    seconds: float = 0.0
    tokens: int = 0

    @classmethod
    def for_training(cls, config: RunConfig) -> SampleDeadline:
        """The deadline of training: rollout.sample_deadline_s if it is set, else derived."""
        is_given = config.rollout.sample_deadline_s is not None
        return cls(config.longest_sample_s, 0 if is_given else config.sampling.max_tokens)

    def record(self, seconds: float, tokens: int) -> None:
        """Count a sample that was made on this server: its seconds and tokens."""
        self.seconds += seconds
        self.tokens += tokens

    @property
    def deadline_s(self) -> float | None:
        """Seconds for the next sample, or None. A derived deadline is SLACK times as long as a sample of full length
        takes at the average speed so far, within [LEAST_S, most_s]."""
        if self.most_s is None or not self.longest or not self.tokens:
            return self.most_s
        return min(self.most_s, max(LEAST_S, SLACK * self.longest * self.seconds / self.tokens))


class SampleMaker:
    """Runs a workflow within its deadline. `name` is the workflow's in the configuration, for error texts; `clock_s` is
    what deadlines are measured by."""

    def __init__(
        self, workflow: Workflow, name: str, deadline: SampleDeadline, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._workflow = workflow
        self._name = name
        self._deadline = deadline
        self._clock_s = clock_s

    async def make(self, task: Task, session: SampleSession) -> Sample:
        """Run the workflow once and return its sample, which is unfinished only if the engine cut it short.

        Raises SampleOverdue, WorkflowFailed, and what the workflow raises.
        """
        name = f"sample {session.index} of task {task.index}, workflow {self._name}"
        deadline_s = self._deadline.deadline_s
        started_s = self._clock_s()
        making = asyncio.create_task(self._workflow.run(task, session), name=name)
        try:
            left_s = deadline_s
            while not making.done() and (left_s is None or left_s > 0):
                await asyncio.wait([making], timeout=None if left_s is None else max(left_s, LEAST_LOOK_S))
                left_s = None if deadline_s is None else deadline_s - (self._clock_s() - started_s)
            if deadline_s is not None and not making.done():
                raise SampleOverdue(name, deadline_s, " < ".join(where_it_waits(making)))
            sample = _result_of(making, name)
        finally:
            await _end(making)
        if sample.finish_reason == "" and not session.is_cut_short:
            # The dispatcher would take it for an interrupted sample and have the group generated again, without end.
            raise WorkflowFailed(
                f"{name} returned an unfinished sample, although the engine has not interrupted it. Call "
                "`await session.turn()` before `session.sample(text)`"
            )
        self._deadline.record(self._clock_s() - started_s, sample.length)
        return sample


def _result_of(making: asyncio.Task[Sample], name: str) -> Sample:
    """The sample of a workflow that has returned. Raises what it raised, and WorkflowFailed."""
    if making.cancelled():
        # Nobody here has cancelled it. Passed on, the CancelledError would look like a cancellation of the whole group,
        # whose task would end without a word while its lease is renewed for ever.
        raise WorkflowFailed(
            f"{name} ended with CancelledError, although nothing has cancelled it: something that it awaits was "
            "cancelled, such as a task that it shares with other samples. Catch that in the workflow"
        )
    sample = making.result()
    if not isinstance(sample, Sample):
        raise WorkflowFailed(f"{name} returned {type(sample).__name__}, not a Sample. Return `session.sample(text)`")
    return sample


async def _end(making: asyncio.Task[Sample]) -> None:
    """Cancel the task if it has not ended, and wait END_S for its end."""
    if not making.done():
        making.cancel()
        await asyncio.wait([making], timeout=END_S)
    if not making.done():
        log.error("a workflow does not end when it is cancelled, and is left behind", what=making.get_name())
    elif not making.cancelled():
        making.exception()  # the sample may have come too late: retrieve its error, so that asyncio does not log it


def where_it_waits(task: asyncio.Task[Any]) -> list[str]:
    """The stack of a task that is suspended, innermost first (`Task.get_stack` has its outermost frame only)."""
    return [*_frames(task.get_coro())][::-1]


def _frames(awaited: Any) -> Iterator[str]:
    """Frames of a coroutine or generator-based awaitable, and of what it waits for, outermost first."""
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is not None:
            yield f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
