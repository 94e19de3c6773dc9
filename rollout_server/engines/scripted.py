"""An engine without a model, for tests and simulations of the machinery around it.

Tokens come from a script, one after another on the asyncio clock; log-probabilities follow from the
tokens. Versions, pauses, cancellation and death behave as in the real engine.
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
"""The completion of a request, `prefix` included, its last token being the stop token."""


def hashed_script(length: int = 16, vocab_size: int = 1000) -> Script:
    """Completions of `length` tokens that depend on prompt and seed only."""

    def script(request: GenerationRequest) -> list[int]:
        text = f"{list(request.prompt)} {request.seed}"
        return [zlib.crc32(f"{text} {position}".encode()) % vocab_size for position in range(length)]

    return script


def scripted_logprobs(tokens: Sequence[int] | npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """Log-probabilities that `ScriptedEngine` gives to tokens: float32 [n], -(1 + token mod 8) / 8."""
    return (-(1 + np.asarray(tokens, np.int64) % 8) / 8).astype(np.float32)


@dataclass
class ScriptedRequest:
    """One request under way."""

    log: SpanLog
    interruptible: bool
    tokens: list[int] = field(default_factory=list)
    aborted: bool = False
    reason: str = ""

    def generation(self, *, since: int = 0) -> Generation:
        """The completion so far, from token `since` on."""
        tokens = np.asarray(self.tokens[since:], np.int32)
        spans = self.log.spans(len(self.tokens), since=since)
        return Generation(tokens, scripted_logprobs(tokens), spans, self.reason)


class ScriptedEngine:
    """The `Engine` protocol; every request gets `tokens_per_s` tokens a second, at any load.

    `at_once` tokens come together, after the time of so many: fewer wake-ups for many engines in one process. An
    update takes `update_s` seconds, during which there are no tokens. With `reads_store` it reads the version from the
    weight store, as a real engine does.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        tokens_per_s: float = 1000.0,
        at_once: int = 1,
        update_s: float = 0.0,
        reads_store: bool = False,
    ) -> None:
        self.updates: list[tuple[WeightVersion, Interruption]] = []
        self._script = script or hashed_script()
        self._token_s = 1 / tokens_per_s
        self._at_once = at_once
        self._update_s = update_s
        self._reads_store = reads_store
        self._version = CHECKPOINT_VERSION
        self._active: dict[str, ScriptedRequest] = {}
        self._partials: dict[str, ScriptedRequest] = {}
        self._generated = 0
        self._streamed = 0
        self._failure: EngineError | None = EngineError("the engine was not started.")
        self._open = asyncio.Event()
        """Set while new requests may start."""
        self._gate = asyncio.Event()
        """Set while tokens may come."""
        self._finished = asyncio.Event()

    async def start(self) -> None:
        """Ready at once."""
        self._failure = None
        self._gate.set()
        self._open.set()

    async def generate(self, request: GenerationRequest) -> Generation:
        """The script's completion from after `prefix`, cut at max_tokens ("length") or by an update ("abort")."""
        counted = 0
        async with aclosing(self._submit(request)) as submission:
            async for active in submission:
                self._generated += len(active.tokens) - counted
                counted = len(active.tokens)
        return active.generation()

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[Generation, None]:
        """The same, piece by piece, and the finish reason after the last token."""
        passed_on = 0
        async with aclosing(self._submit(request)) as submission:
            async for active in submission:
                self._streamed += len(active.tokens) - passed_on
                yield active.generation(since=passed_on)
                passed_on = len(active.tokens)

    async def _submit(self, request: GenerationRequest) -> AsyncGenerator[ScriptedRequest, None]:
        """Yields the request after every piece, and once more when it has a finish reason."""
        await self._open.wait()
        rest = self._script(request)[len(request.prefix) :]
        wanted = min(len(rest), request.max_tokens)
        active = self._active[request.request_id] = ScriptedRequest(SpanLog(self._version), request.interruptible)
        try:
            for start in range(0, wanted, self._at_once):
                piece = rest[start : min(start + self._at_once, wanted)]
                await asyncio.sleep(self._token_s * len(piece))
                await self._gate.wait()
                self._raise_failure()
                if active.aborted:
                    active.reason = "abort"
                    break
                active.tokens.extend(piece)
                yield active
            self._raise_failure()
        except EngineError:
            self._partials[request.request_id] = active
            raise
        finally:
            del self._active[request.request_id]
            self._finished.set()
        active.reason = active.reason or ("stop" if len(rest) <= request.max_tokens else "length")
        yield active

    def peek(self, request_id: str) -> Generation | None:
        """The tokens so far."""
        active = self._active.get(request_id) or self._partials.get(request_id)
        return active.generation() if active is not None and active.tokens else None

    async def update_weights(self, weights: HeldWeights, *, interruption: Interruption) -> UpdateTimes:
        """Hold all requests for `update_s` (or let them finish, or end them), then go on with the new version."""
        self._raise_failure()
        version = weights.version
        self._open.clear()
        try:
            while interruption == "drain" and self._active:
                self._finished.clear()
                await self._finished.wait()
            self._gate.clear()
            await asyncio.sleep(self._update_s)
            self._raise_failure()
            if self._reads_store:
                SourceReader().open(weights).verify()
            for active in self._active.values():
                active.log.update(len(active.tokens), version)
                active.aborted = interruption == "abort" and active.interruptible
            self._version = version
            self.updates.append((weights.identity, interruption))
        finally:
            self._gate.set()
            self._open.set()
        return UpdateTimes(pause_s=self._update_s, load_s=self._update_s)

    async def sleep(self) -> None:
        """Hold all requests."""
        self._raise_failure()
        self._gate.clear()

    async def wake(self) -> None:
        """Let them go on."""
        self._raise_failure()
        self._gate.set()

    async def vocabulary_logprobs(self, prompt: Sequence[int]) -> None:
        """None: the tokens come from a script."""
        return None

    @property
    def description(self) -> str:
        """It has no release."""
        return "a scripted engine"

    @property
    def note(self) -> str:
        """Nothing: it runs as configured."""
        return ""

    def fail(self, reason: str = "the engine died.") -> None:
        """Simulate the death of the engine: every request, now and later, raises EngineError."""
        self._failure = EngineError(reason)

    @property
    def version(self) -> int:
        """Policy version of the next token."""
        return self._version

    def load(self) -> EngineLoad:
        """All requests in flight count as running."""
        return EngineLoad(len(self._active), 0, self._generated, streamed_tokens=self._streamed)

    async def aclose(self) -> None:
        """Requests in flight fail."""
        self.fail("the engine was closed.")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
