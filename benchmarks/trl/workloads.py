"""The workloads: a run configuration of this project, from which everything that TRL is told follows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from async_grpo.config import RunConfig
from async_grpo.config.load import load
from async_grpo.config.model import ArithmeticTaskConfig
from async_grpo.data.arithmetic import ProblemSet
from async_grpo.errors import ConfigError
from trainer.model.optimizer import learning_rate

HERE = Path(__file__).parent
CACHE = HERE / ".cache"


@dataclass(frozen=True, slots=True)
class TrlDials:
    """The settings of TRL that do not change what it computes: the fastest found are used."""

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
class Workload:
    """A task for both sides: steps, prompts, what is counted."""

    name: str
    policy: str
    """Folder of the first policy, in the cache."""
    steps: int
    skip: int
    """Steps at the beginning that are not counted: compilation, caches, and what was generated before the first."""
    tail: int
    """Steps at the end that are not counted: by then an asynchronous run generates nothing more."""
    dials: TrlDials
    """TRL's setting. Those below are for two cores, until `python -m benchmarks.trl.search` has found others."""

    @property
    def model(self) -> Path:
        """The first policy of both sides."""
        return CACHE / self.policy

    @property
    def prompts(self) -> Path:
        """The prompts of both sides, in order."""
        return CACHE / f"{self.name}-prompts.jsonl"

    def dials_file(self, cores: int) -> Path:
        """Where the search keeps the setting for so many cores."""
        return CACHE / f"{self.name}-{cores}-cores.json"

    def tuned(self, cores: int) -> Workload:
        """The workload with TRL set for so many cores: as the search found, else all as threads of one process."""
        file = self.dials_file(cores)
        if not file.exists():
            return replace(self, dials=replace(self.dials, threads=cores))
        return replace(self, dials=TrlDials(**json.loads(file.read_text(encoding="utf-8"))))

    def config(self, out: Path, name: str, overrides: Sequence[str] = ()) -> RunConfig:
        """The run of this project's side: the workload's file, and what depends on the machine."""
        here = [
            f"name={name}",
            f"runs_dir={out}",
            f"steps={self.steps}",
            f"model.path={self.model}",
            f"data.path={self.prompts}",
            f"data.eval_path={CACHE / 'held-out.jsonl'}",
        ]
        return load(HERE / f"{self.name}.yaml", [*here, *overrides])

    def write_spec(self, out: Path) -> None:
        """Write spec.json, everything that TRL's side is told: this project's configuration, the learning rate of every
        step, and the dials."""
        config = self.config(out, self.name)
        spec = {
            "out": str(out),
            "config": config.model_dump(mode="json"),
            "learning_rates": [
                learning_rate(config.trainer.optimizer, version, self.steps) for version in range(self.steps)
            ],
            "dials": asdict(self.dials),
        }
        (out / "spec.json").write_text(json.dumps(spec, indent=2) + "\n", encoding="utf-8")

    def counting(self, staleness: int, steps: int) -> Workload:
        """The workload with so many steps. Not counted are the first ones, whose completions a run with this S may have
        generated before the clock starts, and the last ones, when it generates nothing more. Raises ConfigError if no
        step is left."""
        skip, tail = max(self.skip, staleness + 2), max(self.tail, staleness + 1)
        if steps <= skip + tail:
            raise ConfigError(
                f"{self.name}: of {steps} steps, {skip} at the beginning and {tail} at the end do not count at "
                f"S = {staleness}, so nothing does. Give --steps {skip + tail + 5} or more"
            )
        return replace(self, steps=steps, skip=skip, tail=tail)

    def write_prompts(self) -> None:
        """Write the prompt file, long enough for every step, and the one held-out problem that a run asks for."""
        CACHE.mkdir(exist_ok=True)
        problems = ProblemSet(ArithmeticTaskConfig(), seed=1)
        needed = 16 * max(workload.steps for workload in WORKLOADS.values())
        training = [problems.problem("train", index) for index in range(needed)]
        for file, chosen in ((self.prompts, training), (CACHE / "held-out.jsonl", problems.held_out[:1])):
            rows = [json.dumps({"question": problem.prompt, "answer": problem.answer}) for problem in chosen]
            file.write_text("\n".join(rows) + "\n", encoding="utf-8")


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("tail", "checks", steps=30, skip=4, tail=3, dials=TrlDials(rows=16, threads=2)),
        Workload("checks", "checks", steps=16, skip=4, tail=3, dials=TrlDials(rows=16, threads=2)),
        Workload("quickstart", "quickstart", steps=50, skip=5, tail=3, dials=TrlDials(rows=64, threads=2)),
    )
}
"""`tail` is the headline; see README.md."""
