"""One sample within its deadline, whatever its workflow does.

    dispatcher, runner --make--> SampleMaker --a task of its own--> workflow --> Session --> engine

`make` waits for the workflow; its return unblocks it, or the deadline. A workflow that does not even end when it is
cancelled is left behind, and keeps nobody waiting. One that never lets go of the event loop is the matter of
`loop_watch`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import structlog

from async_grpo.config import RunConfig
from async_grpo.errors import SampleOverdue
from async_grpo.wire import Sample, Task
from rollout_server.workflows.base import Workflow
from rollout_server.workflows.session import SampleSession

SLACK = 10
"""A sample may take so many times as long as one of full length takes on average."""
LEAST_S = 120.0
"""Of a deadline that is derived: pauses for new weights, and tools, take no notice of the length."""
END_S = 1.0
"""What a workflow that is cancelled gets to end."""

log = structlog.get_logger()


@dataclass
class SampleDeadline:
    """How long a sample may take: `most_s` (None: for ever), or less as soon as that can be derived."""

    most_s: float | None
    longest: int = 0
    """Tokens that a sample may have, if the deadline is derived; 0: it is most_s."""
    seconds: float = 0.0
    tokens: int = 0

    @classmethod
    def of_training(cls, config: RunConfig) -> SampleDeadline:
        """`rollout.sample_deadline_s`, or derived."""
        is_given = config.rollout.sample_deadline_s is not None
        return cls(config.longest_sample_s, 0 if is_given else config.sampling.max_tokens)

    def saw(self, seconds: float, tokens: int) -> None:
        """A sample that has come about on this server."""
        self.seconds += seconds
        self.tokens += tokens

    @property
    def deadline_s(self) -> float | None:
        """Derived: SLACK times as long as a sample of full length takes at the average speed so far, within
        [LEAST_S, most_s]."""
        if self.most_s is None or not self.longest or not self.tokens:
            return self.most_s
        return min(self.most_s, max(LEAST_S, SLACK * self.longest * self.seconds / self.tokens))


class SampleMaker:
    """Runs the workflow, which the configuration calls `name`."""

    def __init__(self, workflow: Workflow, name: str, pace: SampleDeadline) -> None:
        self._workflow = workflow
        self._name = name
        self._pace = pace

    async def make(self, task: Task, session: SampleSession) -> Sample:
        """The workflow's sample. Raises SampleOverdue, and what the workflow raises."""
        name = f"sample {session.index} of task {task.index}, workflow {self._name}"
        clock, deadline_s = asyncio.get_running_loop().time, self._pace.deadline_s
        started_s = clock()
        making = asyncio.create_task(self._workflow.run(task, session), name=name)
        try:
            await asyncio.wait([making], timeout=deadline_s)
            if deadline_s is not None and not making.done():
                raise SampleOverdue(name, deadline_s, " < ".join(where_it_waits(making)))
            sample = making.result()
        finally:
            await _end(making)
        self._pace.saw(clock() - started_s, sample.length)
        return sample


async def _end(making: asyncio.Task[Sample]) -> None:
    """Cancel it, unless it has ended."""
    if making.done():
        return
    making.cancel()
    await asyncio.wait([making], timeout=END_S)
    if not making.done():
        log.error("a workflow does not end when it is cancelled, and is left behind", what=making.get_name())
    elif not making.cancelled():
        making.exception()  # it was asked for too late: nobody waits for it


def where_it_waits(task: asyncio.Task[Any]) -> list[str]:
    """The stack of a task that is suspended, innermost first (`Task.get_stack` has its outermost frame only)."""
    return [*_frames(task.get_coro())][::-1]


def _frames(awaited: Any) -> Iterator[str]:
    """Of a coroutine, or of an awaitable that is based on a generator, and what each waits for."""
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is not None:
            yield f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
