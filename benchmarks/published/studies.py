"""The published studies, with their figures, their sources, and what had to be assumed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache, partial

import numpy as np

from async_grpo.lab.simulate.lengths import NORMAL, LengthModel, tail_ratio
from async_grpo.lab.simulate.results import SimulatedMetrics
from async_grpo.lab.simulate.timings import EngineTimings, SyncTimings, Timings, TrainerTimings
from benchmarks.published.published import Cell, Study, hindsight, run, settings_like, solve

# Staleness, trainer nodes -> (seconds of training, groups generated a second, staleness, seconds of a step)
MILES = {
    (1, 1): (242.36, 0.9401, 1.0, 495.5),
    (1, 2): (116.08, 0.967, 1.0, 493.1),
    (1, 3): (79.38, 0.8745, 1.0, 540.2),
    (1, 4): (62.05, 0.8083, 1.0, 584.3),
    (2, 1): (243.95, 0.8872, 1.8776, 260.2),
    (2, 2): (123.63, 0.8786, 1.8854, 277.5),
    (2, 3): (87.47, 0.8131, 1.8229, 290.1),
    (2, 4): (59.84, 0.8188, 1.8411, 303.5),
    (4, 1): (253.01, 0.8615, 3.8151, 261.6),
    (4, 2): (122.52, 0.8925, 2.1276, 210.6),
    (4, 3): (86.21, 0.818, 2.1667, 239.4),
    (4, 4): (60.91, 0.7884, 2.1719, 247.7),
    (8, 1): (228.35, 0.8149, 7.1797, 231.7),
    (8, 2): (118.91, 0.9121, 2.1406, 215.2),
    (8, 3): (83.92, 0.8316, 2.1458, 235.9),
    (8, 4): (60.21, 0.8039, 2.1953, 241.1),
}
MILES_MEAN = 6447.0
"""Mean length of the two calibrating cells: tokens of a step over its samples."""
MILES_CAP, MILES_TRUNCATED = 16_384, 0.053
MILES_STEPS = {1: 40, 2: 40, 4: 60, 8: 110}
"""Steps to simulate by S, so that a queue that fills has filled."""


MILES_CALIBRATING = ((4, 2), (4, 4))


def miles_grid() -> Study:
    """Qwen3-4B on 64 H100: staleness by the split between trainer and rollout nodes, stale groups made again."""
    speeds = solve(
        (0.010, 0.00014),
        lambda tried: [_miles(cell, tried).groups_per_s / MILES[cell][1] - 1 for cell in MILES_CALIBRATING],
    )
    return Study(
        "Staleness by split, with stale groups made again (Qwen3-4B, 64 H100)",
        "https://github.com/okoge-kaz/miles, experiments/outputs/reasoning_eval/staleness-ratio-sweep",
        [
            "Calibrated on S = 4 at 2 : 6 and 4 : 4: two speeds of the engine from groups/s, a / nodes + b from the "
            "training times.",
            f"Lengths lognormal: the mean of these two cells ({MILES_MEAN:.0f}) and {MILES_TRUNCATED:.1%} at the cap "
            f"of {MILES_CAP}, as the source's notes give for the same model.",
            "192 groups in flight, each on the engine with the fewest; a group holds its place until its longest "
            "sample has ended; a queue of 1,000; weights are updated once the next batch is complete, as in slime.",
            "A stale group is generated again with the same lengths. Weights take 3 s to arrive and 2 s to load; the "
            "source does not say.",
        ],
        list(_miles_cells(speeds)),
    )


def _miles(cell: tuple[int, int], speeds: Sequence[float], steps: int = 30) -> SimulatedMetrics:
    """A cell, simulated with two speeds of the engine: of a step, and of each request in it."""
    (staleness, nodes), (step_s, request_s) = cell, speeds
    settings = settings_like(
        groups=192,
        max_staleness=staleness,
        window=192 + 1000 + 2 * 192,
        steps=steps,
        group_size=16,
        servers=8 * (8 - nodes),
        concurrency=192 * 16,
        groups_in_flight=192,
        holds_slots_per_group=True,
        prefetches_batches=True,
        finishes_stale=True,
        regenerates_stale=True,
    )
    (two, *_), (four, *_) = (MILES[each] for each in MILES_CALIBRATING)
    slope = (two - four) / (1 / 2 - 1 / 4)
    timings = Timings(
        prompt_tokens=1,
        lengths=_truncated(MILES_MEAN, MILES_CAP, MILES_TRUNCATED),
        engine=EngineTimings(step_s=step_s, request_s=request_s, prefill_s=0),
        trainer=TrainerTimings(base_s=max(0.0, four - slope / 4), token_s=slope / nodes / (192 * 16 * MILES_MEAN)),
        sync=SyncTimings(stall_s=0, transfer_s=3, load_s=2),
    )
    return run(settings, timings)


def _miles_cells(speeds: Sequence[float]) -> Iterator[Cell]:
    """Three figures of every cell beside what was published."""
    baseline = hindsight([(cell[0], figures[3]) for cell, figures in MILES.items() if cell[0] >= 4])
    early = hindsight([(cell[0], figures[3]) for cell, figures in MILES.items()])
    for cell, (_, groups_per_s, age, period) in MILES.items():
        figures = _miles(cell, speeds, steps=MILES_STEPS[cell[0]])
        where = f"S = {cell[0]}, {cell[1]} : {8 - cell[1]} nodes"
        limit = 0.1 if cell[0] >= 4 else 0.15
        yield Cell(where, "groups/s", groups_per_s, figures.groups_per_s, cell in MILES_CALIBRATING, limit)
        expected = (baseline if cell[0] >= 4 else early)(cell[0])
        yield Cell(where, "s a step", period, figures.step_s, False, limit, baseline=expected)
        yield Cell(where, "staleness", age, figures.group_age, False, 0.5, absolute=True)


@cache
def _truncated(mean: float, cap: int, share: float) -> LengthModel:
    """The lognormal with that mean after the cut, of which that share reaches the cap."""
    for sigma in np.arange(0.3, 2.0, 0.02):
        model = LengthModel(kind="lognormal", mean=mean, sigma=float(sigma), cap=cap)
        mu, _ = model._lognormal_parameters
        if NORMAL.cdf((mu - math.log(cap)) / float(sigma)) >= share:
            return model
    raise ValueError(f"no lognormal has mean {mean} and {share:.1%} at {cap}")


VERL = {0.0: (231.34, 128.47), 0.1: (171.3, 58.17), 0.3: (146.11, 38.88), 0.5: (150.63, 33.14)}
"""Staleness threshold -> (seconds of a step, seconds that the trainer waited)."""
VERL_UPDATE_S = 98.77


def verl_fractions() -> Study:
    """Qwen2.5-Math-7B on 64 + 64 H20: a fraction of a batch may be generated ahead."""
    (step_s,) = solve((0.006,), lambda speed: [_verl(0.0, *speed).step_s / VERL[0.0][0] - 1])
    baseline = hindsight([(fraction, period) for fraction, (period, _) in VERL.items()])
    cells = [
        Cell(f"s = {fraction:g}", "s a step", period, _verl(fraction, step_s).step_s, fraction == 0.0, 0.15,
             baseline=baseline(fraction))
        for fraction, (period, _) in VERL.items()
    ]  # fmt: skip
    return Study(
        "A fraction of a batch ahead (Qwen2.5-Math-7B, 64 + 64 H20)",
        "https://github.com/verl-project/verl, docs/advance/fully_async.md",
        [
            "Calibrated on the row s = 0 (stream off-policy): one speed of the engine, so that its step takes 231 s; "
            "its 98.8 s of updates are kept for all rows.",
            "Lengths lognormal, mean 2,500, sigma 1.1, cap 28K: the source states only the cap. 64 running samples "
            "halve an engine's speed a sample. With sigma 0.8 and mean 4,000 the errors are +11%, +14% and -1%.",
            "(1 + s) * 512 groups may be active; the trainer works on 128 groups at a time; weights take 4 s.",
        ],
        cells,
    )


def _verl(fraction: float, step_s: float) -> SimulatedMetrics:
    """A row, simulated with that speed of the engine."""
    mean = 2500.0
    window = int((1 + fraction) * 512)
    settings = settings_like(
        groups=512,
        max_staleness=math.ceil(fraction),
        window=window,
        steps=12,
        group_size=16,
        servers=64,
        concurrency=window * 16,
        groups_in_flight=window,
        streaming=True,
        min_part_groups=128,
    )
    timings = Timings(
        prompt_tokens=1,
        lengths=LengthModel(kind="lognormal", mean=mean, sigma=1.1, cap=28_672),
        engine=EngineTimings(step_s=step_s, request_s=step_s / 64, prefill_s=0),
        trainer=TrainerTimings(base_s=0, token_s=VERL_UPDATE_S / (512 * 16 * mean)),
        sync=SyncTimings(stall_s=0, transfer_s=4, load_s=0),
    )
    return run(settings, timings)


ONE_STEP_OFF = {
    "FSDP2": (749.0, 247.0, 321.0, 88.0, 286.0, 520.0),
    "Megatron": (699.0, 162.0, 207.0, 119.0, 344.0, 566.0),
}
"""Colocated: seconds of a step, of generating, of the whole rollout phase, of old log-probabilities, of the update;
then the step one step off."""


def one_step_off() -> Study:
    """Qwen2.5-Math-7B on 16 H20: all 16 in turn, or 4 generate while 12 train, one step off."""
    cells = []
    for name, (colocated, generating, phase, old, update, measured) in ONE_STEP_OFF.items():
        cap = 20_480 if name == "FSDP2" else 8192
        train_s = (old + update) * 16 / 12 + colocated - phase - old - update
        (step_s,) = solve((0.01,), partial(_generating_error, cap=cap, generating=generating))
        apart = _one_step_off(4, step_s, cap=cap, ahead=1, train_s=train_s)
        where = f"{name}, 4 : 12"
        cells.append(Cell(where, "s a step", measured, apart, tolerance=0.15, baseline=colocated / 2))
    return Study(
        "One step off (Qwen2.5-Math-7B, 16 H20)",
        "https://github.com/verl-project/verl, docs/advance/one_step_off.md",
        [
            "Calibrated on the colocated row alone: the engine's speed from the seconds of generating, training on 12 "
            "of 16 devices takes 16 / 12 of its seconds; what the phases leave of the step stays as it is.",
            "Batch size, lengths and engines are not in the source: 64 groups of 16, one engine a device, lognormal "
            "with mean 2,500 and sigma 1.1. Baseline: half of the colocated step, since one row fits no line.",
        ],
        cells,
    )


def _one_step_off(servers: int, step_s: float, *, cap: int, ahead: int, train_s: float) -> float:
    """Seconds of a step with that many engines and a training time that is given."""
    settings = settings_like(
        groups=64,
        max_staleness=1,
        window=64 * (1 + ahead),
        steps=16,
        group_size=16,
        servers=servers,
        concurrency=64 * 16 * 2,
        groups_in_flight=64 * (1 + ahead),
    )
    timings = Timings(
        prompt_tokens=1,
        lengths=LengthModel(kind="lognormal", mean=2500, sigma=1.1, cap=cap),
        engine=EngineTimings(step_s=step_s, request_s=step_s / 64, prefill_s=0),
        trainer=TrainerTimings(base_s=train_s, token_s=0),
        sync=SyncTimings(stall_s=0, transfer_s=0.3, load_s=0),
    )
    return run(settings, timings).step_s


def _generating_error(speeds: Sequence[float], *, cap: int, generating: float) -> list[float]:
    """How far 16 engines that do nothing but generate are from the published seconds; a step has 1.3 s besides."""
    return [(_one_step_off(16, speeds[0], cap=cap, ahead=0, train_s=1.0) - 1.3) / generating - 1]


# C, B, q, rho, tail -> measured staleness, the source's own formula
APPLIED_COMPUTE = [
    ((120, 240, 2, 0.63, 1.42), 1.26, 1.34),
    ((240, 120, 2, 0.92, 1.43), 3.59, 3.86),
    ((128, 128, 2, 1.07, 1.44), 3.09, 3.29),
    ((240, 120, 1, 0.86, 1.42), 3.40, 3.34),
    ((120, 120, 1, 0.67, 1.42), 1.92, 1.95),
    ((128, 128, 1, 1.14, 1.45), 2.01, 2.24),
]


def applied_compute() -> Study:
    """Qwen3-8B with a queue that drops its oldest group: staleness alone, no times are published."""
    size = 8
    cells = []
    for (concurrency, batch, queue, ratio, longest), measured, formula in APPLIED_COMPUTE:
        groups, mean, step_s = batch // size, 1000.0, 0.01
        window = round(concurrency * longest / size) + queue * groups + groups
        settings = settings_like(
            groups=groups,
            max_staleness=1_000_000,
            window=window,
            steps=300,
            group_size=size,
            servers=1,
            concurrency=concurrency,
            evicts=True,
        )
        timings = Timings(
            prompt_tokens=1,
            lengths=LengthModel(kind="lognormal", mean=mean, sigma=_sigma_of(longest, size)),
            engine=EngineTimings(step_s=step_s, request_s=0, prefill_s=0, call_s=0),
            trainer=TrainerTimings(base_s=batch * ratio * mean * step_s / concurrency, token_s=0, take_s=0),
            sync=SyncTimings(stall_s=0, transfer_s=0, load_s=0),
        )
        where = f"C = {concurrency}, B = {batch}, q = {queue}, rho = {ratio:g}"
        age = run(settings, timings).group_age
        cells.append(Cell(where, "staleness", measured, age, False, 0.4, absolute=True, baseline=formula))
    return Study(
        "Staleness of a queue that drops its oldest (Qwen3-8B)",
        "https://www.appliedcompute.com/research/staleness-in-fully-async-rl (2026-07-03)",
        [
            "Nothing is calibrated: concurrency C, batch B, queue q B, the ratio rho of the two speeds and the tail "
            "are the published ones. Groups of 8, since the source does not say; slots are freed sample by sample.",
            "Groups beyond the queue are dropped when another is admitted. Baseline: the source's own formula.",
        ],
        cells,
    )


def _sigma_of(longest: float, size: int) -> float:
    """The sigma of a lognormal whose longest of `size` samples is so many times the mean."""
    drawn = np.random.default_rng(0).standard_normal((20_000, size))
    low, high = 0.01, 2.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if tail_ratio(np.exp(middle * drawn)) < longest else (low, middle)
    return (low + high) / 2


AREAL = {0: 27_100.0, 4: 49_000.0, 8: 51_500.0, 16: 52_000.0}
"""Staleness bound -> tokens a second."""


def areal_table() -> Study:
    """R1-Distill-Qwen 1.5B, 8 GPUs, context 8K: throughput against the staleness bound."""
    speeds = solve((0.003, 1 / 52_000), lambda tried: [_areal(at, tried) / AREAL[at] - 1 for at in (0, 8)])
    baseline = hindsight([(staleness, 1 / speed) for staleness, speed in AREAL.items()])
    cells = [
        Cell(f"eta = {staleness}", "tokens/s", speed, _areal(staleness, speeds), staleness in (0, 8),
             baseline=1 / baseline(staleness))
        for staleness, speed in AREAL.items()
    ]  # fmt: skip
    return Study(
        "Throughput by staleness bound (R1-Distill-Qwen 1.5B, 8 GPUs, 8K)",
        "AReaL, arXiv 2505.24298, table 7",
        [
            "Calibrated on eta = 0 and 8: one speed of the engine and one of the trainer.",
            "6 engines and 2 trainers (75 : 25); 64 groups of 16, 256 samples an engine, lognormal lengths of mean "
            "3,000 and sigma 0.8, cap 8,192: the source does not say.",
        ],
        cells,
    )


def _areal(staleness: int, speeds: Sequence[float]) -> float:
    """Tokens a second, simulated with a speed of the engine and one of the trainer."""
    step_s, token_s = speeds
    settings = settings_like(
        groups=64,
        max_staleness=staleness,
        window=64 * (staleness + 1),
        steps=3 * staleness + 12,
        group_size=16,
        servers=6,
        concurrency=256,
    )
    timings = Timings(
        prompt_tokens=1,
        lengths=LengthModel(kind="lognormal", mean=3000.0, sigma=0.8, cap=8192),
        engine=EngineTimings(step_s=step_s, request_s=step_s / 64, prefill_s=0),
        trainer=TrainerTimings(base_s=0, token_s=token_s),
        sync=SyncTimings(stall_s=0, transfer_s=1, load_s=0.5),
    )
    return run(settings, timings).tokens_per_s


MARIN = (48.79 / 20, 35.87 / 20, 147.4 / 20, 336.2 / 25, 68.06 / 20)
"""Seconds an update: synchronous weight sync and generation; asynchronous weight sync, and the whole; by how much
asynchronous was slower."""


def marin_sync_bound() -> Study:
    """Qwen3-0.6B on 8 + 8 H100: weights take longer than generation, and asynchronous training loses."""
    sync_s, _, async_sync_s, whole_s, slower_s = MARIN
    learner_s = whole_s - async_sync_s
    together = _marin(0, sync_s, learner_s)
    apart = _marin(1, async_sync_s, learner_s)
    cells = [
        Cell("asynchronous, age 1", "s an update", whole_s, apart, True, 0.15),
        Cell("asynchronous less synchronous", "s an update", slower_s, apart - together, False, 1.0, absolute=True,
             baseline=-together / 2),
    ]  # fmt: skip
    return Study(
        "A case in which asynchronous training loses (Qwen3-0.6B, 16 H100)",
        "https://github.com/marin-community/marin/issues/8936",
        [
            "Taken from the source: seconds of weight sync in both modes, of generation, and of the whole asynchronous "
            f"update, of which {learner_s:.1f} s are left for the learner. Both sides wait for weights.",
            "Predicted: by how much the asynchronous update is slower. Baseline: asynchronous takes half the time.",
        ],
        cells,
    )


def _marin(staleness: int, stall_s: float, learner_s: float) -> float:
    """Seconds of an update, simulated with these seconds of weight sync and of the learner."""
    settings = settings_like(
        groups=64,
        max_staleness=staleness,
        window=64 * (staleness + 1),
        steps=40,
        group_size=4,
        servers=8,
        concurrency=32,
    )
    timings = Timings(
        prompt_tokens=1,
        lengths=LengthModel(kind="lognormal", mean=159, sigma=0.4, cap=1024),
        engine=EngineTimings(step_s=MARIN[1] / 400, request_s=0, prefill_s=0),
        trainer=TrainerTimings(base_s=learner_s, token_s=0),
        sync=SyncTimings(stall_s=stall_s, transfer_s=0, load_s=0),
    )
    return run(settings, timings).step_s


STUDIES = (miles_grid, verl_fractions, one_step_off, applied_compute, areal_table, marin_sync_bound)
