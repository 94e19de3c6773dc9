"""An engine without a model, for tests of the machinery around it.

Tokens come from a script, one after another on the asyncio clock; log-probabilities follow from the
tokens. Versions, pauses, cancellation and death behave as in the real engine.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from async_grpo.errors import EngineError
from async_grpo.weights.manifest import Identity
from async_grpo.weights.store import WeightStore
from rollout_server.engines.protocol import EngineLoad, Generation, GenerationRequest, Interruption
from rollout_server.engines.spans import CHECKPOINT_VERSION, SpanLog

Script = Callable[[GenerationRequest], Sequence[int]]
"""The completion of a request, `prefix` included, its last token being the stop token."""


def hashed_script(length: int = 16, vocab_size: int = 1000) -> Script:
    """Completions of `length` tokens that depend on prompt and seed only."""

    def script(request: GenerationRequest) -> list[int]:
        text = f"{list(request.prompt)} {request.seed}"
        return [zlib.crc32(f"{text} {position}".encode()) % vocab_size for position in range(length)]

    return script


def scripted_logprobs(tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    """Log-probabilities that `ScriptedEngine` gives to tokens: -(1 + token mod 8) / 8."""
    return (-(1 + np.asarray(tokens, np.int64) % 8) / 8).astype(np.float32)


class ScriptedEngine:
    """The `Engine` protocol; every request makes `tokens_per_s` tokens a second, whatever the load.

    An update takes `update_s` during which no token comes. With `reads_store` it must find the
    version in the weight store, as a real engine would.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        tokens_per_s: float = 1000.0,
        update_s: float = 0.0,
        reads_store: bool = False,
    ) -> None:
        self.updates: list[tuple[Identity, Interruption]] = []
        self._script = script or hashed_script()
        self._token_s = 1 / tokens_per_s
        self._update_s = update_s
        self._reads_store = reads_store
        self._version = CHECKPOINT_VERSION
        self._flights: dict[SpanLog, list[int]] = {}
        self._generated = 0
        self._failure: EngineError | None = EngineError("the engine was not started.")
        self._gate = asyncio.Event()

    async def start(self) -> None:
        """Ready at once."""
        self._failure = None
        self._gate.set()

    async def generate(self, request: GenerationRequest) -> Generation:
        """The script's completion from after `prefix`, cut at max_tokens ("length")."""
        rest = list(self._script(request))[len(request.prefix) :]
        tokens: list[int] = []
        log = SpanLog(self._version)
        self._flights[log] = tokens
        try:
            for token in rest[: request.max_tokens]:
                await asyncio.sleep(self._token_s)
                await self._gate.wait()
                self._raise_failure()
                tokens.append(token)
                self._generated += 1
        finally:
            del self._flights[log]
        self._raise_failure()
        return Generation(
            tokens=np.asarray(tokens, np.int32),
            logprobs=scripted_logprobs(tokens),
            spans=log.spans(len(tokens)),
            finish_reason="stop" if len(rest) <= request.max_tokens else "length",
        )

    async def update_weights(self, store: Path, *, epoch: int, version: int, interruption: Interruption) -> float:
        """Hold all requests for `update_s`, then go on with `version`."""
        self._raise_failure()
        identity = Identity(epoch, version)
        self._gate.clear()
        try:
            await asyncio.sleep(self._update_s)
            if self._reads_store:
                WeightStore.open(store).snapshot(identity).verify()
            for log, tokens in self._flights.items():
                log.update(len(tokens), version)
            self._version = version
            self.updates.append((identity, interruption))
        finally:
            self._gate.set()
        return self._update_s

    def fail(self, reason: str = "the engine died.") -> None:
        """Die: every request, now and later, raises EngineError."""
        self._failure = EngineError(reason)

    @property
    def version(self) -> int:
        """Policy version of the next token."""
        return self._version

    def load(self) -> EngineLoad:
        """Requests in flight all run."""
        return EngineLoad(len(self._flights), 0, self._generated)

    async def aclose(self) -> None:
        """Requests in flight fail."""
        self.fail("the engine was closed.")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
