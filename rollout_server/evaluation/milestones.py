"""Evaluates the policy on held-out prompts at milestones, with the version pinned.

    weight watcher --version--> MilestoneEvaluator --pin, claim--> engine --> reward pool --> board

A milestone is version 0, every multiple of `eval.every_steps`, and the final version. A server that skips versions
evaluates the first version at or after a milestone that it meets.

The evaluator waits for the next milestone's weights (the watcher unblocks it, or the final evaluation on the board,
which makes them unnecessary), then for the pin while an update is under way. At the final version it waits for the
server that holds the claim. The board sends no events, so it looks once a second, and takes over when that server's
claim has run out.

Training generation goes on beside it, at the pinned version. Every server runs one evaluator; the claim makes sure that
only one of them evaluates a milestone. If the claim cannot be renewed, the evaluation ends with that error.

Timeouts are measured by the watcher's clock, which stands still while the engine sleeps: steps of a trainer that shares
the device would otherwise count as time of the evaluation.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine
from typing import Any

import structlog

from async_grpo.config import RunConfig
from async_grpo.errors import WaitTimeout
from async_grpo.utils.aio import cancel_and_wait, race, root_cause
from async_grpo.wire.board import Evaluation, EvaluationState, Probe
from rollout_server.context import ServerContext
from rollout_server.evaluation.eval_runner import EvalPlan, EvalRunner
from rollout_server.weight_watcher import WeightWatcher

CLAIM_TTL_S = 20.0
LOOK_EVERY_S = 1.0
COMPLETION_SHARE = 0.9
"""Share of eval.timeout_s that one completion may take: one that hangs is given up, and the rest is still graded."""
LEAST_LOOK_S = 0.05
"""Least number of seconds between two looks at a clock that may stand still."""

log = structlog.get_logger()


def milestone_of(version: int, *, every_steps: int, final: int) -> int:
    """The last milestone at or before `version` (>= 0).

    >>> [milestone_of(version, every_steps=10, final=25) for version in (0, 9, 11, 25)]
    [0, 0, 10, 25]
    """
    if version >= final:
        return final
    return version - version % every_steps if every_steps else 0


def next_milestone(milestone: int, *, every_steps: int, final: int) -> int:
    """The milestone after this one (the final one is followed by itself).

    >>> next_milestone(10, every_steps=10, final=15)
    15
    """
    return min(milestone + every_steps, final) if every_steps else final


class MilestoneEvaluator:
    """Evaluates this server's milestones. Call `first` before the first ticket, then `run`."""

    def __init__(self, context: ServerContext, watcher: WeightWatcher) -> None:
        self._context = context
        self._watcher = watcher
        self._runner = EvalRunner(
            context,
            self._count_one,
            deadline_s=longest_completion_s(context.config),
            clock_s=lambda: watcher.awake_s,
        )
        self._plan = EvalPlan.of(context.config)
        self._final = context.config.steps
        self._handled = -1
        self.busy = False
        """True while an evaluation generates."""
        self.progress: EvaluationState | None = None
        self._began_s = 0.0

    @property
    def tokens(self) -> int:
        """Number of tokens generated for evaluations and probes so far."""
        return self._runner.tokens

    async def first(self) -> None:
        """Evaluate the version that the engine starts with, if it is due and no other server does it."""
        await self._evaluate_if_due()

    async def run(self) -> None:
        """Evaluate milestones until the final evaluation is on the board. Raises EngineError, WaitTimeout."""
        while not await self._is_done(self._final):
            if not await self._has_next():
                continue
            await self._evaluate_if_due()
            if self._handled == self._final and not await self._is_done(self._final):
                await asyncio.sleep(LOOK_EVERY_S)

    async def _has_next(self) -> bool:
        """Whether the next milestone's weights came within LOOK_EVERY_S."""
        try:
            await self._watcher.wait_for_version(self._next, LOOK_EVERY_S)
        except WaitTimeout:
            return False
        return True

    async def _evaluate_if_due(self) -> None:
        """Evaluate the milestone that the pinned version belongs to, unless it is done or claimed."""
        async with self._watcher.pin() as version:
            milestone = self._milestone(version)
            fresh = version == 0 or milestone > 0
            if fresh and not await self._is_done(milestone) and await self._claim(milestone):
                await self._evaluate(version, milestone)
            self._handled = milestone

    async def _evaluate(self, version: int, milestone: int) -> None:
        started_s, tokens_before = time.time(), self._runner.tokens
        self.busy = True
        self._began_s, self.progress = (
            started_s,
            EvaluationState(version, 0, self._plan.prompts * self._plan.completions),
        )
        try:
            with self._context.logger.span("evaluation", f"version {version}"):
                evaluating = self._within_timeout(self._probe_and_grade(version, started_s), version)
                await race(evaluating, self._keep_claim(milestone))
        finally:
            self.busy, self.progress = False, None
            await self._context.board.add_to_counter("eval_tokens", self._runner.tokens - tokens_before)

    async def _within_timeout(self, evaluation: Coroutine[Any, Any, None], version: int) -> None:
        """Raises WaitTimeout after eval.timeout_s seconds in which the engine was awake."""
        timeout_s = self._context.config.eval.timeout_s
        started_s = self._watcher.awake_s
        evaluating = asyncio.create_task(evaluation)
        try:
            while not evaluating.done():
                left_s = timeout_s - (self._watcher.awake_s - started_s)
                if left_s <= 0:
                    raise WaitTimeout(
                        f"the evaluation of version {version}",
                        timeout_s,
                        "Lower eval.prompts or eval.samples, or raise eval.timeout_s",
                    )
                await asyncio.wait([evaluating], timeout=max(left_s, LEAST_LOOK_S))
            evaluating.result()
        finally:
            await cancel_and_wait(evaluating)

    def _count_one(self) -> None:
        """Count a finished completion of the evaluation. The few completions of the probe count too."""
        if (now := self.progress) is not None:
            done = min(now.done + 1, now.total)
            left_s = (time.time() - self._began_s) / done * (now.total - done)
            self.progress = EvaluationState(now.version, done, now.total, left_s)

    async def _probe_and_grade(self, version: int, started_s: float) -> None:
        """Put the probe on the board, which the trainer waits for, and the evaluation.

        Both are made at once: a prompt whose workflow hangs may be in both, and would be waited for twice.
        """
        try:
            async with asyncio.TaskGroup() as group:
                if version >= self._final:
                    group.create_task(self._probe(version))
                grading = group.create_task(self._runner.grade(self._plan))
        except ExceptionGroup as errors:
            raise root_cause(errors) from None
        result = grading.result()
        evaluation = Evaluation(
            version=version,
            prompts=len(result.prompts),
            samples=self._plan.samples,
            sampled_accuracy=result.sampled_accuracy,
            greedy_accuracy=result.greedy_accuracy,
            completion_tokens_mean=result.completion_tokens_mean,
            wall_s=time.time() - started_s,
            server=self._context.name,
            figures=result.figures,
            by_source=result.by_source,
            no_majority=result.no_majority,
        )
        await self._context.board.put_evaluation(evaluation)
        self._context.logger.evaluation(evaluation)
        log.info(
            "evaluated",
            version=version,
            sampled=result.sampled_accuracy,
            greedy=result.greedy_accuracy,
            failed=result.figures.failed,
            wall_s=evaluation.wall_s,
        )

    async def _probe(self, version: int) -> None:
        groups = await self._runner.probe(version)
        await self._context.board.put_probe(Probe(version=version, groups=groups))

    async def _is_done(self, milestone: int) -> bool:
        evaluations = await self._context.board.evaluations()
        return any(self._milestone(evaluation.version) == milestone for evaluation in evaluations)

    async def _claim(self, milestone: int) -> bool:
        return await self._context.board.claim_job(f"evaluation {milestone}", self._context.name, ttl_s=CLAIM_TTL_S)

    async def _keep_claim(self, milestone: int) -> None:
        """Renew the claim until cancelled. Raises BufferFault."""
        while True:
            await asyncio.sleep(CLAIM_TTL_S / 3)
            await self._claim(milestone)

    def _milestone(self, version: int) -> int:
        return milestone_of(version, every_steps=self._context.config.eval.every_steps, final=self._final)

    @property
    def _next(self) -> int:
        return next_milestone(
            max(0, self._handled), every_steps=self._context.config.eval.every_steps, final=self._final
        )


def longest_completion_s(config: RunConfig) -> float:
    """Deadline of one completion in seconds: rollout.sample_deadline_s, at most COMPLETION_SHARE of eval.timeout_s."""
    return min(config.rollout.sample_deadline_s or math.inf, COMPLETION_SHARE * config.eval.timeout_s)
