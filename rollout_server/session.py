"""What a workflow sees of the engine while it makes one sample."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from async_grpo.wire import Sample, VersionSpan, logprobs_to_bytes, tokens_to_bytes
from rollout_server.engines.protocol import Engine, Generation, GenerationRequest

ABORTED = "abort"
"""Finish reason of a generation that the engine cut short; its sample is unfinished."""


@dataclass
class Session:
    """The engine, for one sample: its seed, its limits, and what exists of it already.

    `prior` is the unfinished sample of an earlier attempt: `generate` goes on behind its tokens.
    """

    engine: Engine
    request_id: str
    seed: int
    temperature: float
    max_tokens: int
    prior: Sample | None = None
    started_s: float = field(default_factory=time.time)

    async def generate(self, prompt: Sequence[int] | npt.NDArray[np.int32]) -> Generation:
        """The completion of `prompt`, what `prior` holds included. Raises EngineError."""
        before = _as_generation(self.prior)
        left = self.max_tokens - len(before.tokens)
        if left <= 0:
            return Generation(before.tokens, before.logprobs, before.spans, "length")
        request = GenerationRequest(
            request_id=self.request_id,
            prompt=[int(token) for token in prompt],
            max_tokens=left,
            temperature=self.temperature,
            seed=self.seed,
            prefix=before.tokens.tolist(),
        )
        return join(before, await self.engine.generate(request))

    def sample(self, generation: Generation, text: str) -> Sample:
        """A sample without rewards; unfinished (finish reason "") if the engine cut it short."""
        return Sample(
            tokens=tokens_to_bytes(generation.tokens),
            logprobs=logprobs_to_bytes(generation.logprobs),
            spans=generation.spans,
            finish_reason="" if generation.finish_reason == ABORTED else generation.finish_reason,
            text=text,
            started_s=self.started_s,
            finished_s=time.time(),
        )


def join(first: Generation, second: Generation) -> Generation:
    """`second` behind `first`; spans that touch and have the same version become one."""
    offset = len(first.tokens)
    spans = list(first.spans)
    for span in second.spans:
        moved = VersionSpan(span.version, span.start + offset, span.end + offset)
        if spans and spans[-1].version == moved.version:
            spans[-1] = VersionSpan(moved.version, spans[-1].start, moved.end)
        else:
            spans.append(moved)
    return Generation(
        tokens=np.concatenate([first.tokens, second.tokens]),
        logprobs=np.concatenate([first.logprobs, second.logprobs]),
        spans=spans,
        finish_reason=second.finish_reason,
    )


def _as_generation(prior: Sample | None) -> Generation:
    if prior is None:
        return Generation(np.empty(0, np.int32), np.empty(0, np.float32), [], "")
    return Generation(prior.token_ids(), prior.token_logprobs(), list(prior.spans), "")
