"""An engine without a model, for tests and simulations.

Tokens come from a script, at a fixed rate on the asyncio clock; log-probabilities are a function of the tokens.
Versions, pauses, cancellation and engine death behave as in `VllmEngine`.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from async_grpo.errors import EngineError
from async_grpo.weights.base import HeldWeights
from async_grpo.weights.manifest import WeightVersion
from async_grpo.weights.source_reader import SourceReader
from async_grpo.wire.sampling_mask import SamplingMask
from rollout_server.engines.base import (
    CHECKPOINT_VERSION,
    EngineLoad,
    Generation,
    GenerationRequest,
    Interruption,
    SpanLog,
    UpdateTimes,
)

Script = Callable[[GenerationRequest], Sequence[int]]
"""Returns the completion of a request: `prefix` included, ending with the stop token."""


def hashed_script(length: int = 16, vocab_size: int = 1000) -> Script:
    """Return a script whose completions have `length` tokens and depend only on prompt and seed."""

    def script(request: GenerationRequest) -> list[int]:
        text = f"{list(request.prompt)} {request.seed}"
        return [zlib.crc32(f"{text} {position}".encode()) % vocab_size for position in range(length)]

    return script


def scripted_logprobs(tokens: Sequence[int] | npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """Log-probabilities that `ScriptedEngine` reports: float32 [n], -(1 + token mod 8) / 8."""
    return (-(1 + np.asarray(tokens, np.int64) % 8) / 8).astype(np.float32)


@dataclass
class ScriptedRequest:
    """A request in flight."""

    log: SpanLog
    interruptible: bool
    is_truncated: bool = False
    tokens: list[int] = field(default_factory=list)
    aborted: bool = False
    finish_reason: str = ""

    def generation(self, *, since: int = 0) -> Generation:
        """Return the tokens generated so far, from index `since` on."""
        tokens = np.asarray(self.tokens[since:], np.int32)
        spans = self.log.spans(len(self.tokens), since=since)
        # A script leaves one token to sample at each position.
        mask = SamplingMask(tokens, np.ones(len(tokens), np.uint16)) if self.is_truncated else None
        return Generation(tokens, scripted_logprobs(tokens), spans, self.finish_reason, mask)


class ScriptedEngine:
    """An `Engine` that gives every request `tokens_per_s` tokens per second, at any load."""

    def __init__(
        self,
        script: Script | None = None,
        *,
        tokens_per_s: float = 1000.0,
        chunk_tokens: int = 1,
        update_s: float = 0.0,
        reads_store: bool = False,
    ) -> None:
        """Create an engine that has not been started.

        chunk_tokens: tokens that arrive together, at the same rate. Larger chunks mean fewer wake-ups when one process
        runs many engines. update_s: seconds without tokens per update. reads_store: True to read the version from the
        weight store on each update, as a real engine does.
        """
        self.updates: list[tuple[WeightVersion, Interruption]] = []
        self._script = script or hashed_script()
        self._token_s = 1 / tokens_per_s
        self._chunk_tokens = chunk_tokens
        self._update_s = update_s
        self._reads_store = reads_store
        self._version = CHECKPOINT_VERSION
        self._in_flight: dict[str, ScriptedRequest] = {}
        self._failed: dict[str, ScriptedRequest] = {}
        """Requests that an engine failure ended; `peek` returns their tokens."""
        self._generated = 0
        self._streamed = 0
        self._failure: EngineError | None = EngineError("the engine was not started.")
        self._admits_requests = asyncio.Event()
        """Set while new requests may start."""
        self._generates = asyncio.Event()
        """Set while requests in flight may get tokens."""
        self._request_ended = asyncio.Event()

    async def start(self) -> None:
        """Get ready to generate."""
        self._failure = None
        self._generates.set()
        self._admits_requests.set()

    async def generate(self, request: GenerationRequest) -> Generation:
        """Return the script's completion after `prefix`, cut off by max_tokens ("length") or an update ("abort")."""
        counted = 0
        async with aclosing(self._run_request(request)) as progress:
            async for active in progress:
                self._generated += len(active.tokens) - counted
                counted = len(active.tokens)
        return active.generation()

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[Generation, None]:
        """Yield the same completion in chunks, and the finish reason after the last token."""
        yielded = 0
        async with aclosing(self._run_request(request)) as progress:
            async for active in progress:
                self._streamed += len(active.tokens) - yielded
                yield active.generation(since=yielded)
                yielded = len(active.tokens)

    async def _run_request(self, request: GenerationRequest) -> AsyncGenerator[ScriptedRequest, None]:
        """Yield the request after each chunk, and once more when it has its finish reason."""
        await self._admits_requests.wait()
        remaining = self._script(request)[len(request.prefix) :]
        count = min(len(remaining), request.max_tokens)
        active = ScriptedRequest(SpanLog(self._version), request.interruptible, request.truncation is not None)
        self._in_flight[request.request_id] = active

        try:
            for start in range(0, count, self._chunk_tokens):
                chunk = remaining[start : min(start + self._chunk_tokens, count)]
                await asyncio.sleep(self._token_s * len(chunk))
                await self._generates.wait()
                self._raise_failure()
                if active.aborted:
                    active.finish_reason = "abort"
                    break
                active.tokens.extend(chunk)
                yield active
            self._raise_failure()
        except EngineError:
            self._failed[request.request_id] = active
            raise
        finally:
            del self._in_flight[request.request_id]
            self._request_ended.set()

        if not active.finish_reason:
            active.finish_reason = "stop" if len(remaining) <= request.max_tokens else "length"
        yield active

    def peek(self, request_id: str) -> Generation | None:
        """Return the tokens so far of a request in flight, or of one that an engine failure ended."""
        request = self._in_flight.get(request_id) or self._failed.get(request_id)
        if request is None or not request.tokens:
            return None
        return request.generation()

    async def update_weights(self, weights: HeldWeights, *, interruption: Interruption) -> UpdateTimes:
        """Pause for `update_s` seconds, apply `interruption`, and continue with the new version."""
        self._raise_failure()
        self._admits_requests.clear()
        try:
            while interruption == "drain" and self._in_flight:
                self._request_ended.clear()
                await self._request_ended.wait()

            self._generates.clear()
            await asyncio.sleep(self._update_s)
            self._raise_failure()
            if self._reads_store:
                SourceReader().open(weights).verify()

            for active in self._in_flight.values():
                active.log.record_update(len(active.tokens), weights.version)
                active.aborted = interruption == "abort" and active.interruptible
            self._version = weights.version
            self.updates.append((weights.identity, interruption))
        finally:
            self._generates.set()
            self._admits_requests.set()
        return UpdateTimes(pause_s=self._update_s, load_s=self._update_s)

    async def sleep(self) -> None:
        """Stop giving tokens to all requests."""
        self._raise_failure()
        self._generates.clear()

    async def wake(self) -> None:
        """Continue all requests."""
        self._raise_failure()
        self._generates.set()

    async def vocabulary_logprobs(self, prompt: Sequence[int]) -> None:
        """Return None: a script has no distribution."""
        return None

    @property
    def description(self) -> str:
        """Fixed text: a script has no release."""
        return "a scripted engine"

    @property
    def note(self) -> str:
        """Always empty: the engine runs as configured."""
        return ""

    def fail(self, reason: str = "the engine died.") -> None:
        """Simulate the death of the engine: all current and future calls raise EngineError."""
        self._failure = EngineError(reason)

    @property
    def version(self) -> int:
        """Policy version of the next token."""
        return self._version

    def load(self) -> EngineLoad:
        """Return the load; every request in flight counts as running."""
        return EngineLoad(len(self._in_flight), 0, self._generated, streamed_tokens=self._streamed)

    async def aclose(self) -> None:
        """Close the engine; requests in flight fail."""
        self.fail("the engine was closed.")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
