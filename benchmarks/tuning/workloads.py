"""Three workloads for two CPU cores, one a side: their present configuration and the grid of real runs around it.

Prompts and lengths are prescribed to the token, as in `async-grpo bench pipeline`: all points of a grid do the same
work. The policy is random and its rewards mean nothing, so these runs are about speed and ages alone.
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

TIMED = 12
"""Steps of a run that count."""
PRESENT_STALENESS = 1
FIFO = {"buffer.selector.kind": "fifo"}


def windowed(window: int) -> dict[str, str]:
    """The values of windowed_fifo with that window."""
    return {"buffer.selector.kind": "windowed_fifo", "buffer.selector.window": str(window)}


def slots(count: int) -> dict[str, str]:
    """So many samples in flight."""
    return {"rollout.max_concurrency": str(count)}


@dataclass(frozen=True, slots=True)
class TunedWorkload:
    """What is trained, and which values the grid tries beside `max_staleness`."""

    groups_per_step: int
    group_size: int
    prompt_tokens: int
    lengths: LogNormal
    concurrency: int
    """Samples in flight of the present configuration."""
    others: Sequence[Mapping[str, str]]
    options: Sequence[str]
    """What `tune` is told, so that it chooses among the same values."""
    staleness: Sequence[int] = (0, 1, 2, 4)

    @property
    def work(self) -> FixedWork:
        """The prescribed prompts and completions."""
        count = TIMED * self.groups_per_step * self.group_size
        lengths = tuple(self.lengths.of(sample_seed(1, "length", place)) for place in range(count))
        return FixedWork(self.groups_per_step, self.group_size, lengths, (self.prompt_tokens,) * TIMED)

    @property
    def grid(self) -> Iterator[dict[str, str]]:
        """The values of every point. A window never has more groups than may be active."""
        for staleness, other in product(self.staleness, self.others):
            if int(other.get("buffer.selector.window", 1)) <= (staleness + 1) * self.groups_per_step:
                yield {"max_staleness": str(staleness), **other}


_STALENESS = "--vary=max_staleness=0,1,2,4"
_SLOTS = [slots(count) for count in (4, 8, 16)]
_SELECTORS = [FIFO, windowed(2), windowed(4)]
_VARY_SLOTS = [_STALENESS, "--vary=rollout.max_concurrency=4,8,16", "--fix=buffer.selector"]
_VARY_SELECTOR = [
    "--vary=max_staleness=0,1,2,4,8",
    "--vary=buffer.selector=fifo,windowed_fifo:2,windowed_fifo:4",
    "--fix=rollout.max_concurrency",
]
WORKLOADS = {
    "trainer": TunedWorkload(2, 8, 160, LogNormal(24, 0.4, 64), 8, _SLOTS, _VARY_SLOTS),
    "rollout": TunedWorkload(2, 8, 8, LogNormal(80, 0.4, 256), 8, _SLOTS, _VARY_SLOTS),
    "tail": TunedWorkload(2, 8, 16, LogNormal(16, 1.4, 640), 16, _SELECTORS, _VARY_SELECTOR, (0, 1, 2, 4, 8)),
}


@dataclass(frozen=True, slots=True)
class TuningBench:
    """The folder of a workload: its model, data, and the file of the present configuration."""

    folder: Path
    workload: TunedWorkload

    @property
    def file(self) -> Path:
        """The present configuration: what `tune` is given."""
        return self.folder / "present.yaml"

    def prepare(self) -> None:
        """Write model, data and configuration, unless they are there."""
        if self.file.exists():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        number_model(self.folder / "model", POLICY, VOCABULARY)
        setup = PipelineSetup(self.folder, self.folder / "model", POLICY, split_cores(cores(), 1))
        config = setup.config("present", self.workload.work, StepPlan(PRESENT_STALENESS, TIMED))
        rollout = config.rollout.model_copy(update={"max_concurrency": self.workload.concurrency})
        write_atomic(self.file, dump(config.model_copy(update={"rollout": rollout})))

    def config(self, name: str, values: Mapping[str, str]) -> RunConfig:
        """A point as a run. Its steps are so many that TIMED of them count."""
        steps = StepPlan(int(values.get("max_staleness", PRESENT_STALENESS)), TIMED).steps
        typed = [f"{key}={value}" for key, value in values.items()]
        return load(self.file, [f"name={name}", f"steps={steps}", *typed])


def cores() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0))
