"""What is measured, in which order, and the figures that follow.

1. heats    every setting of the padded baseline once
2. final    the trainer's step, the fastest padded settings and the ceilings in turns, several rounds
3. stream   the trainer's step with a slow producer, streamed and waited for, in turns
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

from async_grpo.config.model import RandomModelConfig
from async_grpo.errors import TrainingError
from async_grpo.lab.bench.measure import Measurement, Stopwatch, alternate_order
from async_grpo.lab.bench.trainer.baselines import (
    USUAL_ROWS,
    Attention,
    BenchStep,
    PaddedSetting,
    one_by_one,
    padded_step,
    usual_step,
)
from async_grpo.lab.bench.trainer.setup import STREAMED, WAITED, BatchShape, Contestant, TrainerSetup, lengths_of
from trainer.batch.packing import assign_sequences

Say = Callable[[str], None]
"""Gets the name of each contestant when its turn is done."""
TOLERANCE = 1e-4
"""Largest difference of losses (absolute) and of gradient norms (relative)."""
TRAINER, ONE_BY_ONE, BY_HAND = "trainer", "one by one", "packed by hand"
USUAL = f"padded as in TRL: {USUAL_ROWS} rows, prompts at the left, logits of all completion positions, sdpa"
FULL_ROWS, BEST, SORTED = "padded, as many rows as fit the same room", "padded, the best", "padded, sorted by length"
ATTENTIONS: tuple[Attention, ...] = ("sdpa", "sdpa without mask", "eager")


@dataclass(frozen=True, slots=True)
class TrainerBenchPlan:
    """How much is measured, with which model and batch."""

    model: RandomModelConfig
    mix: BatchShape
    room: int
    """Tokens of a micro-batch, padding included."""
    rounds: int
    usual: BatchShape
    """A batch of the usual size, whose packing alone is measured."""

    @property
    def widest(self) -> int:
        """Positions of a row of the longest prompt and the longest completion."""
        return self.mix.prompt[1] + self.mix.longest

    @property
    def most_rows(self) -> int:
        """Rows of a padded micro-batch that always fits the same room, which is what one would set."""
        return max(2, self.room // self.widest)

    @property
    def row_counts(self) -> list[int]:
        """Rows of a padded micro-batch that are tried: few, with less padding, up to the most."""
        return sorted({2, min(4, self.most_rows), self.most_rows})


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


def measure(setup: TrainerSetup, plan: TrainerBenchPlan, say: Say) -> list[Measurement]:
    """All figures; `say` gets `total N`, and then a line a round. Raises TrainingError if two steps do not come to the
    same loss and gradient."""
    counts = plan.row_counts
    say(f"total {1 + len(counts) * (len(ATTENTIONS) + 1) + plan.rounds * (7 + 2)}")
    finalists = _heats(setup, plan, say)
    setup.phases.reset()
    final = take_turns(
        {
            TRAINER: setup.trainer,
            USUAL: setup.plainly(usual_step),
            **{name: setup.plainly(partial(padded_step, setting)) for name, setting in finalists.items()},
            ONE_BY_ONE: setup.plainly(one_by_one),
            BY_HAND: setup.packed_by_hand,
        },
        plan.rounds,
        say,
    )
    compute_s = median(final[TRAINER].seconds)
    stream = take_turns(setup.streaming(compute_s), plan.rounds, say)
    return [
        *_speeds(setup, plan, final, finalists),
        *_packing(plan, final),
        *_phases(setup, final[TRAINER]),
        _streaming(stream, compute_s),
    ]


@dataclass(slots=True)
class Timed:
    """The rounds of one contestant: seconds on the clock, CPU seconds; `done` is the last step."""

    done: BenchStep
    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    """CPU seconds of all threads. On a busy machine they say more than the clock."""


def take_turns(contestants: Mapping[str, Contestant], rounds: int, say: Say) -> dict[str, Timed]:
    """Run all contestants `rounds` times, in alternating order.

    Raises TrainingError if their losses or gradient norms differ.
    """
    found: dict[str, Timed] = {}
    for names in alternate_order(contestants, rounds):
        for name in names:
            with Stopwatch() as spent, Stopwatch(time.process_time) as cpu:
                done = contestants[name]()
            timed = found.setdefault(name, Timed(done))
            timed.seconds.append(spent.seconds)
            timed.cpu_s.append(cpu.seconds)
            timed.done = done
            say(name)
    _check(found)
    return found


def _check(found: Mapping[str, Timed]) -> None:
    first_name, first = next(iter(found.items()))
    for name, timed in found.items():
        loss, norm = timed.done.loss - first.done.loss, timed.done.grad_norm / first.done.grad_norm - 1
        if not (abs(loss) <= TOLERANCE and abs(norm) <= TOLERANCE):  # neither if one is nan
            raise TrainingError(
                f"{name} comes to a loss of {timed.done.loss:.6g} and a gradient norm of {timed.done.grad_norm:.6g}, "
                f"{first_name} to {first.done.loss:.6g} and {first.done.grad_norm:.6g}: they would not do the same "
                "work, and their speeds would not compare"
            )


def _heats(setup: TrainerSetup, plan: TrainerBenchPlan, say: Say) -> dict[str, PaddedSetting]:
    """The settings of least processor time: of all, of those with the most rows, of those sorted by length.

    A busy machine disturbs it less than the clock.
    """

    def contestants(settings: Sequence[PaddedSetting]) -> dict[str, Contestant]:
        return {str(setting): setup.plainly(partial(padded_step, setting)) for setting in settings}

    def least(settings: Iterable[PaddedSetting]) -> PaddedSetting:
        return min(settings, key=lambda setting: found[str(setting)].cpu_s)

    counts = plan.row_counts
    tried = [PaddedSetting(rows, attention) for rows in counts for attention in ATTENTIONS]
    found = take_turns({TRAINER: setup.trainer, **contestants(tried)}, 1, say)
    best, full = least(tried), least(setting for setting in tried if setting.rows == counts[-1])
    by_length = [PaddedSetting(rows, best.attention, by_length=True) for rows in counts]
    found |= take_turns(contestants(by_length), 1, say)
    return {FULL_ROWS: full, BEST: best, SORTED: least(by_length)}


def _speeds(
    setup: TrainerSetup, plan: TrainerBenchPlan, final: Mapping[str, Timed], finalists: Mapping[str, PaddedSetting]
) -> list[Measurement]:
    """Tokens of sequences a second, padding not counted."""
    tokens = sum(member.length for member in setup.members())
    mine, by_hand = final[TRAINER], "plain PyTorch, packed by hand, no optimizer"
    padded = {USUAL: USUAL, **{name: f"{name}: {setting}" for name, setting in finalists.items()}}
    unpadded = {ONE_BY_ONE: "plain PyTorch, unpadded, one by one, no optimizer", BY_HAND: by_hand}

    def speed_beside(name: str, what: str) -> Measurement:
        pairs = zip(mine.seconds, final[name].seconds, strict=True)
        return Measurement.paired("training step", "tokens/s", [(tokens / a, tokens / b) for a, b in pairs], what)

    def work_beside(name: str, what: str) -> Measurement:
        pairs = zip(mine.cpu_s, final[name].cpu_s, strict=True)
        each = [(1e6 * a / tokens, 1e6 * b / tokens) for a, b in pairs]
        return Measurement.paired("processor time", "us/token", each, what)

    return [
        *(speed_beside(name, what) for name, what in (padded | unpadded).items()),
        *(work_beside(name, what) for name, what in (padded | {BY_HAND: by_hand}).items()),
        Measurement("loss", mine.done.loss, "", final[BEST].done.loss, "padded"),
        Measurement("gradient norm", mine.done.grad_norm, "", final[BEST].done.grad_norm, "padded"),
        Measurement("tokens of the batch", tokens, "tokens"),
        Measurement("parameters", setup.plain.parameters, "parameters"),
    ]


def _packing(plan: TrainerBenchPlan, final: Mapping[str, Timed]) -> list[Measurement]:
    """Packing of the batch that was trained, and of one of the usual size."""
    name = f"padded to the longest of {plan.most_rows} rows"
    found = [("the batch", final[TRAINER].done.efficiency, final[FULL_ROWS].done.efficiency)]
    lengths = lengths_of(plan.usual, plan.model.vocab_size)
    (packing,) = assign_sequences(lengths, ranks=1, max_tokens=plan.room)
    rows = plan.most_rows
    cells = sum(len(part) * max(part) for part in (lengths[i : i + rows] for i in range(0, len(lengths), rows)))
    usual = f"{plan.usual.groups} groups of {plan.usual.group_size}"
    found.append((usual, sum(lengths) / (len(packing) * plan.room), sum(lengths) / cells))
    return [
        Measurement(f"packing efficiency, {what}", mine, "", other, name, mine / other) for what, mine, other in found
    ]


def _phases(setup: TrainerSetup, mine: Timed) -> list[Measurement]:
    """Mean seconds of a step."""
    return [
        Measurement(f"of a step: {name}", seconds / len(mine.seconds), "s")
        for name, seconds in setup.phases.seconds.items()
    ]


def _streaming(stream: Mapping[str, Timed], compute_s: float) -> Measurement:
    """Time until the new weights are there, from the moment at which generation began."""
    pairs = zip(stream[STREAMED].seconds, stream[WAITED].seconds, strict=True)
    name = f"step with a producer that takes {compute_s:.2g} s: streamed"
    return Measurement.paired(name, "s", pairs, "waits for the whole batch")
