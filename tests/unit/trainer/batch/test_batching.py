"""Packing loses no sequence, respects the token budget, balances the ranks and is deterministic."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.errors import ConfigError
from trainer.batch.packing import assign_sequences, cost, split_groups

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=80)


@given(lengths=LENGTHS, ranks=st.integers(1, 4), max_tokens=st.integers(60, 300), quadratic=st.floats(0.0, 0.1))
def test_every_sequence_is_in_one_micro_batch_within_the_budget_and_ranks_are_balanced(
    lengths: list[int], ranks: int, max_tokens: int, quadratic: float
) -> None:
    packed = assign_sequences(lengths, ranks=ranks, max_tokens=max_tokens, quadratic=quadratic)
    assert sorted(index for rank in packed for bin_ in rank for index in bin_) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in bin_) <= max_tokens for rank in packed for bin_ in rank)
    assert len({len(rank) for rank in packed}) == 1
    loads = [sum(cost(lengths[i], quadratic) for bin_ in rank for i in bin_) for rank in packed]
    assert max(loads) - min(loads) <= cost(max(lengths), quadratic) + 1e-6, "ranks differ by more than one sequence"
    assert packed == assign_sequences(list(lengths), ranks=ranks, max_tokens=max_tokens, quadratic=quadratic)


def test_three_long_sequences_on_two_ranks_leave_one_micro_batch_empty() -> None:
    packed = assign_sequences([100, 100, 100], ranks=2, max_tokens=100)
    assert sorted(len(bin_) for rank in packed for bin_ in rank) == [0, 1, 1, 1]


def test_a_sequence_that_cannot_fit_is_rejected_with_the_fix() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.micro_batch_tokens to 101"):
        assign_sequences([5, 101], ranks=1, max_tokens=100)


def test_with_attention_cost_a_long_sequence_costs_more_than_the_same_tokens_in_short_ones() -> None:
    lengths = [1000] + [100] * 10
    by_tokens = assign_sequences(lengths, ranks=2, max_tokens=2000)
    by_work = assign_sequences(lengths, ranks=2, max_tokens=2000, quadratic=1e-3)
    assert sorted(len(indices) for rank in by_tokens for indices in rank) == [1, 10]
    alone = next(rank for rank in by_work if any(0 in indices for indices in rank))
    assert alone == [[0]]
    assert cost(1000, 1e-3) > sum(cost(100, 1e-3) for _ in range(10))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("seed", range(5))
def test_micro_batches_of_lengths_like_gsm8k_are_full_and_ranks_are_balanced(ranks: int, seed: int) -> None:
    generator = random.Random(seed)
    prompts = [round(generator.lognormvariate(4.6, 0.35)) for _ in range(256)]
    lengths = [min(1500, prompt + round(generator.lognormvariate(5.2, 0.5))) for prompt in prompts for _ in range(8)]
    packed = assign_sequences(lengths, ranks=ranks, max_tokens=4096, quadratic=3e-5)
    loads = [sum(cost(lengths[i], 3e-5) for bin_ in rank for i in bin_) for rank in packed]
    assert sum(lengths) / (ranks * len(packed[0]) * 4096) >= 0.95
    assert sum(loads) / (ranks * max(loads)) >= 0.99


def test_sequences_that_do_not_fit_when_balanced_are_packed_tighter() -> None:
    assert len(assign_sequences([6, 5, 5, 4, 4, 3, 3], ranks=1, max_tokens=10)[0]) == 3


def test_a_batch_with_nothing_to_read_is_one_empty_micro_batch_per_rank() -> None:
    assert assign_sequences([], ranks=2, max_tokens=10) == [[[]], [[]]]


@given(groups=st.integers(1, 40), parts=st.integers(1, 8), seed=st.integers(0, 5))
def test_every_group_is_in_one_mini_batch_of_every_pass(groups: int, parts: int, seed: int) -> None:
    split = split_groups(groups, parts, seed=seed, version=3, iteration=1)
    assert sorted(group for part in split for group in part) == list(range(groups))
    assert max(map(len, split)) - min(map(len, split)) <= 1
    assert split == split_groups(groups, parts, seed=seed, version=3, iteration=1)


def test_every_pass_shuffles_the_groups_differently() -> None:
    splits = [split_groups(32, 4, seed=1, version=v, iteration=i) for v in range(3) for i in range(3)]
    assert len({str(split) for split in splits}) == len(splits)
