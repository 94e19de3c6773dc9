"""Evaluates the policy on held-out prompts at milestones, with the version pinned.

    weight watcher --version--> MilestoneEvaluator --pin_version, claim--> engine --> reward pool --> board

A milestone is version 0, every multiple of `eval.every_steps`, and the final version. A server that skips versions
evaluates its first version at or after a milestone.

The evaluator waits for the next milestone's weights (the watcher unblocks it, or the final evaluation on the board,
which makes them unnecessary), then for an update in progress before it can pin the version. At the final version it
waits for the server that has the claim. The board sends no events, so it is polled once a second; when that server's
claim has expired, this one takes over.

Generation for training continues in parallel, at the pinned version. Every server runs an evaluator; the claim ensures
that only one of them evaluates a milestone. If the claim cannot be renewed, the evaluation ends with that error.

Timeouts use the watcher's clock, which stops while the engine sleeps: otherwise steps of a trainer that shares the
device would count towards the evaluation.
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
BOARD_POLL_S = 1.0
COMPLETION_TIMEOUT_FRACTION = 0.9
"""Maximum fraction of eval.timeout_s per completion: if one hangs, there is time left to grade the others."""
MIN_POLL_S = 0.05
"""Minimum poll interval; the clock stops while the engine sleeps, so waiting for the remaining time is not enough."""

log = structlog.get_logger()


def milestone_of(version: int, *, every_steps: int, final: int) -> int:
    """The last milestone at or before `version` (>= 0).

    >>> [milestone_of(version, every_steps=10, final=25) for version in (0, 9, 11, 25)]
    [0, 0, 10, 25]
    """
    if version >= final:
        return final
    if not every_steps:
        return 0
    return version - version % every_steps


def next_milestone(milestone: int, *, every_steps: int, final: int) -> int:
    """The milestone after this one; the final one follows itself.

    >>> next_milestone(10, every_steps=10, final=15)
    15
    """
    return min(milestone + every_steps, final) if every_steps else final


class MilestoneEvaluator:
    """Evaluates this server's milestones: `evaluate_initial_version` before the first ticket, then the others."""

    def __init__(self, context: ServerContext, watcher: WeightWatcher) -> None:
        self._context = context
        self._watcher = watcher
        self._runner = EvalRunner(
            context,
            self._count_completion,
            deadline_s=completion_timeout_s(context.config),
            clock_s=lambda: watcher.awake_s,
        )
        self._plan = EvalPlan.from_config(context.config)
        self._final = context.config.steps
        self._last_milestone: int | None = None
        """Newest milestone that this server evaluated, or left to another server."""
        self.is_evaluating = False
        """True while an evaluation generates."""
        self.progress: EvaluationState | None = None
        """Progress of the present evaluation, for the heartbeat."""
        self._started_s = 0.0

    @property
    def tokens(self) -> int:
        """Number of tokens generated for evaluations and probes so far."""
        return self._runner.tokens

    async def evaluate_initial_version(self) -> None:
        """Evaluate the version that the engine starts with, if it is due and no other server does it."""
        await self._evaluate_if_due()

    async def evaluate_milestones(self) -> None:
        """Evaluate milestones until the final evaluation is on the board. Raises EngineError, WaitTimeout."""
        while not await self._is_evaluated(self._final):
            if not await self._wait_for_next_milestone():
                continue  # check the board again: another server may have finished the final evaluation
            await self._evaluate_if_due()
            if self._last_milestone == self._final and not await self._is_evaluated(self._final):
                await asyncio.sleep(BOARD_POLL_S)

    async def _wait_for_next_milestone(self) -> bool:
        """Wait at most BOARD_POLL_S for the next milestone's weights. Returns False if they have not arrived."""
        milestone = next_milestone(
            self._last_milestone or 0, every_steps=self._context.config.eval.every_steps, final=self._final
        )
        try:
            await self._watcher.wait_for_version(milestone, BOARD_POLL_S)
        except WaitTimeout:
            return False
        return True

    async def _evaluate_if_due(self) -> None:
        """Evaluate the milestone of the engine's version, unless it is evaluated or claimed by another server."""
        async with self._watcher.pin_version() as version:
            milestone = self._milestone_of(version)
            # Milestone 0 is version 0 only: a server that joins late must not evaluate a later version in its place.
            is_due = version == 0 or milestone > 0
            if is_due and not await self._is_evaluated(milestone) and await self._claim_milestone(milestone):
                await self._evaluate(version, milestone)
            self._last_milestone = milestone

    async def _evaluate(self, version: int, milestone: int) -> None:
        tokens_before = self._runner.tokens
        self._started_s = time.time()
        self.is_evaluating = True
        self.progress = EvaluationState(version, 0, self._plan.prompts * self._plan.completions_per_prompt)
        try:
            with self._context.logger.record_span("evaluation", f"version {version}"):
                evaluation = self._run_with_timeout(self._probe_and_grade(version, self._started_s), version)
                await race(evaluation, self._renew_claim(milestone))
        finally:
            self.is_evaluating = False
            self.progress = None
            await self._context.board.add_to_counter("eval_tokens", self._runner.tokens - tokens_before)

    async def _run_with_timeout(self, evaluation: Coroutine[Any, Any, None], version: int) -> None:
        """Run the evaluation. Raises WaitTimeout after eval.timeout_s seconds in which the engine was awake."""
        timeout_s = self._context.config.eval.timeout_s
        started_s = self._watcher.awake_s
        running = asyncio.create_task(evaluation)
        try:
            while not running.done():
                remaining_s = timeout_s - (self._watcher.awake_s - started_s)
                if remaining_s <= 0:
                    raise WaitTimeout(
                        f"the evaluation of version {version}",
                        timeout_s,
                        "Lower eval.prompts or eval.samples, or raise eval.timeout_s",
                    )
                await asyncio.wait([running], timeout=max(remaining_s, MIN_POLL_S))
            running.result()
        finally:
            await cancel_and_wait(running)

    def _count_completion(self) -> None:
        """Update the progress after a completion. The few completions of the probe count too, so stop at the total."""
        progress = self.progress
        if progress is None:
            return
        done = min(progress.done + 1, progress.total)
        remaining_s = (time.time() - self._started_s) / done * (progress.total - done)
        self.progress = EvaluationState(progress.version, done, progress.total, remaining_s)

    async def _probe_and_grade(self, version: int, started_s: float) -> None:
        """Write the evaluation to the board, and at the final version the probe, for which the trainer waits."""
        # Generate both together: a prompt whose workflow hangs may be in both, and would delay us by two deadlines.
        try:
            async with asyncio.TaskGroup() as tasks:
                if version >= self._final:
                    tasks.create_task(self._put_probe(version))
                grading = tasks.create_task(self._runner.grade_prompts(self._plan))
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
            figures=result.metrics,
            by_source=result.by_source,
            no_majority=result.no_majority,
        )
        await self._context.board.put_evaluation(evaluation)
        self._context.logger.record_evaluation(evaluation)
        log.info(
            "evaluated",
            version=version,
            sampled=result.sampled_accuracy,
            greedy=result.greedy_accuracy,
            failed=result.metrics.failed,
            wall_s=evaluation.wall_s,
        )

    async def _put_probe(self, version: int) -> None:
        groups = await self._runner.generate_probe(version)
        await self._context.board.put_probe(Probe(version=version, groups=groups))

    async def _is_evaluated(self, milestone: int) -> bool:
        evaluations = await self._context.board.evaluations()
        return any(self._milestone_of(evaluation.version) == milestone for evaluation in evaluations)

    async def _claim_milestone(self, milestone: int) -> bool:
        return await self._context.board.claim_job(f"evaluation {milestone}", self._context.name, ttl_s=CLAIM_TTL_S)

    async def _renew_claim(self, milestone: int) -> None:
        """Renew the claim until cancelled. Raises BufferFault."""
        while True:
            await asyncio.sleep(CLAIM_TTL_S / 3)
            await self._claim_milestone(milestone)

    def _milestone_of(self, version: int) -> int:
        return milestone_of(version, every_steps=self._context.config.eval.every_steps, final=self._final)


def completion_timeout_s(config: RunConfig) -> float:
    """Maximum seconds per completion: rollout.sample_deadline_s, or less if eval.timeout_s is short."""
    return min(config.rollout.sample_deadline_s or math.inf, COMPLETION_TIMEOUT_FRACTION * config.eval.timeout_s)
