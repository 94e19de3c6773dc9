"""Simulated evaluations on held-out prompts, each by the server that claims it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from async_grpo.lab.simulate.context import SimulationContext
from async_grpo.lab.simulate.engine import SimulatedSample
from rollout_server.evaluation.milestones import milestone_of


class HeldOutPrompt:
    """A prompt of an evaluation, shared by its completions."""

    __slots__ = ("is_prompt_read",)

    def __init__(self) -> None:
        self.is_prompt_read = False


@dataclass(slots=True)
class SimulatedEvaluation:
    """An evaluation in rounds, one after another: sampled completions, then greedy ones.

    Like the real evaluation, it runs at most `capacity` completions at a time, in slots separate from those of
    training. If all of them started together, thousands of completions would slow each other and the training groups
    far more than they do.
    """

    started_s: float
    capacity: int
    rounds: deque[deque[SimulatedSample]]
    """Completions that have not started."""
    running: int = 0
    ended_s: float | None = None

    def take_startable(self) -> list[SimulatedSample]:
        """Remove and return the completions that may start now; they count as running."""
        # A round starts when the last completion of the one before has ended.
        while self.rounds and not self.rounds[0] and self.running == 0:
            self.rounds.popleft()
        if not self.rounds:
            return []

        waiting = self.rounds[0]
        count = min(len(waiting), self.capacity - self.running)
        self.running += count
        return [waiting.popleft() for _ in range(count)]

    @property
    def is_over(self) -> bool:
        """True if every completion has ended."""
        return self.running == 0 and not any(self.rounds)


class EvaluationClaims:
    """The evaluations of a run: one per milestone, by the first server that claims it."""

    def __init__(self, context: SimulationContext) -> None:
        self.evaluations: list[SimulatedEvaluation] = []
        self.generated_tokens = 0.0
        self._context = context
        self._claimed_milestone = -1

    def claim_evaluation(self, version: int) -> SimulatedEvaluation | None:
        """Start the evaluation that is due at this version. None if none is, or another server has claimed it."""
        settings = self._context.settings
        milestone = milestone_of(version, every_steps=settings.eval_every, final=settings.steps)
        if milestone <= self._claimed_milestone or settings.eval_prompts == 0:
            return None
        if version > 0 and milestone == 0:
            return None  # the first milestone is past: it is evaluated with version 0 only
        self._claimed_milestone = milestone

        completions_per_round = [settings.eval_samples]
        if settings.eval_greedy:
            completions_per_round.append(1)
        evaluation = SimulatedEvaluation(
            started_s=self._context.events.now_s,
            capacity=settings.max_concurrency,
            rounds=deque(self._draw_round(completions) for completions in completions_per_round),
        )
        self.evaluations.append(evaluation)
        return evaluation

    def _draw_round(self, completions: int) -> deque[SimulatedSample]:
        """Draw `completions` samples per held-out prompt, in the order in which they start."""
        timings = self._context.timings
        count = self._context.settings.eval_prompts * completions
        lengths = timings.lengths.draw_groups(self._context.generator, 1, count)[0]

        samples: deque[SimulatedSample] = deque()
        for first in range(0, count, completions):
            prompt = HeldOutPrompt()
            for length in lengths[first : first + completions]:
                samples.append(SimulatedSample(prompt, timings.evaluation_factor * length))
        return samples
