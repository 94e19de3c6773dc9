"""Sampling masks read from vLLM's own container of log-probabilities."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rollout_server.engines.vllm.sampling_masks import read_sampling_mask

vllm_logprobs = pytest.importorskip("vllm.logprobs")
MINUS_INFINITY = -math.inf


def reported(*positions: Sequence[tuple[int, float]]) -> Any:
    """Per position: the sampled token, then the most likely ones, as vLLM's output processor appends them."""
    flat = vllm_logprobs.FlatLogprobs()
    for position in positions:
        ids = [token for token, _ in position]
        logprobs = [logprob for _, logprob in position]
        vllm_logprobs.append_logprobs_for_next_position(
            flat, ids, logprobs, itertools.repeat(None), rank=1, num_logprobs=len(ids) - 1
        )
    return flat


def test_the_tokens_with_a_finite_logprob_are_kept_and_the_sampled_one_counts_once() -> None:
    half, quarter = math.log(0.5), math.log(0.25)
    flat = reported(
        [(4, quarter), (9, half), (4, quarter), (2, quarter), (7, MINUS_INFINITY)],
        [(3, 0.0), (3, 0.0), (1, MINUS_INFINITY), (0, MINUS_INFINITY), (2, MINUS_INFINITY)],
    )
    mask, logprobs = read_sampling_mask(flat)
    assert mask.counts.tolist() == [3, 1]
    assert sorted(mask.token_ids[:3].tolist()) == [2, 4, 9] and mask.token_ids[3] == 3
    np.testing.assert_array_equal(logprobs, np.array([quarter, 0.0], np.float32))


def test_a_sampled_token_that_was_not_among_the_reported_ones_belongs_to_its_set() -> None:
    tenth = math.log(0.1)
    mask, logprobs = read_sampling_mask(reported([(50, tenth), *((token, tenth) for token in range(6))]))
    assert sorted(mask.token_ids.tolist()) == [0, 1, 2, 3, 4, 5, 50]
    assert logprobs[0] == pytest.approx(math.log(1 / 7), abs=1e-6)  # more tokens tie than were reported


def test_a_slice_of_the_container_and_an_empty_one_are_read() -> None:
    flat = reported(*([(token, 0.0), (token, 0.0)] for token in range(5)))
    mask, logprobs = read_sampling_mask(flat[2:4])
    assert mask.token_ids.tolist() == [2, 3] and logprobs.tolist() == [0.0, 0.0]
    assert len(read_sampling_mask(flat[:0])[0]) == 0
