"""The fixed work: which prompts, and how long the completion of each sample is.

    period   steps 0 ... M-1 with P groups of G samples each, drawn once
    run      the period over and over, S + 1 + WARM_STEPS steps + M timed ones + S steps

Batches are taken in the order of their tickets (`fifo`), so step v trains the groups v P ... (v + 1) P - 1 at every
staleness. The stream repeats every M steps, so any M steps in a row have the same prompts and the same lengths,
wherever the timed part of a run begins.

The lengths of the completions are `constant`, `lognormal`, or `recorded` in a run of the user.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from async_grpo.errors import ConfigError, DataError
from async_grpo.lab.bench.pipeline.fixed_lengths import answer_for
from async_grpo.lab.bench.rollout.workload import LogNormal
from async_grpo.telemetry.jsonl import iter_rows
from rollout_server.engines.base import sample_seed

Kind = Literal["constant", "lognormal", "recorded"]
CONSTANT = 36
"""Length of every completion if they are constant: about the mean of the heavy-tailed ones."""
HEAVY_TAILED = LogNormal(median=24, sigma=1.0, longest=256)
"""The longest of 32 completions has some eight times the tokens of a typical one."""
VOCABULARY = 1024
WARM_STEPS = 2
"""Steps before the timed ones at every S. In them both sides do everything once, including an update while the engine
generates."""
HELD_OUT_TOKENS = 8
"""Length of the one completion of an evaluation. Every run evaluates, before and after the timed part."""
_KEYS = ("length", "tokens", "completion_tokens")


def draw(kind: Kind, count: int, *, seed: int, recorded: Path | None = None) -> tuple[int, ...]:
    """The lengths of `count` completions in a row; the same arguments give the same ones.

    `recorded` is drawn from with replacement. Raises ConfigError if it is given for another kind, or not given;
    DataError if it holds no lengths.
    """
    if (kind == "recorded") != (recorded is not None):
        raise ConfigError(
            f"--lengths is {kind} and --lengths-from is {recorded}. Give a file of lengths (or the samples folder of a "
            "run) with --lengths recorded, and only then"
        )
    if recorded is not None:
        pool = read_lengths(recorded)
        return tuple(pool[place] for place in np.random.default_rng(seed).integers(0, len(pool), count).tolist())
    if kind == "constant":
        return (CONSTANT,) * count
    return tuple(HEAVY_TAILED.of(sample_seed(seed, "length", place)) for place in range(count))


def describe(kind: Kind) -> str:
    """The lengths of that kind, in words."""
    return {"constant": f"{CONSTANT} tokens each", "lognormal": str(HEAVY_TAILED), "recorded": "recorded lengths"}[kind]


def read_lengths(path: Path) -> list[int]:
    """Tokens of every completion in a JSON-lines file, or in all of a folder such as `runs/NAME/samples`.

    A row is {"length": 24} (or "tokens", "completion_tokens"), or a row of a run's samples: then the ends of its
    completions' spans count. Raises DataError if there is none.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    found = [length for file in files for row in iter_rows(file) for length in _lengths_of(row) if length > 0]
    if not found:
        raise DataError(
            f"{path} holds no lengths of completions. Give JSON lines with a field {_KEYS[0]!r}, such as "
            '{"length": 24}, or the folder runs/NAME/samples of a run that has made groups'
        )
    return found


def _lengths_of(row: Mapping[str, Any]) -> Iterable[int]:
    for key in _KEYS:
        if isinstance(row.get(key), int):
            return [row[key]]
    completions = row.get("completions")
    return [one["spans"][-1][2] for one in completions if one.get("spans")] if isinstance(completions, list) else []


@dataclass(frozen=True, slots=True)
class FixedWork:
    """The work of one period. `lengths`: completion tokens of all samples, group after group; `prompt_tokens`: tokens
    of the prompts of each step."""

    groups_per_step: int
    group_size: int
    lengths: tuple[int, ...]
    prompt_tokens: tuple[int, ...]
    seed: int = 1

    @property
    def steps(self) -> int:
        """M: steps of a period."""
        return len(self.prompt_tokens)

    @property
    def samples_per_step(self) -> int:
        """P * G samples."""
        return self.groups_per_step * self.group_size

    @property
    def tokens(self) -> int:
        """Completion tokens of a period."""
        return sum(self.lengths)

    @property
    def longest_completion(self) -> int:
        """Tokens of the longest completion."""
        return max(*self.lengths, HELD_OUT_TOKENS)

    @property
    def longest(self) -> int:
        """Tokens of the longest possible sequence, prompt included."""
        return max(self.prompt_tokens) + self.longest_completion

    def group_lengths(self, seq: int) -> tuple[int, ...]:
        """Lengths of the samples of the group whose ticket has that number."""
        place = seq % (self.steps * self.groups_per_step) * self.group_size
        return self.lengths[place : place + self.group_size]

    def tokens_of_step(self, version: int) -> int:
        """Completion tokens of the step `version` -> `version + 1`."""
        first = version * self.groups_per_step
        return sum(sum(self.group_lengths(seq)) for seq in range(first, first + self.groups_per_step))

    def read_in_step(self, version: int) -> int:
        """Tokens that the trainer reads for it: prompt and completion of every sample, without the last token, behind
        which nothing is predicted."""
        return self.samples_per_step * (self.prompt_tokens[version % self.steps] - 1) + self.tokens_of_step(version)

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write train.jsonl with a row for each group, and held_out.jsonl with one; returns both."""
        train, held_out = folder / "train.jsonl", folder / "held_out.jsonl"
        train.write_text("".join(json.dumps(row) + "\n" for row in self._rows()))
        held_out.write_text(json.dumps({"question": "0", "answer": answer_for([HELD_OUT_TOKENS])}) + "\n")
        return train, held_out

    def _rows(self) -> Iterator[dict[str, str]]:
        for seq in range(self.steps * self.groups_per_step):
            size = self.prompt_tokens[seq // self.groups_per_step]
            digits = np.random.default_rng([self.seed, seq]).integers(0, 10, size).tolist()
            yield {"question": " ".join(map(str, digits)), "answer": answer_for(self.group_lengths(seq))}


@dataclass(frozen=True, slots=True)
class StepPlan:
    """How the steps of a run with `max_staleness` S are used.

    The first S + 1 steps train what was generated while the trainer was starting, the next two are slow here and
    there, and during the last S ones nothing is left to admit: none of these is timed.
    """

    max_staleness: int
    timed: int
    """M: steps that are timed."""

    @property
    def head(self) -> int:
        """Steps before the clock starts."""
        return self.max_staleness + 1 + WARM_STEPS

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.head + self.timed + self.max_staleness
