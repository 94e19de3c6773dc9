"""Which policy version did each token come from?

Newer vLLM reports it (`CompletionOutput.weight_versions`). For older ones `SpanLog` derives it from
what is known at each update: once a pause has returned no token of the old weights is under way, so
tokens that a request has by then are old and the rest are new.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from async_grpo.wire import VersionSpan

CHECKPOINT_VERSION = -1
"""Version of the weights that the engine was started with, before its first update."""


class LabelledSpan(Protocol):
    """vLLM's WeightVersionSpan: tokens [start, end) were sampled from `version`."""

    version: str
    start: int
    end: int


def from_labels(labels: Sequence[LabelledSpan]) -> list[VersionSpan]:
    """vLLM's labels as spans; a label that is no number is the checkpoint's."""
    return [VersionSpan(_version(label.version), label.start, label.end) for label in labels]


class SpanLog:
    """Versions of one request's tokens, from the updates that happened while it was in flight."""

    def __init__(self, version: int) -> None:
        """`version`: of the weights when the request was submitted."""
        self._starts = [(0, version)]

    def update(self, tokens: int, version: int) -> None:
        """The request has `tokens` tokens; those that follow come from `version`."""
        self._starts.append((tokens, version))

    def spans(self, tokens: int, *, since: int = 0) -> list[VersionSpan]:
        """Spans that cover [since, tokens), counted from `since`; versions that contributed nothing are left out."""
        ends = [min(start, tokens) for start, _ in self._starts[1:]] + [tokens]
        return [
            VersionSpan(version, max(start, since) - since, end - since)
            for (start, version), end in zip(self._starts, ends, strict=True)
            if max(start, since) < end
        ]


def _version(label: str) -> int:
    return int(label) if label.lstrip("-").isdigit() else CHECKPOINT_VERSION
