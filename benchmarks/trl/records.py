"""What both sides read and write, and what follows from it. Pure; nothing but the standard library is imported."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A line of the prompt file."""

    prompt: str
    answer: str


def write_prompts(path: Path, rows: Iterable[PromptRow]) -> None:
    """JSON lines with the fields `question` and `answer`."""
    lines = [json.dumps({"question": row.prompt, "answer": row.answer}) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_prompts(path: Path) -> list[PromptRow]:
    """The rows of a prompt file, in order."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [PromptRow(row["question"], row["answer"]) for row in rows]


@dataclass(frozen=True, slots=True)
class TrlDials:
    """What may be chosen without changing what TRL computes: the fastest found is used."""

    rows: int
    """Samples of one micro-batch, of all processes together."""
    threads: int
    """torch threads of one process."""
    processes: int = 1
    """Data-parallel ranks."""
    generation: str = "generate"
    """`generate`, or `continuous`: transformers' continuous batching."""
    cache: str | None = None
    """cache_implementation of `generate`."""
    attention: str = "sdpa"

    def __str__(self) -> str:
        cache = f", {self.cache} cache" if self.cache else ""
        ranks = f"{self.processes} x {self.threads} threads"
        return f"{self.rows} rows, {ranks}, {self.attention}, {self.generation}{cache}"


@dataclass(frozen=True, slots=True)
class TrlSpec:
    """Everything that TRL's side is told."""

    model: str
    prompts: str
    out: str
    steps: int
    group_size: int
    groups_per_step: int
    max_tokens: int
    temperature: float
    seed: int
    learning_rates: tuple[float, ...]
    """Of every step."""
    clip_low: float
    clip_high: float
    beta1: float
    beta2: float
    eps: float
    clip_grad: float
    dials: TrlDials

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> TrlSpec:
        """From JSON."""
        fields = json.loads(path.read_text(encoding="utf-8"))
        fields["learning_rates"] = tuple(fields["learning_rates"])
        fields["dials"] = TrlDials(**fields["dials"])
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class TrlStep:
    """One optimizer step, on either side."""

    step: int
    ended_s: float
    """Unix time."""
    samples: int
    reward_mean: float
    completion_tokens: int
    busy_s: float
    """What the trainer did itself: all but waiting for completions, or generating them."""


@dataclass(frozen=True, slots=True)
class TrlGroup:
    """Completions of one group: their tokens, and from when until when (Unix time) they were generated and judged."""

    start_s: float
    end_s: float
    tokens: int

    def within(self, start_s: float, end_s: float) -> float:
        """Its tokens in that time, taken for evenly spread over its own."""
        shared_s = min(self.end_s, end_s) - max(self.start_s, start_s)
        return self.tokens * max(0.0, shared_s) / max(self.end_s - self.start_s, 1e-9)


@dataclass(frozen=True, slots=True)
class SideRun:
    """One run of one side."""

    side: str
    started_s: float
    """Unix time at which its first process was started."""
    steps: tuple[TrlStep, ...]
    made: tuple[TrlGroup, ...] | None = None
    """Every group; None where each step generates what it trains."""

    @property
    def start_up_s(self) -> float:
        """Until the first step has ended."""
        return self.steps[0].ended_s - self.started_s

    def curve(self) -> list[tuple[float, float]]:
        """Seconds since the start, mean reward of the step that ended then."""
        return [(step.ended_s - self.started_s, step.reward_mean) for step in self.steps]


@dataclass(frozen=True, slots=True)
class Pace:
    """The counted steps of a run. Samples and tokens count as far as they were also generated in that time."""

    samples_per_s: float
    tokens_per_s: float
    """Completion tokens."""
    step_s: float
    busy_share: float
    """Of the time, what the trainer did itself."""
    tokens_mean: float
    """Of a completion."""
    generated: float
    """Tokens generated in that time to tokens trained in it: below 1 where a lead was used up."""


def trl_steps(lines: Sequence[Sequence[str]]) -> tuple[TrlStep, ...]:
    """The steps of a TRL run from the rows of its processes: each has a share of the samples."""
    ranks = [[json.loads(line) for line in rank] for rank in lines]
    steps, ended_s = [], 0.0
    for parts in zip(*ranks, strict=True):
        samples = sum(part["samples"] for part in parts)
        ended_s, before_s = max(part["time_s"] for part in parts), ended_s
        generated_s = max(part["generate_s"] for part in parts)
        steps.append(
            TrlStep(
                step=parts[0]["step"],
                ended_s=ended_s,
                samples=samples,
                reward_mean=sum(part["reward_mean"] * part["samples"] for part in parts) / samples,
                completion_tokens=sum(part["completion_tokens"] for part in parts),
                busy_s=ended_s - before_s - generated_s if before_s else 0.0,
            )
        )
    return tuple(steps)


def our_steps(lines: Iterable[str], group_size: int) -> tuple[TrlStep, ...]:
    """The steps of a run of this project from its metrics.jsonl. Raises ValueError if it was not made in one go."""
    rows: list[dict[str, Any]] = [row for line in lines if (row := json.loads(line))["kind"] == "step"]
    if len({row["epoch"] for row in rows}) > 1 or len({row["step"] for row in rows}) < len(rows):
        raise ValueError("its trainer was started again on the way: its times are not those of a run. Run it again")
    return tuple(
        TrlStep(
            step=row["step"],
            ended_s=row["time_s"],
            samples=row["groups"] * group_size,
            reward_mean=row["reward_mean"],
            completion_tokens=round(row["completion_tokens_mean"] * row["groups"] * group_size),
            busy_s=row["step_s"] - row["wait_s"],
        )
        for row in rows
    )


def our_groups(lines: Iterable[str]) -> tuple[TrlGroup, ...]:
    """The groups of a rollout server from its timeline."""
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return tuple(
        TrlGroup(row["start_s"], row["end_s"], row["args"]["tokens"])
        for row in rows
        if row.get("track") == "generation"
    )


def pace(run: SideRun, skip: int, tail: int) -> Pace:
    """Of the steps behind the first `skip` and before the last `tail`. Raises ValueError if none is left."""
    counted = run.steps[skip : len(run.steps) - tail]
    if skip < 1 or not counted:
        raise ValueError(
            f"{run.side}: of {len(run.steps)} steps, {skip} at the beginning and {tail} at the end are not counted, so "
            "nothing is. Run more steps"
        )
    start_s, end_s = run.steps[skip - 1].ended_s, counted[-1].ended_s
    seconds = end_s - start_s
    samples = sum(step.samples for step in counted)
    tokens = sum(step.completion_tokens for step in counted)
    generated = 1.0 if run.made is None else sum(made.within(start_s, end_s) for made in run.made) / tokens
    credited = min(1.0, generated)
    return Pace(
        samples_per_s=credited * samples / seconds,
        tokens_per_s=credited * tokens / seconds,
        step_s=seconds / len(counted),
        busy_share=sum(step.busy_s for step in counted) / seconds,
        tokens_mean=tokens / samples,
        generated=generated,
    )


@dataclass(frozen=True, slots=True)
class Ratio:
    """Of paired runs: each repetition has one run of either side."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def ratio(values: Sequence[float], baselines: Sequence[float]) -> Ratio:
    """Value to baseline, repetition by repetition."""
    ratios = [value / baseline for value, baseline in zip(values, baselines, strict=True)]
    return Ratio(median(ratios), min(ratios), max(ratios))
