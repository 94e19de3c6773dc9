"""What all runs of the bench share: a model, the configuration of a run, the cores of each side, and their execution.

    points --> SweepRunner --> DIR/runs/NAME   the first that fails stops the rest, and is an error of the bench

The runs are real ones, one after another: each an `async-grpo run` in a process of its own, started by the runner of
sweeps. Each side has its own part of the machine; `speed_beside` measures what the two cost each other.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np

from async_grpo.config import RunConfig, validate
from async_grpo.config.model import TinyQwen2Config
from async_grpo.errors import ConfigError, RoleFailed
from async_grpo.lab.bench.pipeline.workload import VOCABULARY, FixedWork, StepPlan
from async_grpo.lab.sweep.folder import SweepFolder
from async_grpo.lab.sweep.plan import Point
from async_grpo.lab.sweep.progress import SweepState
from async_grpo.lab.sweep.runner import AttemptOutcome, AttemptResult, SweepRunner
from async_grpo.lab.sweep.sweep import INTERRUPTED
from async_grpo.models.shapes import shape_of
from async_grpo.models.tiny.qwen2 import tiny_qwen2_sizes

_SIBLINGS = "/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"
_TIMED_S = 1.0
POLICY = TinyQwen2Config(hidden_size=256, layers=4, heads=4, kv_heads=2, intermediate_size=704, max_positions=8192)
"""3 million parameters: large enough that a step of either side is mostly arithmetic."""
TINY = TinyQwen2Config(hidden_size=64, layers=2, heads=2, kv_heads=1, intermediate_size=128)
_FLOAT32_BYTES = 4
LEARNING_RATE = 1e-5
"""All weights change and are loaded again at every step, but the policy stays random."""
NEVER = 1_000_000
MICRO_BATCH_TOKENS = 8192
KV_BLOCK, LEAST_KV_BYTES = 128, 256 << 20
READY_TIMEOUT_S = 900.0
"""Long, because all processes of a side start on one core."""


@dataclass(frozen=True, slots=True)
class CoreSplit:
    """Cores by side; () where this system pins no process to a core."""

    rollout: tuple[int, ...]
    trainer: tuple[int, ...]


def split_cores(here: Sequence[int], each: int, sibling_of: Callable[[int], int] | None = None) -> CoreSplit:
    """Give each side `each` cores. The sides share no physical core if possible, and a side uses as many as it can.

    Raises ConfigError if there are too few.

    `sibling_of`: the first hardware thread of the physical core that a core belongs to.

    >>> split_cores([0, 1, 2, 3], 1, sibling_of=lambda core: core // 2 * 2)
    CoreSplit(rollout=(0,), trainer=(2,))
    """
    if not here:
        return CoreSplit((), ())
    if len(here) < 2 * each:
        raise ConfigError(
            f"--cores is {each} a side, which makes {2 * each}, and this process may use {len(here)}: the sides would "
            "take time from each other. Lower --cores, or measure on a larger machine"
        )
    threads: dict[int, list[int]] = {}  # the hardware threads of each physical core; its first may be missing
    for core in sorted(here):
        threads.setdefault((sibling_of or first_sibling)(core), []).append(core)
    physical = list(threads.values())
    near, far = physical[: len(physical) // 2], physical[(len(physical) + 1) // 2 :]  # an odd one out is in neither
    rollout = (_one_thread_each_first(near) + _one_thread_each_first(physical[len(near) :]))[:each]
    rest = _one_thread_each_first(far) + _one_thread_each_first(physical[: len(physical) - len(far)])
    trainer = [core for core in rest if core not in rollout][:each]
    return CoreSplit(tuple(sorted(rollout)), tuple(sorted(trainer)))


def _one_thread_each_first(physical: Sequence[list[int]]) -> list[int]:
    """A thread of every physical core, then the second threads, and so on."""
    return [core for round_ in zip_longest(*physical) for core in round_ if core is not None]


def first_sibling(core: int) -> int:
    """The first hardware thread of a physical core, from the kernel; the core itself if the kernel does not say."""
    try:
        text = Path(_SIBLINGS.format(core=core)).read_text()
    except OSError:
        return core
    return int(text.replace("-", ",").split(",")[0])


def speed_beside(split: CoreSplit) -> float | None:
    """The speed of a core while a core of the other side computes too, as a share of its speed alone: 1 if they share
    nothing. Takes two seconds; None without cores to pin to."""
    if not split.rollout:
        return None
    pair = [split.rollout[0], split.trainer[0]]
    with ThreadPoolExecutor(2) as threads:
        alone = [threads.submit(_speed, core).result() for core in pair]
        beside = list(threads.map(_speed, pair))
    return sum(beside) / sum(alone)


def _speed(core: int) -> float:
    """Rounds a second of arithmetic that fits into the core's own cache; numpy computes it without the GIL."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, (core,))
    try:
        values, rounds, started_s = np.linspace(0.0, 1.0, 32_768), 0, time.perf_counter()
        while (spent_s := time.perf_counter() - started_s) < _TIMED_S / 2:
            np.exp(values, out=values)
            np.negative(values, out=values)
            rounds += 1
        return rounds / spent_s
    finally:
        os.sched_setaffinity(0, before)


async def run_all(folder: Path, configs: Sequence[RunConfig], show: Callable[[str, int], None]) -> None:
    """Run all to their ends. `show` is told, twice a second, what runs and how many have finished.

    Raises RoleFailed for a run that failed; on Ctrl-C, exits with 130 once what ran has stopped.
    """
    points = [Point({"run": config.name}, config) for config in configs]
    files = SweepFolder(folder)
    files.write_configs(points)
    endings: list[AttemptResult] = []

    def ended(ending: AttemptResult) -> None:
        endings.append(ending)
        if ending.outcome is not AttemptOutcome.FINISHED:
            runner.stop()

    runner = SweepRunner(
        points,
        files,
        total=len(points),
        at_once=1,
        pool=None,
        show=lambda state: show(_in_words(state), state.finished),
        on_end=ended,
    )
    await runner.run_points()
    if failed := [ending for ending in endings if ending.outcome is AttemptOutcome.FAILED]:
        raise RoleFailed(f"the run {failed[0].point.name} of the bench failed: {failed[0].error}")
    if runner.stopping:
        raise SystemExit(INTERRUPTED)


def _in_words(state: SweepState) -> str:
    for run in state.running:
        name = run.label.partition(",")[0].removeprefix("run=")
        return f"{name} at step {run.step} of {run.steps}"
    return "starting"


@dataclass(frozen=True, slots=True)
class PipelineSetup:
    """What all runs share: the folder of the bench, a model and its shape, and the cores of both sides."""

    folder: Path
    model: Path
    shape: TinyQwen2Config
    cores: CoreSplit

    def config(self, name: str, work: FixedWork, plan: StepPlan) -> RunConfig:
        """A run of the work with the default objective, selector and interruption. It is evaluated on one short
        completion before and after, and saved once, at the end. Raises ConfigError."""
        data = self.folder / "data" / name
        data.mkdir(parents=True, exist_ok=True)
        train, held_out = work.write(data)
        threads = max(1, len(self.cores.trainer))
        return validate(
            {
                "name": name,
                "runs_dir": self.folder / "runs",
                "seed": work.seed,
                "steps": plan.steps,
                "max_staleness": plan.max_staleness,
                "group_size": work.group_size,
                "groups_per_step": work.groups_per_step,
                "model": {"path": self.model},
                "data": {"kind": "jsonl", "path": train, "eval_path": held_out, "shuffle": False},
                "rewards": {"functions": [{"name": "async_grpo.lab.bench.pipeline.fixed_lengths:reward"}]},
                "sampling": {"max_tokens": work.longest_completion},
                "rollout": {
                    "workflow": "async_grpo.lab.bench.pipeline.fixed_lengths:PrescribedLengths",
                    "max_concurrency": work.samples_per_step,
                    "vllm": {**self._sequences(work), "threads": threads},
                },
                "trainer": {
                    "threads": threads,
                    "micro_batch_tokens": max(MICRO_BATCH_TOKENS, work.longest),
                    "optimizer": {"lr": LEARNING_RATE},
                    "checkpoint": {"every_steps": NEVER, "keep": 1},
                },
                "eval": {"prompts": 1, "samples": 1, "greedy": False},
                "launch": {"cores": asdict(self.cores), "ready_timeout_s": READY_TIMEOUT_S},
                "telemetry": {"trackers": [], "samples_every": NEVER},
            },
            source="async-grpo bench pipeline",
        )

    def _sequences(self, work: FixedWork) -> dict[str, int]:
        """Room in the engine for the longest sequence, and so much cache that no sample in flight is pushed out."""
        shape, longest = self.shape, work.longest
        if longest > shape.max_positions:
            raise ConfigError(
                f"the longest sequence of the work has {longest} tokens, prompt included, and the model of this "
                f"bench {shape.max_positions} positions. Leave longer completions out of --lengths-from"
            )
        sizes = tiny_qwen2_sizes(shape, vocab_size=VOCABULARY)
        token_bytes = shape_of(sizes).cache_token_bytes(_FLOAT32_BYTES)
        kv_bytes = max(LEAST_KV_BYTES, work.samples_per_step * (longest + KV_BLOCK) * token_bytes)
        return {"max_model_len": longest, "kv_cache_bytes": kv_bytes}
