"""The measurements of the trainer bench, in this order:

1. heats    every setting of the padded baseline once
2. final    the trainer's step, the fastest padded settings and the ceilings, alternating over several rounds
3. stream   the trainer's step with a slow producer, streamed and waiting for the whole batch, alternating
4. masks    the trainer's step with sampling masks and without, alternating; only with `truncated`
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

from async_grpo.config.model import RandomModelConfig
from async_grpo.errors import TrainingError
from async_grpo.lab.bench.measure import Measurement, Stopwatch, alternate_order
from async_grpo.lab.bench.sampling_masks import KEPT_TOKENS
from async_grpo.lab.bench.trainer.baselines import (
    USUAL_ROWS,
    Attention,
    BenchStep,
    PaddedSetting,
    one_by_one,
    padded_step,
    usual_step,
)
from async_grpo.lab.bench.trainer.setup import (
    STREAMED,
    TRUNCATED,
    WAITED,
    WHOLE,
    BatchShape,
    Contestant,
    TrainerSetup,
    lengths_of,
)
from trainer.batch.packing import assign_sequences

ReportProgress = Callable[[str], None]
"""Called with the name of each contestant after its turn."""
TOLERANCE = 1e-4
"""Largest difference of losses (absolute) and of gradient norms (relative)."""
TRAINER = "trainer"
ONE_BY_ONE = "one by one"
BY_HAND = "packed by hand"
USUAL = f"padded as in TRL: {USUAL_ROWS} rows, prompts at the left, logits of all completion positions, sdpa"
FULL_ROWS = "padded, as many rows as fit the same token budget"
BEST = "padded, the best"
SORTED = "padded, sorted by length"
ATTENTIONS: tuple[Attention, ...] = ("sdpa", "sdpa without mask", "eager")


@dataclass(frozen=True, slots=True)
class TrainerBenchPlan:
    """Model, batch and rounds of the bench."""

    model: RandomModelConfig
    mix: BatchShape
    room: int
    """Tokens of a micro-batch, padding included."""
    rounds: int
    usual: BatchShape
    """A batch of ordinary size, of which only the packing is measured."""

    @property
    def widest(self) -> int:
        """Positions of a row with the longest prompt and the longest completion."""
        return self.mix.prompt[1] + self.mix.longest

    @property
    def max_rows(self) -> int:
        """Rows of a padded micro-batch that always fits the same token budget, as a user would set it."""
        return max(2, self.room // self.widest)

    @property
    def row_counts(self) -> list[int]:
        """Numbers of rows to try. Fewer rows need less padding."""
        return sorted({2, min(4, self.max_rows), self.max_rows})


FULL = TrainerBenchPlan(
    RandomModelConfig(
        hidden_size=256, layers=8, heads=4, kv_heads=2, intermediate_size=704, vocab_size=8192, init_std=0.05
    ),
    BatchShape(groups=4),
    room=8192,
    rounds=5,
    usual=BatchShape(groups=128),
)
"""8 million parameters, a quarter of them in the output layer, as in Qwen2.5-0.5B."""
QUICK = TrainerBenchPlan(
    RandomModelConfig(hidden_size=64, layers=2, heads=2, kv_heads=1, intermediate_size=96, vocab_size=512),
    BatchShape(groups=4, group_size=2, prompt=(5, 20), median=12, longest=60),
    room=256,
    rounds=1,
    usual=BatchShape(groups=16, group_size=2, prompt=(5, 20), median=12, longest=60),
)


def measure(
    setup: TrainerSetup, plan: TrainerBenchPlan, report_progress: ReportProgress, *, truncated: bool = False
) -> list[Measurement]:
    """Run the bench. `report_progress` is called with `total N`, then after every round.

    Raises TrainingError if two steps differ in loss or gradient norm.
    """
    counts = plan.row_counts
    contestants = 7 + 2 + (2 if truncated else 0)
    report_progress(f"total {1 + len(counts) * (len(ATTENTIONS) + 1) + plan.rounds * contestants}")
    finalists = _run_heats(setup, plan, report_progress)
    setup.phases.reset()  # without the heats
    final = take_turns(
        {
            TRAINER: setup.run_trainer_step,
            USUAL: setup.plain_contestant(usual_step),
            **{name: setup.plain_contestant(partial(padded_step, setting)) for name, setting in finalists.items()},
            ONE_BY_ONE: setup.plain_contestant(one_by_one),
            BY_HAND: setup.run_packed_by_hand,
        },
        plan.rounds,
        report_progress,
    )
    compute_s = median(final[TRAINER].seconds)
    stream = take_turns(setup.streaming_contestants(compute_s), plan.rounds, report_progress)
    masks = []
    if truncated:
        masks.append(_mask_measurement(setup, plan.rounds, report_progress))
    return [
        *_speed_measurements(setup, final, finalists),
        *_packing_measurements(plan, final),
        *_phase_measurements(setup, final[TRAINER]),
        _streaming_measurement(stream, compute_s),
        *masks,
    ]


@dataclass(slots=True)
class Timed:
    """The rounds of one contestant."""

    step: BenchStep
    """Result of the last round."""
    seconds: list[float] = field(default_factory=list)
    """Wall-clock seconds per round."""
    cpu_s: list[float] = field(default_factory=list)
    """CPU seconds of all threads per round. More reliable than the clock on a busy machine."""


def take_turns(
    contestants: Mapping[str, Contestant], rounds: int, report_progress: ReportProgress, *, same_step: bool = True
) -> dict[str, Timed]:
    """Run all contestants `rounds` times, in alternating order.

    Raises TrainingError if their losses or gradient norms differ, unless they are not the `same_step`.
    """
    results: dict[str, Timed] = {}
    for names in alternate_order(contestants, rounds):
        for name in names:
            with Stopwatch() as spent, Stopwatch(time.process_time) as cpu:
                step = contestants[name]()
            timed = results.setdefault(name, Timed(step))
            timed.seconds.append(spent.seconds)
            timed.cpu_s.append(cpu.seconds)
            timed.step = step
            report_progress(name)
    if same_step:
        _check_same_step(results)
    return results


def _check_same_step(results: Mapping[str, Timed]) -> None:
    """Raise TrainingError unless all contestants have the same loss and gradient norm."""
    first_name, first_timed = next(iter(results.items()))
    first = first_timed.step
    for name, timed in results.items():
        step = timed.step
        loss_difference = abs(step.loss - first.loss)
        norm_difference = abs(step.grad_norm / first.grad_norm - 1)
        if not (loss_difference <= TOLERANCE and norm_difference <= TOLERANCE):  # also if one is NaN
            raise TrainingError(
                f"{name} has a loss of {step.loss:.6g} and a gradient norm of {step.grad_norm:.6g}, {first_name} has "
                f"{first.loss:.6g} and {first.grad_norm:.6g}: they do not do the same work, so their speeds are not "
                "comparable"
            )


def _run_heats(
    setup: TrainerSetup, plan: TrainerBenchPlan, report_progress: ReportProgress
) -> dict[str, PaddedSetting]:
    """Return the settings with the least CPU time: of all, of those with the most rows, of those sorted by length.

    A busy machine disturbs CPU time less than the clock.
    """
    counts = plan.row_counts
    settings = [PaddedSetting(rows, attention) for rows in counts for attention in ATTENTIONS]
    results = take_turns({TRAINER: setup.run_trainer_step, **_padded_contestants(setup, settings)}, 1, report_progress)
    best = _find_fastest(settings, results)
    full = _find_fastest([setting for setting in settings if setting.rows == counts[-1]], results)

    sorted_settings = [PaddedSetting(rows, best.attention, by_length=True) for rows in counts]
    sorted_results = take_turns(_padded_contestants(setup, sorted_settings), 1, report_progress)
    return {FULL_ROWS: full, BEST: best, SORTED: _find_fastest(sorted_settings, sorted_results)}


def _padded_contestants(setup: TrainerSetup, settings: Sequence[PaddedSetting]) -> dict[str, Contestant]:
    return {str(setting): setup.plain_contestant(partial(padded_step, setting)) for setting in settings}


def _find_fastest(settings: Sequence[PaddedSetting], results: Mapping[str, Timed]) -> PaddedSetting:
    return min(settings, key=lambda setting: results[str(setting)].cpu_s)


def _speed_measurements(
    setup: TrainerSetup, final: Mapping[str, Timed], finalists: Mapping[str, PaddedSetting]
) -> list[Measurement]:
    """Return tokens of sequences per second (padding does not count) and CPU time, compared with each baseline."""
    tokens = sum(sequence.length for sequence in setup.split_batch())
    trainer = final[TRAINER]
    padded = {USUAL: USUAL}
    for name, setting in finalists.items():
        padded[name] = f"{name}: {setting}"
    by_hand = {BY_HAND: "plain PyTorch, packed by hand, no optimizer"}
    unpadded = {ONE_BY_ONE: "plain PyTorch, unpadded, one by one, no optimizer", **by_hand}

    measurements = []
    for name, description in (padded | unpadded).items():
        pairs = zip(trainer.seconds, final[name].seconds, strict=True)
        speeds = [(tokens / ours, tokens / theirs) for ours, theirs in pairs]
        measurements.append(Measurement.paired("training step", "tokens/s", speeds, description))
    for name, description in (padded | by_hand).items():
        pairs = zip(trainer.cpu_s, final[name].cpu_s, strict=True)
        costs = [(1e6 * ours / tokens, 1e6 * theirs / tokens) for ours, theirs in pairs]
        measurements.append(Measurement.paired("processor time", "us/token", costs, description))
    return [
        *measurements,
        Measurement("loss", trainer.step.loss, "", final[BEST].step.loss, "padded"),
        Measurement("gradient norm", trainer.step.grad_norm, "", final[BEST].step.grad_norm, "padded"),
        Measurement("tokens of the batch", tokens, "tokens"),
        Measurement("parameters", setup.plain.parameters, "parameters"),
    ]


def _packing_measurements(plan: TrainerBenchPlan, final: Mapping[str, Timed]) -> list[Measurement]:
    """Return the packing efficiency of the trained batch and of a batch of ordinary size."""
    rows = plan.max_rows
    lengths = lengths_of(plan.usual, plan.model.vocab_size)
    (packing,) = assign_sequences(lengths, ranks=1, max_tokens=plan.room)
    padded_positions = 0
    for start in range(0, len(lengths), rows):
        micro_batch = lengths[start : start + rows]
        padded_positions += len(micro_batch) * max(micro_batch)

    usual = f"{plan.usual.groups} groups of {plan.usual.group_size}"
    efficiencies = {
        "the batch": (final[TRAINER].step.efficiency, final[FULL_ROWS].step.efficiency),
        usual: (sum(lengths) / (len(packing) * plan.room), sum(lengths) / padded_positions),
    }
    baseline = f"padded to the longest of {rows} rows"
    return [
        Measurement(f"packing efficiency, {batch}", packed, "", padded, baseline, packed / padded)
        for batch, (packed, padded) in efficiencies.items()
    ]


def _phase_measurements(setup: TrainerSetup, trainer: Timed) -> list[Measurement]:
    """Return the mean seconds per step of each phase."""
    return [
        Measurement(f"of a step: {name}", seconds / len(trainer.seconds), "s")
        for name, seconds in setup.phases.seconds.items()
    ]


def _streaming_measurement(stream: Mapping[str, Timed], compute_s: float) -> Measurement:
    """Return the time from the start of generation until the new weights exist."""
    pairs = zip(stream[STREAMED].seconds, stream[WAITED].seconds, strict=True)
    name = f"step with a producer that takes {compute_s:.2g} s: streamed"
    return Measurement.paired(name, "s", pairs, "waits for the whole batch")


def _mask_measurement(setup: TrainerSetup, rounds: int, report_progress: ReportProgress) -> Measurement:
    """Return the speed of a step that normalises over kept tokens, compared with the whole vocabulary."""
    contestants = setup.truncated_contestants()
    contestants[TRUNCATED]()  # warm up: its operators have not run yet
    timed = take_turns(contestants, rounds, report_progress, same_step=False)
    tokens = sum(sequence.length for sequence in setup.split_batch())
    pairs = zip(timed[TRUNCATED].seconds, timed[WHOLE].seconds, strict=True)
    speeds = [(tokens / truncated, tokens / whole) for truncated, whole in pairs]
    return Measurement.paired(f"training step with sampling masks of {KEPT_TOKENS} tokens", "tokens/s", speeds, WHOLE)
