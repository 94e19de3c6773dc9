"""The fixed work: the prompts, and the length of each sample's completion.

    period   steps 0 ... M-1 with P groups of G samples each, drawn once
    run      the period repeated: S + 1 + WARM_STEPS steps, M timed ones, S steps

Batches are taken in ticket order (`fifo`), so step v trains the groups v P ... (v + 1) P - 1 at every staleness. The
stream repeats every M steps, so any M consecutive steps have the same prompts and lengths, wherever the timed part of a
run starts.

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
"""Length of every completion of kind `constant`: about the mean of the heavy-tailed ones."""
HEAVY_TAILED = LogNormal(median=24, sigma=1.0, longest=256)
"""The longest of 32 completions has about eight times the tokens of a typical one."""
VOCABULARY = 1024
WARM_STEPS = 2
"""Steps before the timed ones at every S, in which both sides do everything once, including an update while the engine
generates."""
HELD_OUT_TOKENS = 8
"""Length of an evaluation's only completion. Every run evaluates before and after the timed part."""
_KEYS = ("length", "tokens", "completion_tokens")


def draw_lengths(kind: Kind, count: int, *, seed: int, recorded: Path | None = None) -> tuple[int, ...]:
    """Return the lengths of `count` consecutive completions; the same arguments give the same lengths.

    Recorded lengths are drawn with replacement. Raises ConfigError if `recorded` is missing, or given for another kind;
    DataError if it has no lengths.
    """
    if (kind == "recorded") != (recorded is not None):
        raise ConfigError(
            f"--lengths is {kind} and --lengths-from is {recorded}. Give a file of lengths (or the samples folder of a "
            "run) with --lengths recorded and only with it"
        )
    if recorded is not None:
        pool = read_lengths(recorded)
        indices = np.random.default_rng(seed).integers(0, len(pool), count).tolist()
        return tuple(pool[index] for index in indices)
    if kind == "constant":
        return (CONSTANT,) * count
    return tuple(HEAVY_TAILED.draw(sample_seed(seed, "length", index)) for index in range(count))


def describe_lengths(kind: Kind) -> str:
    """Return the lengths of a kind in words."""
    return {"constant": f"{CONSTANT} tokens each", "lognormal": str(HEAVY_TAILED), "recorded": "recorded lengths"}[kind]


def read_lengths(path: Path) -> list[int]:
    """Return the tokens of every completion in a JSON-lines file, or in all files of a folder like `runs/NAME/samples`.

    A row is {"length": 24} (or "tokens", "completion_tokens"), or a row of a run's samples. Raises DataError if there
    are none.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    lengths = []
    for file in files:
        for row in iter_rows(file):
            lengths += [length for length in _row_lengths(row) if length > 0]
    if not lengths:
        raise DataError(
            f"{path} has no lengths of completions. Give JSON lines with a field {_KEYS[0]!r}, such as "
            '{"length": 24}, or the folder runs/NAME/samples of a run with finished groups'
        )
    return lengths


def _row_lengths(row: Mapping[str, Any]) -> Iterable[int]:
    for key in _KEYS:
        if isinstance(row.get(key), int):
            return [row[key]]
    completions = row.get("completions")
    if not isinstance(completions, list):
        return []
    # The end of the last span is the length of a completion.
    return [completion["spans"][-1][2] for completion in completions if completion.get("spans")]


@dataclass(frozen=True, slots=True)
class FixedWork:
    """The work of one period."""

    groups_per_step: int
    group_size: int
    lengths: tuple[int, ...]
    """Completion tokens of all samples, group by group."""
    prompt_tokens: tuple[int, ...]
    """Tokens of each prompt, per step."""
    seed: int = 1

    @property
    def steps(self) -> int:
        """M: steps of a period."""
        return len(self.prompt_tokens)

    @property
    def samples_per_step(self) -> int:
        """P * G samples per step."""
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
        """Return the lengths of the samples of the group with ticket `seq`."""
        start = seq % (self.steps * self.groups_per_step) * self.group_size
        return self.lengths[start : start + self.group_size]

    def tokens_of_step(self, version: int) -> int:
        """Return the completion tokens of the step `version` -> `version + 1`."""
        first = version * self.groups_per_step
        return sum(sum(self.group_lengths(seq)) for seq in range(first, first + self.groups_per_step))

    def read_in_step(self, version: int) -> int:
        """Return the tokens that the trainer reads in that step.

        They are prompt and completion of every sample without its last token, after which nothing is predicted.
        """
        return self.samples_per_step * (self.prompt_tokens[version % self.steps] - 1) + self.tokens_of_step(version)

    def write_data(self, folder: Path) -> tuple[Path, Path]:
        """Write train.jsonl with a row per group, and held_out.jsonl with one row; return both."""
        train = folder / "train.jsonl"
        held_out = folder / "held_out.jsonl"
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

    The first S + 1 steps train groups generated while the trainer was starting, the next two warm up, and during the
    last S steps no group is left to admit: none of these steps is timed.
    """

    max_staleness: int
    timed: int
    """M: number of timed steps."""

    @property
    def head(self) -> int:
        """Steps before the clock starts."""
        return self.max_staleness + 1 + WARM_STEPS

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.head + self.timed + self.max_staleness
