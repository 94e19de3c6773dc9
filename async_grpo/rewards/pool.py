"""The reward pool: verifiers in processes that can be killed, judges behind HTTP.

    dispatcher --judge(group)--> RewardPool --> WorkerSlot 1 .. N --> worker processes   (below one supervisor)
                                            --> HttpJudge --> an HTTP server

- The items of a call are divided evenly among the slots. Each part waits for a free slot, and the part before it frees
  that slot, at the latest after one deadline per item and verifier. There is no explicit queue: callers block until a
  slot is free.
- A slot waits for one reply at a time (`workers.slot`). An HTTP request waits for its place and its reply
  (`http_judge`).

The event loop is never blocked: verifiers are started and run in other processes.
Before `aclose`, calls under way must have ended or been cancelled. Then the supervisor ends all workers.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import structlog

from async_grpo.config.rewards import RewardsConfig
from async_grpo.errors import AsyncGrpoError, ConfigError
from async_grpo.rewards.base import DRY_ITEM, Extracted, Outcome, RewardFailure, RewardInput, RewardResult, combine
from async_grpo.rewards.http_judge import HttpJudge
from async_grpo.rewards.registry import BUILTIN, SIGNATURE, check_name
from async_grpo.rewards.workers.client import SupervisorClient, worker_environment
from async_grpo.rewards.workers.slot import WorkerSlot

T = TypeVar("T")

_PROGRAMMING_ERRORS = (
    "TypeError",
    "NameError",
    "UnboundLocalError",
    "AttributeError",
    "ImportError",
    "ModuleNotFoundError",
)
_ACCEPTABLE_ON_DRY_CALL = ("none", "raised")

log = structlog.get_logger()


class RewardPool:
    """Judges completions: `async with RewardPool(config.rewards) as pool: await pool.judge(items)`."""

    def __init__(self, rewards: RewardsConfig) -> None:
        self._rewards = rewards
        self._names = [function.name for function in rewards.functions if function.http is None]
        for name in self._names:
            check_name(name)
        environment = worker_environment(os.environ, rewards.environment)
        self._http_judges = {
            f.name: HttpJudge(f.name, f.http, os.environ) for f in rewards.functions if f.http is not None
        }
        self.supervisor = SupervisorClient(self._names, rewards.memory_bytes, environment)
        self._slots = [
            WorkerSlot(self.supervisor, self._names, rewards) for _ in range(rewards.workers if self._names else 0)
        ]
        self._free: asyncio.LifoQueue[WorkerSlot] = asyncio.LifoQueue()
        self.failures: Counter[tuple[str, str]] = Counter()
        """Number of failures, by (name of the reward, kind of failure)."""
        self._extracting: frozenset[str] = frozenset()
        self._closed = False

    async def start(self) -> None:
        """Load every verifier and try it on DRY_ITEM. Raises ConfigError for one that cannot be used, and says why."""
        try:
            if self._slots:
                await self._try_verifiers(self._slots[0])
                self._extracting = self._slots[0].extracting
                await _all([slot.warm() for slot in self._slots[1:]])
        except BaseException:
            await self.aclose()
            raise
        for slot in reversed(self._slots):  # last in, first out: the warm one comes first
            self._free.put_nowait(slot)

    async def judge(self, items: Sequence[RewardInput]) -> list[RewardResult]:
        """A result per item, in order. Failures of verifiers are in the results, never raised.

        Raises WaitTimeout if the kernel does not end a killed process, AsyncGrpoError once the pool is closed.
        """
        if self._closed:
            raise AsyncGrpoError("the reward pool is closed: nothing can be judged any more")
        outcomes = await self._outcomes(items)
        results = [combine(of_item, self._rewards.functions) for of_item in outcomes]
        for result in results:
            for name, failure in result.failures.items():
                self._count(name, failure)
        return results

    def why_no_answers(self, name: str) -> str:
        """Why the reward function `name` cannot extract the answer from a completion; "" if it can."""
        if name in self._extracting:
            return ""
        if name in self._http_judges:
            return f"{name} is a judge behind HTTP, which gives a score and no answer"
        return f"the reward function {name} does not say which answer a completion gives (it has no `extract`)"

    async def try_verifiers(self, item: RewardInput) -> dict[str, Outcome]:
        """Name -> outcome of every reward function that is no HTTP judge; nothing is counted."""
        (outcomes,) = await self._in_process([item])
        return outcomes

    async def extract(self, name: str, completions: Sequence[str]) -> list[Extracted]:
        """The answer that the reward function `name` finds in each completion, in order.

        None where it finds none, RewardFailure where it failed. Raises as `judge` does.
        """
        if self._closed:
            raise AsyncGrpoError("the reward pool is closed: nothing can be extracted any more")
        return await _all([self._extract(name, completion) for completion in completions])

    async def aclose(self) -> None:
        """End all workers and close all connections."""
        self._closed = True
        await self.supervisor.aclose()
        for judge in self._http_judges.values():
            await judge.aclose()

    async def __aenter__(self) -> RewardPool:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _try_verifiers(self, slot: WorkerSlot) -> None:
        """A user's verifier may raise (so it says that it cannot judge), but it must be callable and return a score."""
        (outcomes,) = await slot.judge([DRY_ITEM])
        for name, outcome in outcomes.items():
            if not isinstance(outcome, RewardFailure):
                continue
            if outcome.kind in ("import", "start"):
                raise ConfigError(outcome.reason)
            wrong = outcome.kind not in _ACCEPTABLE_ON_DRY_CALL or outcome.reason.startswith(_PROGRAMMING_ERRORS)
            if wrong and name not in BUILTIN:
                raise ConfigError(
                    f"rewards.functions: {name!r} was tried on the completion {DRY_ITEM.completion!r} with the answer "
                    f"{DRY_ITEM.answer!r}, and failed ({outcome.kind}): {outcome.reason}. It should be {SIGNATURE}"
                )

    async def _outcomes(self, items: Sequence[RewardInput]) -> list[dict[str, Outcome]]:
        """For every item the outcome of each reward function, by name."""
        if not self._http_judges:
            return await self._in_process(items)
        requests = [self._over_http(judge, items) for judge in self._http_judges.values()]
        parts = await _all([self._in_process(items), *requests])
        merged: list[dict[str, Outcome]] = [{} for _ in items]
        for part in parts:
            for outcomes, of_part in zip(merged, part, strict=True):
                outcomes |= of_part
        return merged

    async def _over_http(self, judge: HttpJudge, items: Sequence[RewardInput]) -> list[dict[str, Outcome]]:
        return await _all([judge.judge(item) for item in items])

    async def _in_process(self, items: Sequence[RewardInput]) -> list[dict[str, Outcome]]:
        """The outcomes of the verifiers in worker processes. Every slot gets an equal share of the items."""
        if not self._slots:
            return [{} for _ in items]
        share = -(-len(items) // len(self._slots))
        shares = [items[start : start + share] for start in range(0, len(items), max(share, 1))]
        return [outcomes for part in await _all([self._in_slot(part) for part in shares]) for outcomes in part]

    async def _in_slot(self, items: Sequence[RewardInput]) -> list[dict[str, Outcome]]:
        async with self._free_slot() as slot:
            return await slot.judge(items)

    async def _extract(self, name: str, completion: str) -> Extracted:
        async with self._free_slot() as slot:
            found = await slot.extract(completion, name)
        if isinstance(found, RewardFailure):
            self._count(name, found)
        return found

    @asynccontextmanager
    async def _free_slot(self) -> AsyncIterator[WorkerSlot]:
        slot = await self._free.get()
        try:
            yield slot
        finally:
            self._free.put_nowait(slot)

    def _count(self, name: str, failure: RewardFailure) -> None:
        """Count it, and log it the 1st, 10th, 100th... time: a verifier that always fails must not fill the disk."""
        self.failures[name, failure.kind] += 1
        count = self.failures[name, failure.kind]
        if str(count).strip("0") == "1":
            log.warning("reward failed", reward=name, kind=failure.kind, why=failure.reason, so_far=count)


async def _all(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results, in order; the first failure cancels the rest and is raised by itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
