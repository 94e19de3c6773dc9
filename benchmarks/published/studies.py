"""The published studies: measured values, sources and assumptions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache, partial

import numpy as np

from async_grpo.lab.simulate.lengths import NORMAL, LengthModel, tail_ratio
from async_grpo.lab.simulate.results import SimulatedMetrics
from async_grpo.lab.simulate.timings import EngineTimings, SyncTimings, Timings, TrainerTimings
from benchmarks.published.published import Cell, Study, fit_baseline, fit_parameters, make_settings, run_simulation

# (staleness bound, trainer nodes) -> (training seconds, groups generated per second, staleness, seconds per step)
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
"""Mean length in the two calibrating cells: tokens per step / samples per step."""
MILES_CAP = 16_384
MILES_TRUNCATED = 0.053
MILES_STEPS = {1: 40, 2: 40, 4: 60, 8: 110}
"""Steps to simulate per S. Enough for a growing queue to fill."""
MILES_CALIBRATING = ((4, 2), (4, 4))


def miles_grid() -> Study:
    """Qwen3-4B on 64 H100: staleness by the split between trainer and rollout nodes; stale groups are regenerated."""

    def compute_errors(speeds: Sequence[float]) -> list[float]:
        return [_simulate_miles(cell, speeds).groups_per_s / MILES[cell][1] - 1 for cell in MILES_CALIBRATING]

    speeds = fit_parameters((0.010, 0.00014), compute_errors)
    return Study(
        "Staleness by split, with stale groups regenerated (Qwen3-4B, 64 H100)",
        "https://github.com/okoge-kaz/miles, experiments/outputs/reasoning_eval/staleness-ratio-sweep",
        [
            "Calibrated on S = 4 at 2 : 6 and 4 : 4: two speeds of the engine from groups/s, a / nodes + b from the "
            "training times.",
            f"Lengths lognormal: the mean of these two cells ({MILES_MEAN:.0f}) and {MILES_TRUNCATED:.1%} at the cap "
            f"of {MILES_CAP}, which the source's notes state for the same model.",
            "192 groups in flight, each on the engine with the fewest; a group occupies its slot until its longest "
            "sample has ended; a queue of 1,000; weights are updated once the next batch is complete, as in slime.",
            "A stale group is generated again with the same lengths. Weights take 3 s to arrive and 2 s to load; the "
            "source does not say.",
        ],
        list(_miles_cells(speeds)),
    )


def _simulate_miles(cell: tuple[int, int], speeds: Sequence[float], steps: int = 30) -> SimulatedMetrics:
    """Simulate a cell. `speeds` are the engine's seconds per step and per request in a step."""
    staleness, nodes = cell
    step_s, request_s = speeds
    settings = make_settings(
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
    # Training seconds = base + slope / nodes, through the two calibrating cells.
    two_nodes_s = MILES[(4, 2)][0]
    four_nodes_s = MILES[(4, 4)][0]
    slope = (two_nodes_s - four_nodes_s) / (1 / 2 - 1 / 4)
    timings = Timings(
        prompt_tokens=1,
        lengths=_fit_lengths(MILES_MEAN, MILES_CAP, MILES_TRUNCATED),
        engine=EngineTimings(step_s=step_s, request_s=request_s, prefill_s=0),
        trainer=TrainerTimings(
            base_s=max(0.0, four_nodes_s - slope / 4), token_s=slope / nodes / (192 * 16 * MILES_MEAN)
        ),
        sync=SyncTimings(stall_s=0, transfer_s=3, load_s=2),
    )
    return run_simulation(settings, timings)


def _miles_cells(speeds: Sequence[float]) -> Iterator[Cell]:
    """Yield three predictions per published cell."""
    # The baseline of the large S is fitted to them alone: its best case.
    baseline = fit_baseline([(cell[0], values[3]) for cell, values in MILES.items() if cell[0] >= 4])
    baseline_small = fit_baseline([(cell[0], values[3]) for cell, values in MILES.items()])
    for cell, (_, groups_per_s, age, period_s) in MILES.items():
        staleness, nodes = cell
        simulated = _simulate_miles(cell, speeds, steps=MILES_STEPS[staleness])
        where = f"S = {staleness}, {nodes} : {8 - nodes} nodes"
        if staleness >= 4:
            limit = 0.1
            baseline_s = baseline(staleness)
        else:
            limit = 0.15
            baseline_s = baseline_small(staleness)
        yield Cell(where, "groups/s", groups_per_s, simulated.groups_per_s, cell in MILES_CALIBRATING, limit)
        yield Cell(where, "s per step", period_s, simulated.step_s, False, limit, baseline=baseline_s)
        yield Cell(where, "staleness", age, simulated.group_age, False, 0.5, absolute=True)


@cache
def _fit_lengths(mean: float, cap: int, truncated: float) -> LengthModel:
    """Return the lognormal with this mean after truncation, of which the fraction `truncated` reaches the cap."""
    for sigma in np.arange(0.3, 2.0, 0.02):
        model = LengthModel(kind="lognormal", mean=mean, sigma=float(sigma), cap=cap)
        mu, _ = model._lognormal_parameters
        if NORMAL.cdf((mu - math.log(cap)) / float(sigma)) >= truncated:
            return model
    raise ValueError(f"no lognormal has mean {mean} and {truncated:.1%} at {cap}")


VERL = {0.0: (231.34, 128.47), 0.1: (171.3, 58.17), 0.3: (146.11, 38.88), 0.5: (150.63, 33.14)}
"""Staleness threshold -> (seconds per step, seconds that the trainer waited)."""
VERL_UPDATE_S = 98.77


def verl_fractions() -> Study:
    """Qwen2.5-Math-7B on 64 + 64 H20: a fraction of a batch may be generated ahead."""

    def compute_errors(speeds: Sequence[float]) -> list[float]:
        return [_simulate_verl(0.0, speeds[0]).step_s / VERL[0.0][0] - 1]

    (step_s,) = fit_parameters((0.006,), compute_errors)
    baseline = fit_baseline([(fraction, period_s) for fraction, (period_s, _) in VERL.items()])
    cells = []
    for fraction, (period_s, _) in VERL.items():
        predicted_s = _simulate_verl(fraction, step_s).step_s
        calibrates = fraction == 0.0
        where = f"s = {fraction:g}"
        cells.append(Cell(where, "s per step", period_s, predicted_s, calibrates, 0.15, baseline=baseline(fraction)))
    return Study(
        "A fraction of a batch ahead (Qwen2.5-Math-7B, 64 + 64 H20)",
        "https://github.com/verl-project/verl, docs/advance/fully_async.md",
        [
            "Calibrated on the row s = 0 (stream off-policy): one speed of the engine, so that its step takes 231 s; "
            "its 98.8 s of updates are kept for all rows.",
            "Lengths lognormal, mean 2,500, sigma 1.1, cap 28K: the source states only the cap. 64 running samples "
            "halve an engine's speed per sample. With sigma 0.8 and mean 4,000 the errors are +11%, +14% and -1%.",
            "(1 + s) * 512 groups may be active; the trainer works on 128 groups at a time; weights take 4 s.",
        ],
        cells,
    )


def _simulate_verl(fraction: float, step_s: float) -> SimulatedMetrics:
    """Simulate a row. `step_s` is the time of an engine step."""
    mean = 2500.0
    window = int((1 + fraction) * 512)
    settings = make_settings(
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
    return run_simulation(settings, timings)


ONE_STEP_OFF = {
    "FSDP2": (749.0, 247.0, 321.0, 88.0, 286.0, 520.0),
    "Megatron": (699.0, 162.0, 207.0, 119.0, 344.0, 566.0),
}
"""Seconds. Colocated: step, generation, whole rollout phase, old log-probabilities, update. Then the step of
one-step-off training."""


def one_step_off() -> Study:
    """Qwen2.5-Math-7B on 16 H20: all 16 alternate between phases, or 4 generate while 12 train, one step off."""
    cells = []
    for name, (colocated_s, generation_s, rollout_s, logprobs_s, update_s, measured_s) in ONE_STEP_OFF.items():
        cap = 20_480 if name == "FSDP2" else 8192
        (step_s,) = fit_parameters((0.01,), partial(_compute_generation_errors, cap=cap, generation_s=generation_s))
        train_s = (logprobs_s + update_s) * 16 / 12 + colocated_s - rollout_s - logprobs_s - update_s
        predicted_s = _simulate_one_step_off(4, step_s, cap=cap, ahead=1, train_s=train_s)
        cells.append(
            Cell(f"{name}, 4 : 12", "s per step", measured_s, predicted_s, tolerance=0.15, baseline=colocated_s / 2)
        )
    return Study(
        "One step off (Qwen2.5-Math-7B, 16 H20)",
        "https://github.com/verl-project/verl, docs/advance/one_step_off.md",
        [
            "Calibrated on the colocated row alone: the engine's speed from the generation time; training on 12 of 16 "
            "devices takes 16 / 12 of its time; the rest of the step does not change.",
            "Batch size, lengths and engines are not in the source: 64 groups of 16, one engine per device, lognormal "
            "with mean 2,500 and sigma 1.1. Baseline: half of the colocated step, since no line fits a single row.",
        ],
        cells,
    )


def _simulate_one_step_off(servers: int, step_s: float, *, cap: int, ahead: int, train_s: float) -> float:
    """Simulate `servers` engines, of which `ahead` batches may be generated early. Returns the seconds per step."""
    settings = make_settings(
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
    return run_simulation(settings, timings).step_s


def _compute_generation_errors(speeds: Sequence[float], *, cap: int, generation_s: float) -> list[float]:
    """Return the relative error of the generation time of 16 engines.

    The simulated step has 1 s of training and 0.3 s of weight transfer in addition.
    """
    step_s = _simulate_one_step_off(16, speeds[0], cap=cap, ahead=0, train_s=1.0)
    return [(step_s - 1.3) / generation_s - 1]


# (C, B, q, rho, tail), measured staleness, prediction of the source's own formula
APPLIED_COMPUTE = [
    ((120, 240, 2, 0.63, 1.42), 1.26, 1.34),
    ((240, 120, 2, 0.92, 1.43), 3.59, 3.86),
    ((128, 128, 2, 1.07, 1.44), 3.09, 3.29),
    ((240, 120, 1, 0.86, 1.42), 3.40, 3.34),
    ((120, 120, 1, 0.67, 1.42), 1.92, 1.95),
    ((128, 128, 1, 1.14, 1.45), 2.01, 2.24),
]


def applied_compute() -> Study:
    """Qwen3-8B with a queue that drops its oldest group: staleness only, since no times are published."""
    size = 8
    mean = 1000.0
    step_s = 0.01
    cells = []
    for (concurrency, batch, queue, ratio, longest), measured, formula in APPLIED_COMPUTE:
        groups = batch // size
        window = round(concurrency * longest / size) + queue * groups + groups
        settings = make_settings(
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
            lengths=LengthModel(kind="lognormal", mean=mean, sigma=_fit_sigma(longest, size)),
            engine=EngineTimings(step_s=step_s, request_s=0, prefill_s=0, call_s=0),
            trainer=TrainerTimings(base_s=batch * ratio * mean * step_s / concurrency, token_s=0, take_s=0),
            sync=SyncTimings(stall_s=0, transfer_s=0, load_s=0),
        )
        where = f"C = {concurrency}, B = {batch}, q = {queue}, rho = {ratio:g}"
        age = run_simulation(settings, timings).group_age
        cells.append(Cell(where, "staleness", measured, age, False, 0.4, absolute=True, baseline=formula))
    return Study(
        "Staleness of a queue that drops its oldest (Qwen3-8B)",
        "https://www.appliedcompute.com/research/staleness-in-fully-async-rl (2026-07-03)",
        [
            "Nothing is calibrated: concurrency C, batch B, queue q B, the ratio rho of the two speeds and the tail "
            "are the published ones. Groups of 8, because the source does not state it; slots are freed per sample.",
            "Groups beyond the queue are dropped when another is admitted. Baseline: the source's own formula.",
        ],
        cells,
    )


def _fit_sigma(longest: float, size: int) -> float:
    """Return the sigma of a lognormal whose longest of `size` samples is on average `longest` times the mean."""
    normals = np.random.default_rng(0).standard_normal((20_000, size))
    low = 0.01
    high = 2.0
    for _ in range(40):  # bisection: the ratio grows with sigma
        middle = (low + high) / 2
        if tail_ratio(np.exp(middle * normals)) < longest:
            low = middle
        else:
            high = middle
    return (low + high) / 2


AREAL = {0: 27_100.0, 4: 49_000.0, 8: 51_500.0, 16: 52_000.0}
"""Staleness bound -> tokens per second."""
AREAL_CALIBRATING = (0, 8)


def areal_table() -> Study:
    """R1-Distill-Qwen 1.5B, 8 GPUs, context 8K: throughput by staleness bound."""

    def compute_errors(speeds: Sequence[float]) -> list[float]:
        return [_simulate_areal(staleness, speeds) / AREAL[staleness] - 1 for staleness in AREAL_CALIBRATING]

    speeds = fit_parameters((0.003, 1 / 52_000), compute_errors)
    baseline = fit_baseline([(staleness, 1 / speed) for staleness, speed in AREAL.items()])
    cells = []
    for staleness, measured in AREAL.items():
        predicted = _simulate_areal(staleness, speeds)
        calibrates = staleness in AREAL_CALIBRATING
        where = f"eta = {staleness}"
        cells.append(Cell(where, "tokens/s", measured, predicted, calibrates, baseline=1 / baseline(staleness)))
    return Study(
        "Throughput by staleness bound (R1-Distill-Qwen 1.5B, 8 GPUs, 8K)",
        "AReaL, arXiv 2505.24298, table 7",
        [
            "Calibrated on eta = 0 and 8: one speed of the engine and one of the trainer.",
            "6 engines and 2 trainers (75 : 25); 64 groups of 16, 256 samples per engine, lognormal lengths of mean "
            "3,000 and sigma 0.8, cap 8,192: the source does not state them.",
        ],
        cells,
    )


def _simulate_areal(staleness: int, speeds: Sequence[float]) -> float:
    """Simulate a row. `speeds` are the seconds of an engine step and per trained token. Returns tokens/s."""
    step_s, token_s = speeds
    settings = make_settings(
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
    return run_simulation(settings, timings).tokens_per_s


MARIN = (48.79 / 20, 35.87 / 20, 147.4 / 20, 336.2 / 25, 68.06 / 20)
"""Seconds per update. Synchronous: weight sync, generation. Asynchronous: weight sync, total, and how much more than
synchronous."""


def marin_sync_bound() -> Study:
    """Qwen3-0.6B on 8 + 8 H100: weight sync takes longer than generation, and asynchronous training loses."""
    sync_s, _, async_sync_s, async_total_s, slowdown_s = MARIN
    learner_s = async_total_s - async_sync_s
    synchronous_s = _simulate_marin(0, sync_s, learner_s)
    asynchronous_s = _simulate_marin(1, async_sync_s, learner_s)
    total = Cell("asynchronous, age 1", "s per update", async_total_s, asynchronous_s, True, 0.15)
    slowdown = Cell(
        "asynchronous less synchronous",
        "s per update",
        slowdown_s,
        asynchronous_s - synchronous_s,
        tolerance=1.0,
        absolute=True,
        baseline=-synchronous_s / 2,
    )
    return Study(
        "A case in which asynchronous training loses (Qwen3-0.6B, 16 H100)",
        "https://github.com/marin-community/marin/issues/8936",
        [
            "Taken from the source: seconds of weight sync in both modes, of generation, and of the whole asynchronous "
            f"update, of which {learner_s:.1f} s are left for the learner. Both sides wait for weights.",
            "Predicted: by how much the asynchronous update is slower. Baseline: asynchronous takes half the time.",
        ],
        [total, slowdown],
    )


def _simulate_marin(staleness: int, stall_s: float, learner_s: float) -> float:
    """Simulate a mode with `stall_s` of weight sync and `learner_s` of training. Returns the seconds per update."""
    settings = make_settings(
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
    return run_simulation(settings, timings).step_s


STUDIES = (miles_grid, verl_fractions, one_step_off, applied_compute, areal_table, marin_sync_bound)
