"""The quickstart's task: add two numbers, digit by digit with a carry.

    prompt         478+356=
    demonstration  <think>8+6+0=14 7+5+1=13 4+3+1=8</think><answer>834</answer>
    shortcut       <answer>834</answer>

Each term of the reasoning is digit + digit + carry, from the right. Pure Python; every problem is a
function of (configuration, seed, stream, index).
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from async_grpo.config.warmup import ArithmeticTaskConfig


@dataclass(frozen=True, slots=True)
class Problem:
    """left + right."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        """What the policy is given."""
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        """The reference answer: what stands in <answer> tags for reward 1."""
        return str(self.left + self.right)


class ProblemSet:
    """The problems of one seed: a held-out set, and any number of endless streams that never touch it.

    >>> problems = ProblemSet(ArithmeticTaskConfig(), seed=1)
    >>> problems.problem("train", 0) in problems.held_out
    False
    """

    def __init__(self, config: ArithmeticTaskConfig, seed: int) -> None:
        self._config = config
        self._seed = seed
        self.held_out = self._draw_held_out()
        self._excluded = frozenset(self.held_out)

    def problem(self, stream: str, index: int) -> Problem:
        """Problem `index` (>= 0) of the named stream: always the same one, and never a held-out one."""
        rng = random.Random(f"{self._seed}/{stream}/{index}")
        while (problem := self._draw(rng)) in self._excluded:
            pass
        return problem

    def _draw_held_out(self) -> tuple[Problem, ...]:
        rng = random.Random(f"{self._seed}/held out")
        drawn: dict[Problem, None] = {}
        while len(drawn) < self._config.held_out:
            drawn[self._draw(rng)] = None
        return tuple(drawn)

    def _draw(self, rng: random.Random) -> Problem:
        smallest, largest = 10 ** (self._config.digits - 1), 10**self._config.digits - 1
        return Problem(rng.randint(smallest, largest), rng.randint(smallest, largest))


def demonstration(problem: Problem) -> str:
    """The whole completion of a policy that reasons, without the end token.

    >>> demonstration(Problem(47, 85))
    '<think>7+5+0=12 4+8+1=13</think><answer>132</answer>'
    """
    return f"<think>{' '.join(_column_sums(problem))}</think>{shortcut(problem)}"


def shortcut(problem: Problem) -> str:
    """The whole completion of a policy that answers at once, without the end token.

    >>> shortcut(Problem(47, 85))
    '<answer>132</answer>'
    """
    return f"<answer>{problem.answer}</answer>"


def _column_sums(problem: Problem) -> list[str]:
    """One 'digit+digit+carry=sum' a column, from the right; both numbers have equally many digits."""
    terms, carry = [], 0
    for left, right in zip(reversed(str(problem.left)), reversed(str(problem.right)), strict=True):
        total = int(left) + int(right) + carry
        terms.append(f"{left}+{right}+{carry}={total}")
        carry = total // 10
    return terms
