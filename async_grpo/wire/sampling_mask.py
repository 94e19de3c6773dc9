"""The tokens that truncated sampling (top-k, top-p, min-p) could choose from, position by position.

    token_ids  [ 7 9 4 | 7 | 3 5 ]     counts  [ 3 1 2 ]        3 positions of a completion

An engine that truncates samples from softmax(logits / T) restricted to the tokens it keeps. The trainer needs the same
set to compute log-probabilities of the same distribution: without it, every importance weight is off by the mass that
truncation removed (DeepSeek-V3.2, arXiv 2512.02556, section 3.1, "Keep Sampling Mask").

Positions written by the environment (observations of a tool) were not sampled and have count 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

ID_DTYPE = np.dtype("<i4")
COUNT_DTYPE = np.dtype("<u2")
PADDING = -1
"""Token id in the cells of `pad_rows` that hold no token."""


@dataclass(frozen=True, slots=True)
class SamplingMask:
    """The kept tokens of n consecutive positions, as rows of different lengths (CSR)."""

    token_ids: npt.NDArray[np.int32]
    """Token ids of all rows, end to end; int32 [sum of counts]."""
    counts: npt.NDArray[np.uint16]
    """Number of kept tokens per position; uint16 [n]."""

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self.token_ids.nbytes + self.counts.nbytes

    @classmethod
    def from_bytes(cls, token_ids: bytes, counts: bytes) -> SamplingMask:
        """Read the two fields of a record; views, no copies."""
        return cls(np.frombuffer(token_ids, ID_DTYPE), np.frombuffer(counts, COUNT_DTYPE))

    @classmethod
    def without_tokens(cls, positions: int) -> SamplingMask:
        """Rows for positions that were not sampled."""
        return cls(np.empty(0, ID_DTYPE), np.zeros(positions, COUNT_DTYPE))

    def slice_rows(self, start: int, end: int) -> SamplingMask:
        """The rows of positions [start, end)."""
        offsets = self._offsets()
        return SamplingMask(self.token_ids[offsets[start] : offsets[end]], self.counts[start:end])

    def pad_rows(self, positions_N: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Kept tokens of these positions as int32 [N, W], where W is the longest row; PADDING behind shorter rows.

        >>> mask = SamplingMask(np.array([7, 9, 4, 7], ID_DTYPE), np.array([3, 1], COUNT_DTYPE))
        >>> mask.pad_rows(np.array([1, 0])).tolist()
        [[7, -1, -1], [7, 9, 4]]
        """
        counts_N = self.counts[positions_N].astype(np.int64)
        width = int(counts_N.max(initial=0))
        if width == 0:
            return np.empty((len(positions_N), 0), ID_DTYPE)

        columns_W = np.arange(width)
        indices_NW = self._offsets()[positions_N][:, None] + columns_W
        # Cells behind the last row point past the end of `token_ids`; they are overwritten with PADDING below.
        rows_NW = self.token_ids[np.minimum(indices_NW, len(self.token_ids) - 1)]
        return np.where(columns_W < counts_N[:, None], rows_NW, PADDING).astype(ID_DTYPE)

    def find_row_without(self, tokens: npt.NDArray[np.int32]) -> int | None:
        """The first position with a non-empty row that does not contain the sampled token; None if there is none."""
        rows_K = np.repeat(np.arange(len(self.counts)), self.counts)
        contains = np.zeros(len(self.counts), np.bool_)
        contains[rows_K[self.token_ids == tokens[rows_K]]] = True
        missing = np.flatnonzero(~contains & (self.counts > 0))
        return int(missing[0]) if len(missing) else None

    def _offsets(self) -> npt.NDArray[np.int64]:
        return np.concatenate([[0], np.cumsum(self.counts, dtype=np.int64)])


def join_masks(masks: Sequence[SamplingMask]) -> SamplingMask:
    """The rows of all masks, in their order."""
    return SamplingMask(
        np.concatenate([np.empty(0, ID_DTYPE), *(mask.token_ids for mask in masks)]),
        np.concatenate([np.empty(0, COUNT_DTYPE), *(mask.counts for mask in masks)]),
    )


def first_occurrences(tokens: npt.NDArray[np.int32], token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Index in `tokens` at which each of `token_ids` occurs first; len(tokens) where it does not occur.

    A repetition penalty applies to every token that occurs before the position that is sampled, so comparing this index
    with the position tells which logits were penalised.

    >>> first_occurrences(np.array([5, 3, 5], ID_DTYPE), np.array([[3, 5], [8, -1]], ID_DTYPE)).tolist()
    [[1, 0], [3, 3]]
    """
    unique, first = np.unique(tokens, return_index=True)
    index = np.searchsorted(unique, token_ids)
    clipped = np.minimum(index, len(unique) - 1)
    return np.where(unique[clipped] == token_ids, first[clipped], len(tokens))
