"""What the rollout server needs of an inference engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from async_grpo.wire import VersionSpan

Interruption = Literal["keep", "recompute", "drain", "abort"]
"""What becomes of requests in flight when new weights come. keep: they go on with their KV cache. recompute: their
prefix is encoded again. drain: they finish first. abort: they end with what they have, unless they may not."""


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
    """A look at the engine: requests running and waiting, tokens made by `generate` and by `stream` since its
    start, and the share of the KV cache that requests in flight use (0 if unknown)."""

    running: int
    waiting: int
    generated_tokens: int
    kv_use: float = 0.0
    streamed_tokens: int = 0


class Sampler(Protocol):
    """Something that writes completions: an engine here, or a rollout server behind HTTP (`remote`)."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one completion; many calls run concurrently, the engine batches them.

        Cancelling the call aborts the request. Raises EngineError if the engine died.
        """
        ...

    def stream(self, request: GenerationRequest) -> AsyncGenerator[Generation, None]:
        """Sample one completion and hand it on piece by piece, for somebody who reads along.

        The pieces follow each other without gap; spans count from the start of their piece. The last has
        the finish reason (and perhaps no token), those before it "". Closing the generator aborts the
        request. An update with interruption `drain` waits for it, so it must be read without pause. Raises
        EngineError.
        """
        ...

    def peek(self, request_id: str) -> Generation | None:
        """What a request in flight has so far (finish reason ""); None if that is nothing. Cheap: no wait.

        Of a request that failed because the engine died, what it had.
        """
        ...


class Engine(Sampler, Protocol):
    """An engine that generates without pause and takes new weights in between."""

    async def start(self) -> None:
        """Load the model and be ready to generate. Raises EngineError."""
        ...

    async def update_weights(self, store: Path, *, epoch: int, version: int, interruption: Interruption) -> float:
        """Load `version` from the shared-memory store while requests are in flight; returns the
        seconds during which no token could be generated.

        Requests continue afterwards: tokens generated before keep their version, later ones get
        the new one. Raises EngineError; a failed update never leaves a mixture behind unnoticed.
        """
        ...

    @property
    def version(self) -> int:
        """Policy version that the next token will be sampled from (-1: the weights of the checkpoint)."""
        ...

    def load(self) -> EngineLoad:
        """Current load."""
        ...

    async def aclose(self) -> None:
        """Stop the engine and its processes."""
        ...
