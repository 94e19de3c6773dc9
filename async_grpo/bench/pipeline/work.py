"""The fixed work: which prompts, and how long the completion of each sample is.

    period   steps 0 ... M-1 with P groups of G samples each, drawn once
    run      the period over and over, S + 1 + WARM_STEPS steps + M timed ones + S steps

Batches are taken in the order of their tickets (`fifo`), so that step v trains the groups v P ... (v + 1) P - 1 at
every staleness. The stream repeats every M steps, so that any M steps in a row are the same prompts and the same
lengths, wherever a run's timed part begins.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from async_grpo.bench.fixed_lengths import answer_for

VOCABULARY = 1024
WARM_STEPS = 2
"""Of every S alike: by then both sides have done everything once, the engine's update on the fly included."""
HELD_OUT_TOKENS = 8
"""Of the one completion that a run is evaluated on, because every run evaluates; before and after the timed part."""


@dataclass(frozen=True, slots=True)
class Work:
    """One period. `lengths`: of all samples, group after group; `prompt_tokens`: of the prompts of each step."""

    groups_per_step: int
    group_size: int
    lengths: tuple[int, ...]
    prompt_tokens: tuple[int, ...]
    seed: int = 1

    @property
    def steps(self) -> int:
        """M: those of a period."""
        return len(self.prompt_tokens)

    @property
    def samples_per_step(self) -> int:
        """P * G."""
        return self.groups_per_step * self.group_size

    @property
    def tokens(self) -> int:
        """Completion tokens of a period."""
        return sum(self.lengths)

    @property
    def longest_completion(self) -> int:
        """Tokens of it."""
        return max(*self.lengths, HELD_OUT_TOKENS)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that may be, prompt included."""
        return max(self.prompt_tokens) + self.longest_completion

    def of_group(self, seq: int) -> tuple[int, ...]:
        """Lengths of the samples of the group with that ticket."""
        place = seq % (self.steps * self.groups_per_step) * self.group_size
        return self.lengths[place : place + self.group_size]

    def tokens_of_step(self, version: int) -> int:
        """Completion tokens of the step `version` -> `version + 1`."""
        first = version * self.groups_per_step
        return sum(sum(self.of_group(seq)) for seq in range(first, first + self.groups_per_step))

    def read_in_step(self, version: int) -> int:
        """Tokens that the trainer reads for it: prompt and completion of every sample, without the last token, behind
        which nothing is predicted."""
        return self.samples_per_step * (self.prompt_tokens[version % self.steps] - 1) + self.tokens_of_step(version)

    def write(self, folder: Path) -> tuple[Path, Path]:
        """train.jsonl with a row a group, held_out.jsonl with one; returns both."""
        train, held_out = folder / "train.jsonl", folder / "held_out.jsonl"
        train.write_text("".join(json.dumps(row) + "\n" for row in self._rows()))
        held_out.write_text(json.dumps({"question": "0", "answer": answer_for([HELD_OUT_TOKENS])}) + "\n")
        return train, held_out

    def _rows(self) -> Iterator[dict[str, str]]:
        for seq in range(self.steps * self.groups_per_step):
            size = self.prompt_tokens[seq // self.groups_per_step]
            digits = np.random.default_rng([self.seed, seq]).integers(0, 10, size).tolist()
            yield {"question": " ".join(map(str, digits)), "answer": answer_for(self.of_group(seq))}


@dataclass(frozen=True, slots=True)
class Course:
    """How the steps of a run with `max_staleness` S are used.

    The first S + 1 steps train what was generated while the trainer was starting, the next two are slow here and
    there, and during the last S ones nothing is left to admit: none of these is timed.
    """

    max_staleness: int
    timed: int
    """M."""

    @property
    def head(self) -> int:
        """Steps before the clock starts."""
        return self.max_staleness + 1 + WARM_STEPS

    @property
    def steps(self) -> int:
        """Of the whole run."""
        return self.head + self.timed + self.max_staleness
