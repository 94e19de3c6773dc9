"""Packing loses nothing, keeps its bounds, balances the ranks and always gives the same answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.errors import ConfigError
from trainer.batching import pack_batch

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=80)


@given(lengths=LENGTHS, ranks=st.integers(1, 4), max_tokens=st.integers(60, 300))
def test_every_sequence_is_in_exactly_one_micro_batch_within_the_budget(
    lengths: list[int], ranks: int, max_tokens: int
) -> None:
    packed = pack_batch(lengths, ranks=ranks, max_tokens=max_tokens)
    members = [index for rank in packed for bin_ in rank for index in bin_]
    assert sorted(members) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in bin_) <= max_tokens for rank in packed for bin_ in rank)


@given(lengths=LENGTHS, ranks=st.integers(1, 4))
def test_all_ranks_run_the_same_number_of_micro_batches(lengths: list[int], ranks: int) -> None:
    packed = pack_batch(lengths, ranks=ranks, max_tokens=100)
    assert len({len(rank) for rank in packed}) == 1


@given(lengths=LENGTHS, ranks=st.integers(1, 4))
def test_no_rank_has_more_than_a_sequence_over_the_emptiest(lengths: list[int], ranks: int) -> None:
    loads = [sum(lengths[i] for bin_ in rank for i in bin_) for rank in pack_batch(lengths, ranks=ranks, max_tokens=60)]
    assert max(loads) - min(loads) <= max(lengths)


@given(lengths=LENGTHS)
def test_the_same_lengths_are_packed_the_same_way(lengths: list[int]) -> None:
    assert pack_batch(lengths, ranks=2, max_tokens=100) == pack_batch(list(lengths), ranks=2, max_tokens=100)


def test_three_long_sequences_on_two_ranks_leave_one_micro_batch_empty() -> None:
    packed = pack_batch([100, 100, 100], ranks=2, max_tokens=100)
    assert sorted(len(bin_) for rank in packed for bin_ in rank) == [0, 1, 1, 1]


def test_a_sequence_that_cannot_fit_is_refused_with_the_fix() -> None:
    with pytest.raises(ConfigError, match=r"Raise trainer\.micro_batch_tokens to 101"):
        pack_batch([5, 101], ranks=1, max_tokens=100)
