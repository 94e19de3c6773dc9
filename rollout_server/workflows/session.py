"""One sample while a workflow makes it: what is written so far, and the calls that write more.

    prompt | turn of the policy | observation | turn of the policy | ...

`turn` waits for the engine, `observe` for the function that makes the observation. What an earlier attempt wrote
(`prior`) is played back first: whole turns and observations come from the record, so that no tool is called twice for
the same place, and an unfinished turn goes on behind its last token.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from async_grpo.wire import Sample, Turn, VersionSpan, logprobs_to_bytes, tokens_to_bytes
from rollout_server.engines.base import Generation, GenerationRequest, Sampler, join_spans, offset_seed

ABORTED = "abort"
"""Finish reason of a generation that the engine cut short; its sample is unfinished."""
LENGTH = "length"

Tokens = npt.NDArray[np.int32]


class SampleSession:
    """What a workflow writes its sample with.

    `prompt`: token ids. `max_tokens` bounds the whole completion, observations included. The engine may cut short a
    session that is `interruptible`; another session then goes on from what this one wrote. `index`: number of the
    sample in its group. `vocabulary`: token ids are below it (None: unknown).
    """

    def __init__(
        self,
        engine: Sampler,
        request_id: str,
        prompt: Sequence[int] | Tokens,
        *,
        seed: int | None,
        temperature: float,
        max_tokens: int,
        prior: Sample | None = None,
        interruptible: bool = True,
        index: int = 0,
        vocabulary: int | None = None,
    ) -> None:
        self.index = index
        self._vocabulary = vocabulary
        self._engine = engine
        self._request_id = request_id
        self._prompt = [int(token) for token in prompt]
        self._seed = seed
        self._temperature = temperature
        self._max_tokens = max_tokens
        self._interruptible = interruptible
        self._started_s = prior.started_s if prior is not None else time.time()
        self._written = _nothing()
        self._turns: list[Turn] = []
        self._record = deque(_pieces(prior))
        self._begun = _nothing()
        self._generating = ""
        self._reason = ""
        self.is_cut_short = False
        """True if the engine interrupted the last turn: the workflow must return `sample()` at once."""

    @property
    def tokens_left(self) -> int:
        """Number of tokens that the completion may still have."""
        return self._max_tokens - len(self._written.tokens)

    @property
    def is_generating(self) -> bool:
        """True while the engine has a request of this session, and after the engine has died with it."""
        return self._generating != ""

    def limit(self, tokens: int) -> None:
        """Bound the completion by `tokens` (>= 1), if that is less than its present bound. Call it before the first
        turn."""
        self._max_tokens = min(self._max_tokens, tokens)

    async def turn(self) -> Generation:
        """Let the policy write until it stops ("stop") or the completion is full ("length"); returns that turn.

        "abort": the engine was interrupted; see `is_cut_short`. Raises EngineError.
        """
        begun = self._played_back(by_policy=True)
        generation = begun if begun.finish_reason else await self._go_on(begun)
        self._reason, self.is_cut_short = generation.finish_reason, generation.finish_reason == ABORTED
        self._write(generation, by_policy=True)
        return generation

    async def observe(self, make: Callable[[], Awaitable[Sequence[int]]]) -> Tokens:
        """Append an observation and return its tokens, int32 [n], cut at max_tokens. `make` is called only if the
        record of an earlier attempt does not have the observation.

        Raises RuntimeError if the policy has not written anything yet, ValueError for a token id that the model does
        not have.
        """
        if not self._written.spans:
            raise RuntimeError(
                "observe() before the policy has written anything: an observation stands behind what it answers, and "
                "has that version. Put what comes first into the prompt, or call turn() before"
            )
        recorded = self._played_back(by_policy=False)
        tokens = recorded.tokens if recorded.finish_reason else self._checked(await make())
        if len(tokens) >= self.tokens_left:
            tokens, self._reason = tokens[: self.tokens_left], LENGTH
        if not self.tokens_left:
            return tokens  # nothing of it fits
        version = self._written.spans[-1].version
        spans = [VersionSpan(version, 0, len(tokens))] if len(tokens) else []
        self._write(Generation(tokens, np.zeros(len(tokens), np.float32), spans, "stop"), by_policy=False)
        return tokens

    def sample(self, text: str) -> Sample:
        """The sample with this text, without rewards; unfinished (finish reason "") if the engine cut it short."""
        if self.is_cut_short:
            return self._unfinished(self._written, self._turns)
        turns = self._turns if len(self._turns) > 1 else []
        return msgspec.structs.replace(self._unfinished(self._written, turns), text=text, finish_reason=self._reason)

    def snapshot(self) -> Sample | None:
        """What exists now, with tokens that the engine has made so far; None if that is nothing, or nothing beyond what
        an earlier attempt stored."""
        written, turns = self._written, self._turns
        if self._generating:
            underway = self._engine.peek(self._generating)
            rest = self._begun if underway is None else join(self._begun, underway)
            turns = [*turns, *_turn(written, rest, by_policy=True, finish_reason="")]
            written = join(written, rest)
        elif self._record:
            return None
        return self._unfinished(written, turns) if len(written.tokens) else None

    async def _go_on(self, begun: Generation) -> Generation:
        """The rest of the turn behind what exists of it."""
        left = self.tokens_left - len(begun.tokens)
        if left <= 0:
            await asyncio.sleep(0)  # a workflow that never stops asking must not hold the event loop
            return Generation(begun.tokens, begun.logprobs, begun.spans, LENGTH)
        prefix = np.concatenate([self._written.tokens, begun.tokens])
        self._begun, self._generating = begun, f"{self._request_id}.{len(self._turns)}"
        request = GenerationRequest(
            request_id=self._generating,
            prompt=self._prompt,
            max_tokens=left,
            temperature=self._temperature,
            seed=None if self._seed is None else offset_seed(self._seed, len(self._turns)),
            prefix=prefix.tolist(),
            interruptible=self._interruptible,
        )
        rest = await self._engine.generate(request)  # if that fails, `snapshot` still finds what there was
        self._generating = ""
        return join(begun, rest)

    def _checked(self, observation: Sequence[int]) -> Tokens:
        """The observation as int32 [n]. Raises ValueError for an id that would kill the engine and the trainer."""
        tokens = np.asarray(observation, np.int32)
        limit = self._vocabulary or np.iinfo(np.int32).max
        unknown = tokens[(tokens < 0) | (tokens >= limit)]
        if len(unknown):
            raise ValueError(
                f"observe() was given token id {unknown[0]}, and those of the model are 0 to {limit - 1}: engine and "
                "trainer have no embedding for it. Encode the observation with the tokenizer that the workflow is given"
            )
        return tokens

    def _played_back(self, *, by_policy: bool) -> Generation:
        """The next piece of the record, if it is of this author; otherwise nothing, and the record ends here."""
        if self._record and self._record[0][1] == by_policy:
            return self._record.popleft()[0]
        self._record.clear()
        return _nothing()

    def _write(self, generation: Generation, *, by_policy: bool) -> None:
        reason = "" if generation.finish_reason == ABORTED else generation.finish_reason
        self._turns += _turn(self._written, generation, by_policy=by_policy, finish_reason=reason)
        self._written = join(self._written, generation)

    def _unfinished(self, written: Generation, turns: list[Turn]) -> Sample:
        return Sample(
            tokens=tokens_to_bytes(written.tokens),
            logprobs=logprobs_to_bytes(written.logprobs),
            spans=written.spans,
            turns=turns,
            finish_reason="",
            started_s=self._started_s,
            finished_s=time.time(),
        )


def join(first: Generation, second: Generation) -> Generation:
    """`first` followed by `second`. Adjacent spans of the same version become one."""
    if not len(first.tokens):
        return second  # most turns have nothing before them
    return Generation(
        tokens=np.concatenate([first.tokens, second.tokens]),
        logprobs=np.concatenate([first.logprobs, second.logprobs]),
        spans=join_spans(first.spans, second.spans, offset=len(first.tokens)),
        finish_reason=second.finish_reason,
    )


def _turn(written: Generation, more: Generation, *, by_policy: bool, finish_reason: str) -> list[Turn]:
    """The record of `more`; none of a turn that the policy has not begun."""
    if by_policy and not len(more.tokens):
        return []
    # An empty observation is recorded too. Left out, the next recorded turn would not follow it when the sample is
    # resumed, so that the rest of the record would be thrown away and its tools be called again.
    start = len(written.tokens)
    return [Turn(start, start + len(more.tokens), by_policy, finish_reason)]


def _nothing() -> Generation:
    return Generation(np.empty(0, np.int32), np.empty(0, np.float32), [], "")


def _pieces(prior: Sample | None) -> list[tuple[Generation, bool]]:
    """What an earlier attempt wrote, turn by turn, each with whether the policy wrote it."""
    if prior is None:
        return []
    tokens, logprobs = prior.token_ids(), prior.token_logprobs()
    turns = prior.turns or [Turn(0, len(tokens), True)]
    return [
        (
            Generation(
                tokens[turn.start : turn.end],
                logprobs[turn.start : turn.end],
                _spans_within(prior.spans, turn.start, turn.end),
                turn.finish_reason,
            ),
            turn.by_policy,
        )
        for turn in turns
    ]


def _spans_within(spans: Sequence[VersionSpan], start: int, end: int) -> list[VersionSpan]:
    """The part [start, end), counted from `start`."""
    cut = [(span.version, max(span.start, start) - start, min(span.end, end) - start) for span in spans]
    return [VersionSpan(version, first, last) for version, first, last in cut if first < last]
