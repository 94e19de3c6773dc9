"""The workloads: run configurations of this project, from which TRL's configuration is derived."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from async_grpo.config import RunConfig
from async_grpo.config.load import load
from async_grpo.config.model import ArithmeticTaskConfig
from async_grpo.data.arithmetic import Problem, ProblemSet
from async_grpo.errors import ConfigError
from trainer.model.optimizer import learning_rate

HERE = Path(__file__).parent
CACHE = HERE / ".cache"


@dataclass(frozen=True, slots=True)
class TrlSettings:
    """Settings of TRL that affect its speed but not its results. The comparison uses the fastest ones."""

    rows: int
    """Samples per micro-batch, summed over all processes."""
    threads: int
    """torch threads per process."""
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
    """A task for both sides: its policy, prompts, number of steps, and the steps that count."""

    name: str
    policy: str
    """Folder of the initial policy in the cache."""
    steps: int
    skip: int
    """Steps at the beginning that do not count: compilation, caches, completions generated before the first step."""
    tail: int
    """Steps at the end that do not count: by then an asynchronous run generates nothing more."""
    trl_settings: TrlSettings
    """Settings for two cores in `WORKLOADS`. `python -m benchmarks.trl.search` finds better ones for this machine."""

    @property
    def model(self) -> Path:
        """Initial policy of both sides."""
        return CACHE / self.policy

    @property
    def prompts(self) -> Path:
        """Prompts of both sides, in order."""
        return CACHE / f"{self.name}-prompts.jsonl"

    def settings_file(self, cores: int) -> Path:
        """File in which the search stores the fastest settings for `cores` cores."""
        return CACHE / f"{self.name}-{cores}-cores.json"

    def with_settings_for(self, cores: int) -> Workload:
        """Return the workload with TRL's settings from the search, or else with one process of `cores` threads."""
        file = self.settings_file(cores)
        if file.exists():
            settings = TrlSettings(**json.loads(file.read_text(encoding="utf-8")))
        else:
            settings = replace(self.trl_settings, threads=cores)
        return replace(self, trl_settings=settings)

    def make_config(self, out: Path, name: str, overrides: Sequence[str] = ()) -> RunConfig:
        """Make the configuration of our side: the workload's file with the paths of this machine."""
        own_overrides = [
            f"name={name}",
            f"runs_dir={out}",
            f"steps={self.steps}",
            f"model.path={self.model}",
            f"data.path={self.prompts}",
            f"data.eval_path={CACHE / 'held-out.jsonl'}",
        ]
        return load(HERE / f"{self.name}.yaml", [*own_overrides, *overrides])

    def write_spec(self, out: Path) -> None:
        """Write spec.json for TRL's side: our configuration, the learning rate per step, and TRL's settings."""
        config = self.make_config(out, self.name)
        spec = {
            "out": str(out),
            "config": config.model_dump(mode="json"),
            "learning_rates": [
                learning_rate(config.trainer.optimizer, version, self.steps) for version in range(self.steps)
            ],
            "settings": asdict(self.trl_settings),
        }
        (out / "spec.json").write_text(json.dumps(spec, indent=2) + "\n", encoding="utf-8")

    def with_steps(self, steps: int, staleness: int) -> Workload:
        """Return the workload with `steps` steps, of which those count that are fair to a run with this S.

        Completions of the first S + 2 steps may have been generated before the clock starts, and in the last S + 1
        steps nothing is generated any more. Raises ConfigError if no step is left.
        """
        skip = max(self.skip, staleness + 2)
        tail = max(self.tail, staleness + 1)
        if steps <= skip + tail:
            raise ConfigError(
                f"{self.name}: of {steps} steps, {skip} at the beginning and {tail} at the end do not count at "
                f"S = {staleness}, so no step is left. Use --steps {skip + tail + 5} or more"
            )
        return replace(self, steps=steps, skip=skip, tail=tail)

    def write_prompts(self) -> None:
        """Write enough training prompts for every step, and the single held-out problem that a run requires."""
        CACHE.mkdir(exist_ok=True)
        problems = ProblemSet(ArithmeticTaskConfig(), seed=1)
        count = 16 * max(workload.steps for workload in WORKLOADS.values())
        _write_problems(self.prompts, [problems.problem("train", index) for index in range(count)])
        _write_problems(CACHE / "held-out.jsonl", problems.held_out[:1])


def _write_problems(file: Path, problems: Iterable[Problem]) -> None:
    rows = [json.dumps({"question": problem.prompt, "answer": problem.answer}) for problem in problems]
    file.write_text("\n".join(rows) + "\n", encoding="utf-8")


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("tail", "checks", steps=30, skip=4, tail=3, trl_settings=TrlSettings(rows=16, threads=2)),
        Workload("checks", "checks", steps=16, skip=4, tail=3, trl_settings=TrlSettings(rows=16, threads=2)),
        Workload("quickstart", "quickstart", steps=50, skip=5, tail=3, trl_settings=TrlSettings(rows=64, threads=2)),
    )
}
"""`tail` is the headline; see README.md."""
