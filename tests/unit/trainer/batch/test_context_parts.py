"""Context-parallel ranks read every token once, and each token attends to exactly those before it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trainer.batch.context_parallel import padded_lengths, rank_positions, select_rank_tokens
from trainer.batch.layout import ContextRank, lay_out_sequences
from trainer.batch.sequences import TrainingSequence, make_micro_batch

LENGTHS = [5, 17, 1, 8, 30]


def sequence(length: int, first: int) -> TrainingSequence:
    """Every second token of the completion is trained."""
    prompt = max(1, length // 2)
    completion = length + 1 - prompt
    return TrainingSequence(
        tokens=np.arange(1000 * length, 1000 * length + length + 1, dtype=np.int32),
        prompt_tokens=prompt,
        behaviour_C=np.zeros(completion, np.float32),
        versions_C=np.zeros(completion, np.int32),
        positions_N=np.arange(0, completion, 2),
        advantages_N=np.ones(len(range(0, completion, 2))),
        weight=1.0,
        first_index=first,
        denominator_tokens=completion,
        group=0,
    )


def tokens_of(lengths: list[int], context: ContextRank) -> list[tuple[int, int]]:
    """(sequence, position) of every token that a rank has, in its order."""
    tokens = []
    for index, length in enumerate(lengths):
        tokens += [(index, position) for position in rank_positions(length, context).tolist()]
    return tokens


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_trained_token_belongs_to_exactly_one_rank(ranks: int) -> None:
    batch = make_micro_batch([sequence(length, 100 * i) for i, length in enumerate(LENGTHS)])
    parts = [select_rank_tokens(batch, ContextRank(rank, ranks)) for rank in range(ranks)]
    own = torch.cat([part.own_M for part in parts if part.own_M is not None])
    assert sorted(own.tolist()) == list(range(len(batch.trained_N)))
    read = {token for part in parts for token in part.tokens_1T[0].tolist()}
    assert read == set(batch.tokens_1T[0].tolist())
    assert len({part.tokens_1T.shape for part in parts}) == 1
    for part in parts:
        assert torch.equal(part.tokens_1T[0, part.trained_M], batch.tokens_1T[0, part.select_own(batch.trained_N)])


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_query_attends_to_its_own_sequence_up_to_itself(ranks: int) -> None:
    padded = padded_lengths(LENGTHS, ContextRank(ranks=ranks))
    token_of = [tokens_of(padded, ContextRank(rank, ranks)) for rank in range(ranks)]
    gathered = [token for tokens in token_of for token in tokens]
    for rank in range(ranks):
        segments = lay_out_sequences(padded, ContextRank(rank, ranks)).segments
        assert segments.keys_K is not None
        starts = zip([0, *segments.query_ends], [0, *segments.key_ends], strict=True)
        checked = 0
        for (first_query, first_key), query_end, key_end in zip(
            starts, segments.query_ends, segments.key_ends, strict=False
        ):
            keys = [gathered[key] for key in segments.keys_K[first_key:key_end].tolist()]
            for query in range(first_query, query_end):
                index, position = token_of[rank][query]
                attended = keys[: len(keys) - (query_end - 1 - query)]
                assert attended == [(index, before) for before in range(position + 1)]
                checked += 1
        assert checked == len(token_of[rank])
        assert segments.query_offsets.tolist() == [0, *segments.query_ends]
        assert segments.key_offsets.tolist() == [0, *segments.key_ends]


@pytest.mark.parametrize(("ranks", "scatter_ranks"), [(1, 1), (1, 3), (2, 1), (2, 4), (4, 3)])
def test_parts_can_be_cut_into_chunks_and_scattered(ranks: int, scatter_ranks: int) -> None:
    padded = padded_lengths(LENGTHS, ContextRank(ranks=ranks, scatter_ranks=scatter_ranks))
    assert all(after >= before for after, before in zip(padded, LENGTHS, strict=True))
    assert all(length % (2 * ranks) == 0 for length in padded) or ranks == 1
    assert sum(padded) // ranks % scatter_ranks == 0


def test_a_single_rank_reads_the_micro_batch_unchanged() -> None:
    batch = make_micro_batch([sequence(length, 100 * i) for i, length in enumerate(LENGTHS)])
    part = select_rank_tokens(batch, ContextRank())
    assert part.tokens_1T is batch.tokens_1T and part.packing is batch.packing and part.own_M is None
