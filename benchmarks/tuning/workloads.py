"""Three workloads for two CPU cores, one per side: their present configuration and the grid of real runs around it.

Prompts and lengths are prescribed to the token, as in `async-grpo bench pipeline`, so all points of a grid do the same
work. The policy is random and its rewards are meaningless: only speeds and ages are compared.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from async_grpo.config import RunConfig, dump, load
from async_grpo.lab.bench.pipeline.setup import POLICY, PipelineSetup, split_cores
from async_grpo.lab.bench.pipeline.workload import VOCABULARY, FixedWork, StepPlan
from async_grpo.lab.bench.rollout.workload import LogNormal, number_model
from async_grpo.utils.files import write_atomic
from rollout_server.engines.base import sample_seed

TIMED_STEPS = 12
"""Steps of a run that count."""
PRESENT_STALENESS = 1
GROUPS_PER_STEP = 2
GROUP_SIZE = 8


@dataclass(frozen=True, slots=True)
class TunedWorkload:
    """A workload, and the values that its grid combines."""

    prompt_tokens: int
    lengths: LogNormal
    concurrency: int
    """Samples in flight in the present configuration."""
    staleness: Sequence[int]
    """Values of `max_staleness` in the grid."""
    other_values: Sequence[Mapping[str, str]]
    """Values of the grid's second axis."""
    tune_options: Sequence[str]
    """Command-line options with which `tune` chooses among the same values."""

    @property
    def work(self) -> FixedWork:
        """Prescribed prompts and completions."""
        count = TIMED_STEPS * GROUPS_PER_STEP * GROUP_SIZE
        lengths = tuple(self.lengths.draw(sample_seed(1, "length", index)) for index in range(count))
        return FixedWork(GROUPS_PER_STEP, GROUP_SIZE, lengths, (self.prompt_tokens,) * TIMED_STEPS)

    @property
    def grid(self) -> Iterator[dict[str, str]]:
        """Values of every point. Leaves out selection windows that are larger than the staleness window."""
        for staleness, values in product(self.staleness, self.other_values):
            if int(values.get("buffer.selector.window", 1)) <= (staleness + 1) * GROUPS_PER_STEP:
                yield {"max_staleness": str(staleness), **values}


_CONCURRENCIES = [{"rollout.max_concurrency": str(count)} for count in (4, 8, 16)]
_SELECTORS = [
    {"buffer.selector.kind": "fifo"},
    {"buffer.selector.kind": "windowed_fifo", "buffer.selector.window": "2"},
    {"buffer.selector.kind": "windowed_fifo", "buffer.selector.window": "4"},
]
_VARY_CONCURRENCY = [
    "--vary=max_staleness=0,1,2,4",
    "--vary=rollout.max_concurrency=4,8,16",
    "--fix=buffer.selector",
]
_VARY_SELECTOR = [
    "--vary=max_staleness=0,1,2,4,8",
    "--vary=buffer.selector=fifo,windowed_fifo:2,windowed_fifo:4",
    "--fix=rollout.max_concurrency",
]
WORKLOADS = {
    # Long prompts, short completions: the trainer is the slower side.
    "trainer": TunedWorkload(
        prompt_tokens=160,
        lengths=LogNormal(24, 0.4, 64),
        concurrency=8,
        staleness=(0, 1, 2, 4),
        other_values=_CONCURRENCIES,
        tune_options=_VARY_CONCURRENCY,
    ),
    # Short prompts, long completions: generation is the slower side.
    "rollout": TunedWorkload(
        prompt_tokens=8,
        lengths=LogNormal(80, 0.4, 256),
        concurrency=8,
        staleness=(0, 1, 2, 4),
        other_values=_CONCURRENCIES,
        tune_options=_VARY_CONCURRENCY,
    ),
    # Lengths with a long tail: the order in which batches are taken matters.
    "tail": TunedWorkload(
        prompt_tokens=16,
        lengths=LogNormal(16, 1.4, 640),
        concurrency=16,
        staleness=(0, 1, 2, 4, 8),
        other_values=_SELECTORS,
        tune_options=_VARY_SELECTOR,
    ),
}


@dataclass(frozen=True, slots=True)
class TuningBench:
    """Folder of a workload with its model, data and present configuration."""

    folder: Path
    workload: TunedWorkload

    @property
    def config_file(self) -> Path:
        """File of the present configuration, the input of `tune`."""
        return self.folder / "present.yaml"

    def prepare(self) -> None:
        """Write model, data and configuration, unless they exist."""
        if self.config_file.exists():  # written last
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        number_model(self.folder / "model", POLICY, VOCABULARY)
        cores = sorted(os.sched_getaffinity(0))
        setup = PipelineSetup(self.folder, self.folder / "model", POLICY, split_cores(cores, 1))
        config = setup.build_config("present", self.workload.work, StepPlan(PRESENT_STALENESS, TIMED_STEPS))
        rollout = config.rollout.model_copy(update={"max_concurrency": self.workload.concurrency})
        write_atomic(self.config_file, dump(config.model_copy(update={"rollout": rollout})))

    def make_config(self, name: str, values: Mapping[str, str]) -> RunConfig:
        """Make the configuration of a point, with as many steps as needed for TIMED_STEPS to count."""
        steps = StepPlan(int(values.get("max_staleness", PRESENT_STALENESS)), TIMED_STEPS).steps
        overrides = [f"{key}={value}" for key, value in values.items()]
        return load(self.config_file, [f"name={name}", f"steps={steps}", *overrides])
