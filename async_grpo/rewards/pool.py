"""The reward pool: verifiers in processes that can be killed, judges behind HTTP.

    dispatcher --judge(group)--> RewardPool --> WorkerSlot 1 .. N --> worker processes   (below one warden)
                                            --> HttpJudge --> an HTTP server

- an item waits for a free slot; another item that ends frees it, at the latest after one deadline per
  verifier. The waiting callers are the queue: `judge` holds them back, so it is as long as what they hold.
- a slot waits for one answer at a time, see `slot`; a request waits for its place and its reply, see `http_judge`.

The event loop is never blocked: verifiers run elsewhere, are started elsewhere, and cannot hold it.
Shut down with `aclose`: judgements under way must have ended or been cancelled; then the warden ends all workers.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import structlog

from async_grpo.config.rewards import RewardsConfig
from async_grpo.errors import AsyncGrpoError, ConfigError
from async_grpo.rewards.base import DRY_ITEM, Outcome, RewardFailure, RewardInput, RewardResult, verdict_of
from async_grpo.rewards.http_judge import HttpJudge
from async_grpo.rewards.registry import BUILTIN, SIGNATURE, check_name
from async_grpo.rewards.workers.client import SupervisorClient, worker_environment
from async_grpo.rewards.workers.slot import WorkerLimits, WorkerSlot

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
    """`async with RewardPool(config.rewards) as pool: await pool.judge(items)`."""

    def __init__(self, rewards: RewardsConfig) -> None:
        self._rewards = rewards
        self._names = [function.name for function in rewards.functions if function.http is None]
        for name in self._names:
            check_name(name)
        environment = worker_environment(os.environ, rewards.environment)
        self._judges = {f.name: HttpJudge(f.name, f.http, os.environ) for f in rewards.functions if f.http is not None}
        self._link = SupervisorClient(self._names, rewards.memory_bytes, environment)
        limits = WorkerLimits(rewards.deadline_s, rewards.start_timeout_s, rewards.items_per_worker)
        self._slots = [
            WorkerSlot(self._link, self._names, limits) for _ in range(rewards.workers if self._names else 0)
        ]
        self._free: asyncio.LifoQueue[WorkerSlot] = asyncio.LifoQueue()
        self.failures: Counter[tuple[str, str]] = Counter()
        """How often each reward failed, by (name, kind of failure)."""
        self._extracting: frozenset[str] = frozenset()
        self._closed = False
        self.judged = 0
        """Items with a verdict, whatever it is."""

    @property
    def failures_by_kind(self) -> dict[str, int]:
        """How often any reward failed, by kind of failure."""
        totals: Counter[str] = Counter()
        for (_, kind), count in self.failures.items():
            totals[kind] += count
        return dict(totals)

    @property
    def warden_pid(self) -> int | None:
        """The process above all verifiers, if there is one."""
        return self._link.pid

    async def start(self) -> None:
        """Load every verifier and try it. Raises ConfigError that says which one cannot be used, and why."""
        try:
            if self._slots:
                await self._try_verifiers(self._slots[0])
                self._extracting = self._slots[0].extracting
                await _all([slot.warm() for slot in self._slots[1:]])
        except BaseException:
            await self.aclose()
            raise
        for slot in reversed(self._slots):  # the last in is the first out: the one that is warm
            self._free.put_nowait(slot)

    async def judge(self, items: Sequence[RewardInput]) -> list[RewardResult]:
        """A verdict per item, in order. Never raises for what a verifier does.

        Raises WaitTimeout if the kernel does not end a process that was killed, and AsyncGrpoError once the
        pool is closed.
        """
        if self._closed:
            raise AsyncGrpoError("the reward pool is closed: nothing can be judged any more")
        return await _all([self._judge(item) for item in items])

    def why_no_answers(self, name: str) -> str:
        """ "" if this reward function, by name, finds the answer in a completion."""
        if name in self._extracting:
            return ""
        if name in self._judges:
            return f"{name} is a judge behind HTTP, which gives a score and no answer"
        return f"the reward function {name} does not say which answer a completion gives (it has no `extract`)"

    async def extract(self, name: str, completions: Sequence[str]) -> list[str | RewardFailure | None]:
        """The answer in each completion, in order, as the reward function `name` finds it: None where there is none,
        and why where it failed. Raises as `judge`."""
        if self._closed:
            raise AsyncGrpoError("the reward pool is closed: nothing can be extracted any more")
        return await _all([self._extract(name, completion) for completion in completions])

    async def aclose(self) -> None:
        """End all workers and close all connections."""
        self._closed = True
        await self._link.aclose()
        for judge in self._judges.values():
            await judge.aclose()

    async def __aenter__(self) -> RewardPool:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _try_verifiers(self, slot: WorkerSlot) -> None:
        """Also a verifier of one's own may raise (that is how it says that it cannot judge), but it must be
        possible to call it, and what it returns must be a score."""
        for name, outcome in (await slot.judge(DRY_ITEM)).items():
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

    async def _judge(self, item: RewardInput) -> RewardResult:
        outcomes = await self._outcomes(item)
        verdict = verdict_of(outcomes, self._rewards.functions)
        self.judged += 1
        for name, failure in verdict.failures.items():
            self._count(name, failure)
        return verdict

    async def _outcomes(self, item: RewardInput) -> dict[str, Outcome]:
        if not self._judges:
            return await self._in_process(item)
        requests = [judge.judge(item) for judge in self._judges.values()]
        parts = await _all([self._in_process(item), *requests])
        return {name: outcome for part in parts for name, outcome in part.items()}

    async def _in_process(self, item: RewardInput) -> dict[str, Outcome]:
        if not self._slots:
            return {}
        slot = await self._free.get()
        try:
            return await slot.judge(item)
        finally:
            self._free.put_nowait(slot)

    async def _extract(self, name: str, completion: str) -> str | RewardFailure | None:
        slot = await self._free.get()
        try:
            found = await slot.extract(completion, name)
        finally:
            self._free.put_nowait(slot)
        if isinstance(found, RewardFailure):
            self._count(name, found)
        return found

    def _count(self, name: str, failure: RewardFailure) -> None:
        """Into the log at the 1st, 10th, 100th... time: a verifier that always fails must not fill a disk."""
        self.failures[name, failure.kind] += 1
        count = self.failures[name, failure.kind]
        if str(count).strip("0") == "1":
            log.warning("reward failed", reward=name, kind=failure.kind, why=failure.reason, so_far=count)


async def _all(makes: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results, in order; the first failure cancels the rest and is raised by itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(make) for make in makes]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
