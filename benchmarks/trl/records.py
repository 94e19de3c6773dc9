"""What both sides read: prompts, and what TRL's side is told. Imports the standard library only."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path


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
    """The learning rate of every step."""
    clip_low: float
    clip_high: float
    beta1: float
    beta2: float
    eps: float
    clip_grad: float
    dials: TrlDials

    def write(self, path: Path) -> None:
        """Write the spec as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> TrlSpec:
        """Read the spec from JSON."""
        fields = json.loads(path.read_text(encoding="utf-8"))
        fields["learning_rates"] = tuple(fields["learning_rates"])
        fields["dials"] = TrlDials(**fields["dials"])
        return cls(**fields)
