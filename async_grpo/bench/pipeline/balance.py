"""The times of the two sides, what overlapping them is worth, and how they are made equal. Pure.

T_gen     what a step of S = 0 waits for its batch: from the release that frees its slots (admission, new weights
          into the engine, generation, verdicts, insert) until the batch has been taken
T_train   the rest of that step: from the batch until its weights are published and its groups released
bound     (T_gen + T_train) / max(T_gen, T_train): sides that never wait for each other take the longer of the two

The bound is that of overlap alone, with T_gen as it is at S = 0, where the engine runs empty at the end of every step
while the longest completions end. At S > 0 the next groups take the places of those that have ended, so that T_gen
itself shrinks: where lengths differ a run may pass the bound.
"""

from __future__ import annotations

from dataclasses import dataclass

SHORTEST_PROMPT, LONGEST_PROMPT = 8, 384


@dataclass(frozen=True, slots=True)
class Sides:
    """Seconds of a step, mean over steps at S = 0."""

    gen_s: float
    train_s: float

    @property
    def step_s(self) -> float:
        """One after the other."""
        return self.gen_s + self.train_s

    @property
    def ratio(self) -> float:
        """T_gen / T_train: 1 is balanced."""
        return self.gen_s / self.train_s

    @property
    def bound(self) -> float:
        """By how much overlap alone can be faster, in [1, 2].

        >>> Sides(gen_s=2.0, train_s=1.0).bound
        1.5
        """
        return self.step_s / max(self.gen_s, self.train_s)


@dataclass(frozen=True, slots=True)
class Probe:
    """What was measured with prompts of so many tokens."""

    prompt_tokens: int
    sides: Sides


def balanced_prompt(short: Probe, long: Probe) -> int:
    """The length of the prompts at which T_gen = T_train, between the two limits above.

    Longer prompts are more work for the trainer, which reads them once a sample, forward and backward, and less so for
    the engine, which reads them forward. Both times are taken for linear in the length; where more prompt does not
    shift the balance towards training (a measurement that went wrong), the better of the two probes is kept.

    >>> balanced_prompt(Probe(10, Sides(2.0, 1.0)), Probe(110, Sides(2.2, 2.2)))
    110
    """
    lead_of_short, lead_of_long = (probe.sides.gen_s - probe.sides.train_s for probe in (short, long))
    if lead_of_long >= lead_of_short:
        return min((short, long), key=lambda probe: abs(probe.sides.gen_s - probe.sides.train_s)).prompt_tokens
    way = lead_of_short / (lead_of_short - lead_of_long)
    wanted = short.prompt_tokens + way * (long.prompt_tokens - short.prompt_tokens)
    return min(max(round(wanted), SHORTEST_PROMPT), LONGEST_PROMPT)
