"""Simulated evaluations on held-out prompts, each by the server that claims it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from async_grpo.lab.simulate.context import SimulationContext
from async_grpo.lab.simulate.engine import SimulatedSample
from rollout_server.evaluation.milestones import milestone_of


class HeldOutPrompt:
    """A prompt of an evaluation, which its completions share."""

    __slots__ = ("prompt_read",)

    def __init__(self) -> None:
        self.prompt_read = False


@dataclass(slots=True)
class SimulatedEvaluation:
    """An evaluation as `EvalRunner` makes it: rounds one after another (sampled completions, then greedy ones), and of
    a round at most `room` completions at once, in places that are separate from those of training.

    Started all at once instead, thousands of completions would slow each other, and the groups of training next to
    them, far more than they do.
    """

    began_s: float
    room: int
    rounds: deque[deque[SimulatedSample]]
    """Completions that have not started."""
    running: int = 0
    ended_s: float | None = None

    def next_samples(self) -> list[SimulatedSample]:
        """The completions that may start now."""
        while self.rounds and not self.rounds[0] and self.running == 0:
            self.rounds.popleft()
        waiting = self.rounds[0] if self.rounds else deque[SimulatedSample]()
        count = min(len(waiting), self.room - self.running)
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
        self.tokens = 0.0
        """Tokens generated for evaluations."""
        self._context = context
        self._claimed = -1

    def claim_evaluation(self, version: int) -> SimulatedEvaluation | None:
        """The evaluation that is due at this version; None if there is none or another server has claimed it."""
        settings = self._context.settings
        milestone = milestone_of(version, every_steps=settings.eval_every, final=settings.steps)
        if milestone <= self._claimed or settings.eval_prompts == 0 or not (version == 0 or milestone > 0):
            return None
        self._claimed = milestone
        rounds = [settings.eval_samples] + [1] * settings.eval_greedy
        evaluation = SimulatedEvaluation(
            began_s=self._context.events.now_s,
            room=settings.max_concurrency,
            rounds=deque(self._draw_round(completions) for completions in rounds),
        )
        self.evaluations.append(evaluation)
        return evaluation

    def _draw_round(self, completions: int) -> deque[SimulatedSample]:
        """`completions` samples per held-out prompt, in the order in which they start."""
        timings, count = self._context.timings, self._context.settings.eval_prompts * completions
        slower = timings.evaluation_factor
        lengths = timings.lengths.groups(self._context.generator, 1, count)[0]
        samples: deque[SimulatedSample] = deque()
        for first in range(0, count, completions):
            prompt = HeldOutPrompt()
            samples.extend(SimulatedSample(prompt, slower * length) for length in lengths[first : first + completions])
        return samples
