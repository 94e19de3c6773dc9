"""Sampling masks from vLLM's log-probabilities: the same request and output from 0.23 to 0.32, on every platform.

    SamplingParams(top_k=k, top_p, min_p, repetition_penalty, logprobs=k + TIE_MARGIN)
        --sampler, logprobs_mode processed_logprobs--> per position: the sampled token, then the most likely ones
        --read_sampling_mask--> SamplingMask, log-probabilities of the sampled tokens

Truncation sets the logits of removed tokens to -inf, and `processed_logprobs` are taken after it. So the tokens with a
finite log-probability are exactly the kept ones, as far as they were reported.

Top-k keeps every token that ties with the k-th, so more than k can be kept; bfloat16 logits, which have steps of 1/16
between 8 and 16, make such ties common. TIE_MARGIN more tokens are requested. If even more tie, the reported ones are
still a set that contains the sampled token, and given that it does, the token was sampled from the distribution
restricted to this set. Its log-probability is therefore renormalised over the reported tokens, and stays exact.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from async_grpo.wire.sampling_mask import COUNT_DTYPE, ID_DTYPE, SamplingMask
from rollout_server.engines.base import Truncation

TIE_MARGIN = 16
MASS_TOLERANCE = 1e-4
"""Distance of the reported probabilities from 1 that float32 rounding explains; a set with less mass is incomplete."""


def reported_logprobs(truncation: Truncation, vocabulary: int | None) -> int:
    """Number of log-probabilities to request per token. More than the vocabulary has would end vLLM's engine."""
    wanted = truncation.top_k + TIE_MARGIN
    return wanted if vocabulary is None else min(wanted, vocabulary)


class FlatLogprobs(Protocol):
    """vLLM's flat log-probabilities of consecutive positions. The sampled token comes first in each, and appears again
    among the most likely ones if it is one of them."""

    start_indices: list[int]
    end_indices: list[int]
    token_ids: list[int]
    logprobs: list[float]


def read_sampling_mask(reported: FlatLogprobs) -> tuple[SamplingMask, npt.NDArray[np.float32]]:
    """Return the kept tokens of each position, and the log-probabilities of the sampled tokens, float32 [n]."""
    starts_N = np.asarray(reported.start_indices, np.int64)
    lengths_N = np.asarray(reported.end_indices, np.int64) - starts_N
    positions = len(starts_N)
    if positions == 0:
        return SamplingMask.without_tokens(0), np.empty(0, np.float32)

    # The flat lists may hold more positions than these, when they are a slice: rows are copied in order.
    rows_K = np.repeat(np.arange(positions), lengths_N)
    first_K = np.zeros(len(rows_K), np.bool_)
    first_K[np.concatenate([[0], np.cumsum(lengths_N)[:-1]])] = True
    offset = int(starts_N[0])
    ids_K = np.asarray(reported.token_ids[offset : offset + len(rows_K)], ID_DTYPE)
    logprobs_K = np.asarray(reported.logprobs[offset : offset + len(rows_K)], np.float32)

    sampled_N = ids_K[first_K]
    logprobs_N = logprobs_K[first_K].copy()
    is_repeated_K = ~first_K & (ids_K == sampled_N[rows_K])
    is_kept_K = np.isfinite(logprobs_K) & ~is_repeated_K

    mass_N = np.bincount(rows_K, np.exp(logprobs_K, where=is_kept_K, out=np.zeros_like(logprobs_K)), positions)
    is_incomplete_N = mass_N < 1 - MASS_TOLERANCE
    logprobs_N[is_incomplete_N] -= np.log(mass_N[is_incomplete_N]).astype(np.float32)

    counts_N = np.bincount(rows_K[is_kept_K], minlength=positions).astype(COUNT_DTYPE)
    return SamplingMask(ids_K[is_kept_K], counts_N), logprobs_N
