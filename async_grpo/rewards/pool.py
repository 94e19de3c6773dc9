"""The reward pool: runs verifiers in processes that can be killed, and queries HTTP judges.

    dispatcher --judge(group)--> RewardPool --> WorkerSlot 1 .. N --> worker processes   (below one supervisor)
                                            --> HttpJudge --> an HTTP server

- The items of a call are divided evenly among the slots. Each part waits for a free slot; a slot is occupied for at
  most one deadline per item and verifier. There is no explicit queue: callers block until a slot is free.
- A slot waits for one reply at a time (`workers.slot`). An HTTP request waits for a free connection and its reply
  (`http_judge`).

The event loop is never blocked: verifiers are loaded and run in other processes. Calls must have ended or been
cancelled before `aclose`, which ends all workers.
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
from async_grpo.rewards.base import (
    TRIAL_INPUT,
    ExtractedAnswer,
    Outcome,
    RewardFailure,
    RewardInput,
    RewardResult,
    combine_outcomes,
)
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
_ACCEPTABLE_IN_TRIAL = ("none", "raised")
"""A custom verifier may reject the trial input, which is unlike its own data."""

log = structlog.get_logger()


class RewardPool:
    """Runs reward functions: `async with RewardPool(config.rewards) as pool: await pool.judge(items)`."""

    def __init__(self, rewards: RewardsConfig) -> None:
        self._rewards = rewards
        self._names = [function.name for function in rewards.functions if function.http is None]
        for name in self._names:
            check_name(name)
        environment = worker_environment(os.environ, rewards.environment)
        self._http_judges: dict[str, HttpJudge] = {}
        for function in rewards.functions:
            if function.http is not None:
                self._http_judges[function.name] = HttpJudge(function.name, function.http, os.environ)
        self.supervisor = SupervisorClient(self._names, rewards.memory_bytes, environment)
        slot_count = rewards.workers if self._names else 0
        self._slots = [WorkerSlot(self.supervisor, self._names, rewards) for _ in range(slot_count)]
        self._free: asyncio.LifoQueue[WorkerSlot] = asyncio.LifoQueue()
        self.failures: Counter[tuple[str, str]] = Counter()
        """Number of failures, by (name of the reward function, kind of failure)."""
        self._extractors: frozenset[str] = frozenset()
        self._closed = False

    async def start(self) -> None:
        """Load every verifier and try it on TRIAL_INPUT. Raises ConfigError, with the reason, for an unusable one."""
        try:
            if self._slots:
                await self._check_verifiers(self._slots[0])
                self._extractors = self._slots[0].extracting
                await _gather_all([slot.warm() for slot in self._slots[1:]])
        except BaseException:
            await self.aclose()
            raise

        # The queue is last in, first out: put the first slot in last, because its verifiers have run already and are
        # fully imported.
        for slot in reversed(self._slots):
            self._free.put_nowait(slot)

    async def judge(self, items: Sequence[RewardInput]) -> list[RewardResult]:
        """Return a result per item, in order. Failures of verifiers are in the results, never raised.

        Raises WaitTimeout if the kernel does not end a killed process, AsyncGrpoError once the pool is closed.
        """
        if self._closed:
            raise AsyncGrpoError("the reward pool is closed and cannot judge any more completions")
        results = []
        for outcomes in await self._run_functions(items):
            result = combine_outcomes(outcomes, self._rewards.functions)
            for name, failure in result.failures.items():
                self._count_failure(name, failure)
            results.append(result)
        return results

    def explain_missing_extraction(self, name: str) -> str | None:
        """Return why the reward function `name` cannot extract answers; None if it can."""
        if name in self._extractors:
            return None
        if name in self._http_judges:
            return f"{name} is an HTTP judge, which returns a score and no answer"
        return f"the reward function {name} does not extract answers (it has no attribute `extract`)"

    async def try_verifiers(self, item: RewardInput) -> dict[str, Outcome]:
        """Run all verifiers, but no HTTP judges, on one item. Returns outcomes by name and does not count failures."""
        (outcomes,) = await self._run_verifiers([item])
        return outcomes

    async def extract_answers(self, name: str, completions: Sequence[str]) -> list[ExtractedAnswer]:
        """Extract the answer of each completion with the reward function `name`, in order.

        None for a completion without an answer, RewardFailure where the extraction failed. Raises WaitTimeout if the
        kernel does not end a killed process, AsyncGrpoError once the pool is closed.
        """
        if self._closed:
            raise AsyncGrpoError("the reward pool is closed and cannot extract any more answers")
        return await _gather_all([self._extract_answer(name, completion) for completion in completions])

    async def aclose(self) -> None:
        """Stop all workers and close all connections."""
        self._closed = True
        await self.supervisor.aclose()
        for judge in self._http_judges.values():
            await judge.aclose()

    async def __aenter__(self) -> RewardPool:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _check_verifiers(self, slot: WorkerSlot) -> None:
        """Try every verifier on TRIAL_INPUT. A custom verifier may raise (it cannot judge this input), but it must be
        importable and callable, and may not return anything but a score or None."""
        (outcomes,) = await slot.judge([TRIAL_INPUT])
        for name, outcome in outcomes.items():
            if not isinstance(outcome, RewardFailure):
                continue
            if outcome.kind in ("import", "start"):
                raise ConfigError(outcome.reason)
            is_broken = outcome.kind not in _ACCEPTABLE_IN_TRIAL or outcome.reason.startswith(_PROGRAMMING_ERRORS)
            if is_broken and name not in BUILTIN:
                raise ConfigError(
                    f"rewards.functions: {name!r} was tried on the completion {TRIAL_INPUT.completion!r} with the "
                    f"answer {TRIAL_INPUT.answer!r}, and failed ({outcome.kind}): {outcome.reason}. It should be "
                    f"{SIGNATURE}"
                )

    async def _run_functions(self, items: Sequence[RewardInput]) -> list[dict[str, Outcome]]:
        """Outcomes of all reward functions for each item, by name."""
        if not self._http_judges:
            return await self._run_verifiers(items)
        requests = [self._request_scores(judge, items) for judge in self._http_judges.values()]
        parts = await _gather_all([self._run_verifiers(items), *requests])
        merged: list[dict[str, Outcome]] = [{} for _ in items]
        for part in parts:
            for item_outcomes, part_outcomes in zip(merged, part, strict=True):
                item_outcomes |= part_outcomes
        return merged

    async def _request_scores(self, judge: HttpJudge, items: Sequence[RewardInput]) -> list[dict[str, Outcome]]:
        return await _gather_all([judge.judge(item) for item in items])

    async def _run_verifiers(self, items: Sequence[RewardInput]) -> list[dict[str, Outcome]]:
        """Outcomes of the verifiers in worker processes. The items are divided evenly among the slots."""
        if not self._slots:
            return [{} for _ in items]
        part_size = max(1, -(-len(items) // len(self._slots)))
        parts = [items[start : start + part_size] for start in range(0, len(items), part_size)]
        results: list[dict[str, Outcome]] = []
        for part_results in await _gather_all([self._run_in_slot(part) for part in parts]):
            results += part_results
        return results

    async def _run_in_slot(self, items: Sequence[RewardInput]) -> list[dict[str, Outcome]]:
        async with self._free_slot() as slot:
            return await slot.judge(items)

    async def _extract_answer(self, name: str, completion: str) -> ExtractedAnswer:
        async with self._free_slot() as slot:
            answer = await slot.extract(completion, name)
        if isinstance(answer, RewardFailure):
            self._count_failure(name, answer)
        return answer

    @asynccontextmanager
    async def _free_slot(self) -> AsyncIterator[WorkerSlot]:
        slot = await self._free.get()
        try:
            yield slot
        finally:
            self._free.put_nowait(slot)

    def _count_failure(self, name: str, failure: RewardFailure) -> None:
        """Count a failure. Log only the 1st, 10th, 100th ...: a verifier that always fails must not fill the disk."""
        self.failures[name, failure.kind] += 1
        count = self.failures[name, failure.kind]
        if str(count).strip("0") == "1":
            log.warning("reward failed", reward=name, kind=failure.kind, why=failure.reason, so_far=count)


async def _gather_all(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results in order. The first failure cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
