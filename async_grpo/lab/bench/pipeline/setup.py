"""What all runs of the bench share: a model, the configuration of a run, the cores of each side, and their execution.

    points --> SweepRunner --> DIR/runs/NAME   the first failure stops the rest and is an error of the bench

The runs are real: each is an `async-grpo run` in a separate process, started one after another by the sweep runner.
Each side has its own part of the machine; `measure_core_interference` measures how much they slow each other down.
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
_INTERFERENCE_S = 1.0
POLICY = TinyQwen2Config(hidden_size=256, layers=4, heads=4, kv_heads=2, intermediate_size=704, max_positions=8192)
"""3 million parameters: large enough that a step of either side is mostly arithmetic."""
TINY = TinyQwen2Config(hidden_size=64, layers=2, heads=2, kv_heads=1, intermediate_size=128)
_FLOAT32_BYTES = 4
LEARNING_RATE = 1e-5
"""All weights change and are loaded again at every step, but the policy stays random."""
NEVER = 1_000_000
MICRO_BATCH_TOKENS = 8192
KV_BLOCK = 128
MIN_KV_BYTES = 256 << 20
READY_TIMEOUT_S = 900.0
"""Long because all processes of a side start on one core."""


@dataclass(frozen=True, slots=True)
class CoreSplit:
    """Cores of each side; () if this system cannot pin a process to a core."""

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
            f"--cores is {each} per side, {2 * each} in total, but this process may use {len(here)}: the sides would "
            "take time from each other. Lower --cores, or measure on a larger machine"
        )
    # Hardware threads of each physical core. The first one may not be among the usable cores.
    threads: dict[int, list[int]] = {}
    for core in sorted(here):
        threads.setdefault((sibling_of or first_sibling)(core), []).append(core)
    physical = list(threads.values())

    # Each side prefers its half of the physical cores; an odd one in the middle is in neither half.
    near = physical[: len(physical) // 2]
    far = physical[(len(physical) + 1) // 2 :]
    for_rollout = _interleave_threads(near) + _interleave_threads(physical[len(near) :])
    for_trainer = _interleave_threads(far) + _interleave_threads(physical[: len(physical) - len(far)])
    rollout = for_rollout[:each]
    trainer = [core for core in for_trainer if core not in rollout][:each]
    return CoreSplit(tuple(sorted(rollout)), tuple(sorted(trainer)))


def _interleave_threads(physical: Sequence[list[int]]) -> list[int]:
    """Return the first thread of every physical core, then the second threads, and so on."""
    return [core for threads in zip_longest(*physical) for core in threads if core is not None]


def first_sibling(core: int) -> int:
    """Return the first hardware thread of a physical core; the core itself if the kernel does not report siblings."""
    try:
        text = Path(_SIBLINGS.format(core=core)).read_text()
    except OSError:
        return core
    return int(text.replace("-", ",").split(",")[0])


def measure_core_interference(split: CoreSplit) -> float | None:
    """Return the speed of a core while a core of the other side computes too, relative to its speed alone.

    1 means that they share nothing. Takes two seconds. None without cores to pin to.
    """
    if not split.rollout:
        return None
    pair = [split.rollout[0], split.trainer[0]]
    with ThreadPoolExecutor(2) as threads:
        alone = [threads.submit(_measure_speed, core).result() for core in pair]
        together = list(threads.map(_measure_speed, pair))
    return sum(together) / sum(alone)


def _measure_speed(core: int) -> float:
    """Return the rounds per second of arithmetic that fits into the core's cache and runs without the GIL."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, (core,))
    try:
        values = np.linspace(0.0, 1.0, 32_768)
        rounds = 0
        started_s = time.perf_counter()
        while True:
            elapsed_s = time.perf_counter() - started_s
            if elapsed_s >= _INTERFERENCE_S / 2:
                return rounds / elapsed_s
            np.exp(values, out=values)
            np.negative(values, out=values)
            rounds += 1
    finally:
        os.sched_setaffinity(0, before)


async def run_all(folder: Path, configs: Sequence[RunConfig], show: Callable[[str, int], None]) -> None:
    """Run all configurations one after another.

    `show` is called twice per second with the run in progress and the number of finished runs. Raises RoleFailed if a
    run fails. On Ctrl-C, raises SystemExit(130) after the run in progress has stopped.
    """
    points = [Point({"run": config.name}, config) for config in configs]
    files = SweepFolder(folder)
    files.write_configs(points)
    results: list[AttemptResult] = []

    def record_result(result: AttemptResult) -> None:
        results.append(result)
        if result.outcome is not AttemptOutcome.FINISHED:
            runner.stop()

    runner = SweepRunner(
        points,
        files,
        total=len(points),
        at_once=1,
        pool=None,
        show=lambda state: show(_describe_progress(state), state.finished),
        on_end=record_result,
    )
    await runner.run_points()
    failed = [result for result in results if result.outcome is AttemptOutcome.FAILED]
    if failed:
        raise RoleFailed(f"the run {failed[0].point.name} of the bench failed: {failed[0].error}")
    if runner.stopping:
        raise SystemExit(INTERRUPTED)


def _describe_progress(state: SweepState) -> str:
    for run in state.running:
        name = run.label.partition(",")[0].removeprefix("run=")
        return f"{name} at step {run.step} of {run.steps}"
    return "starting"


@dataclass(frozen=True, slots=True)
class PipelineSetup:
    """The folder of the bench, a model and its shape, and the cores of both sides, for all runs."""

    folder: Path
    model: Path
    shape: TinyQwen2Config
    cores: CoreSplit

    def build_config(self, name: str, work: FixedWork, plan: StepPlan) -> RunConfig:
        """Return a run of the work with the default objective, selector and interruption. Raises ConfigError.

        It evaluates one short completion before and after the work, and saves one checkpoint at the end.
        """
        data = self.folder / "data" / name
        data.mkdir(parents=True, exist_ok=True)
        train, held_out = work.write_data(data)
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
                    "vllm": {**self._size_engine(work), "threads": threads},
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

    def _size_engine(self, work: FixedWork) -> dict[str, int]:
        """Return settings that fit the longest sequence, with enough KV cache that no sample in flight is preempted."""
        shape = self.shape
        longest = work.longest
        if longest > shape.max_positions:
            raise ConfigError(
                f"the longest sequence of the work has {longest} tokens, prompt included, but the model of this "
                f"bench has {shape.max_positions} positions. Leave longer completions out of --lengths-from"
            )
        sizes = tiny_qwen2_sizes(shape, vocab_size=VOCABULARY)
        token_bytes = shape_of(sizes).cache_token_bytes(_FLOAT32_BYTES)
        kv_bytes = max(MIN_KV_BYTES, work.samples_per_step * (longest + KV_BLOCK) * token_bytes)
        return {"max_model_len": longest, "kv_cache_bytes": kv_bytes}
