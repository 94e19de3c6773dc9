"""What is measured, in which order, and the figures that follow.

1. heats    every setting of the padded baseline once
2. final    the trainer's step, the fastest padded settings and the ceilings in turns, several rounds
3. stream   the trainer's step with a slow producer, streamed and waited for, in turns
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

from async_grpo.app.bench.measure import Measurement
from async_grpo.app.bench.paired import Timed, cpu_ratio, in_turns, ratio
from async_grpo.app.bench.trainer.baselines import ROWS, Attention, PaddedSetting
from async_grpo.app.bench.trainer.setup import STREAMED, WAITED, BatchShape, TrainerSetup, lengths_of
from async_grpo.config.model import RandomModelConfig
from trainer.batch.packing import pack_batch

Say = Callable[[str], None]

TRAINER, ONE_BY_ONE, BY_HAND = "trainer", "one by one", "packed by hand"
USUAL = f"padded as in TRL: {ROWS} rows, prompts at the left, logits of all completion positions, sdpa"
FULL_ROWS, BEST, SORTED = "padded, as many rows as fit the same room", "padded, the best", "padded, sorted by length"
ATTENTIONS: tuple[Attention, ...] = ("sdpa", "sdpa without mask", "eager")


@dataclass(frozen=True, slots=True)
class TrainerBenchPlan:
    """How much is measured, on what."""

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
        """Rows of a padded micro-batch that surely fits the same room: what one would set."""
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
    final = in_turns(
        {
            TRAINER: setup.trainer,
            USUAL: setup.usual,
            **{name: setup.padded(setting) for name, setting in finalists.items()},
            ONE_BY_ONE: setup.one_by_one,
            BY_HAND: setup.packed_by_hand,
        },
        plan.rounds,
        say,
    )
    compute_s = median(final[TRAINER].seconds)
    stream = in_turns(setup.streaming(compute_s), plan.rounds, say)
    return [
        *_speeds(setup, plan, final, finalists),
        *_packing(plan, final),
        *_phases(setup, final[TRAINER]),
        _streaming(stream, compute_s),
    ]


def _heats(setup: TrainerSetup, plan: TrainerBenchPlan, say: Say) -> dict[str, PaddedSetting]:
    """The settings of least processor time: of all, of those with the most rows, of those sorted by length.

    A busy machine disturbs it less than the clock.
    """
    counts = plan.row_counts
    tried = [PaddedSetting(rows, attention) for rows in counts for attention in ATTENTIONS]
    found = in_turns({TRAINER: setup.trainer, **{str(s): setup.padded(s) for s in tried}}, 1, say)
    best = min(tried, key=lambda setting: found[str(setting)].cpu_s)
    full = min((s for s in tried if s.rows == counts[-1]), key=lambda setting: found[str(setting)].cpu_s)
    by_length = [PaddedSetting(rows, best.attention, by_length=True) for rows in counts]
    found = in_turns({str(s): setup.padded(s) for s in by_length}, 1, say)
    return {FULL_ROWS: full, BEST: best, SORTED: min(by_length, key=lambda setting: found[str(setting)].cpu_s)}


def _speeds(
    setup: TrainerSetup, plan: TrainerBenchPlan, final: Mapping[str, Timed], finalists: Mapping[str, PaddedSetting]
) -> list[Measurement]:
    """Tokens of sequences a second, padding not counted."""
    tokens = sum(member.length for member in setup.members())
    mine = final[TRAINER]

    def beside(name: str, what: str) -> Measurement:
        speed, other = tokens / median(mine.seconds), tokens / median(final[name].seconds)
        return Measurement("training step", speed, "tokens/s", other, what, ratio(mine, final[name]))

    def work_beside(name: str, what: str) -> Measurement:
        mean, other = 1e6 * median(mine.cpu_s) / tokens, 1e6 * median(final[name].cpu_s) / tokens
        return Measurement("processor time", mean, "us/token", other, what, cpu_ratio(mine, final[name]))

    named = {USUAL: USUAL, **{name: f"{name}: {setting}" for name, setting in finalists.items()}}
    return [
        *(beside(name, what) for name, what in named.items()),
        beside(ONE_BY_ONE, "plain PyTorch, unpadded, one by one, no optimizer"),
        beside(BY_HAND, "plain PyTorch, packed by hand, no optimizer"),
        *(work_beside(name, what) for name, what in named.items()),
        work_beside(BY_HAND, "plain PyTorch, packed by hand, no optimizer"),
        Measurement("loss", mine.done.loss, "", final[BEST].done.loss, "padded"),
        Measurement("gradient norm", mine.done.grad_norm, "", final[BEST].done.grad_norm, "padded"),
        Measurement("tokens of the batch", tokens, "tokens"),
        Measurement("parameters", setup.plain.parameters, "parameters"),
    ]


def _packing(plan: TrainerBenchPlan, final: Mapping[str, Timed]) -> list[Measurement]:
    """Of the batch that was trained, and of one of the usual size."""
    name = f"padded to the longest of {plan.most_rows} rows"
    found = [("the batch", final[TRAINER].done.efficiency, final[FULL_ROWS].done.efficiency)]
    lengths = lengths_of(plan.usual, plan.model.vocab_size)
    (packing,) = pack_batch(lengths, ranks=1, max_tokens=plan.room)
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
    early, late = stream[STREAMED], stream[WAITED]
    return Measurement(
        f"step with a producer that takes {compute_s:.2g} s: streamed",
        median(early.seconds),
        "s",
        median(late.seconds),
        "waits for the whole batch",
        ratio(late, early),
    )
