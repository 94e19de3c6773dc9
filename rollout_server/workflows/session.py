"""Session in which a workflow writes one sample, turn by turn.

    prompt | turn of the policy | observation | turn of the policy | ...

`turn` waits for the engine, `observe` for the function that makes the observation.

A session can resume the unfinished sample (`prior`) of an earlier attempt. The workflow runs again from its start, and
recorded turns and observations are played back: no token is generated and no tool is called twice. An unfinished turn
continues after its last token.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import msgspec
import numpy as np
import numpy.typing as npt

from async_grpo.wire import Sample, Turn, VersionSpan, logprobs_to_bytes, tokens_to_bytes
from async_grpo.wire.sampling_mask import SamplingMask, join_masks
from rollout_server.engines.base import Generation, GenerationRequest, Sampler, Truncation, join_spans, offset_seed

ABORTED = "abort"
"""Finish reason of a generation that the engine interrupted; its sample is unfinished."""
LENGTH = "length"

Tokens = npt.NDArray[np.int32]


class SampleSession:
    """One sample while a workflow writes it.

    `prompt`: token ids. `max_tokens` bounds the whole completion, including observations. If `interruptible`, the
    engine may interrupt the session for new weights; another session then resumes its sample. `index`: number of the
    sample in its group. `vocabulary`: size of the model's vocabulary, which bounds token ids; None if unknown.
    `truncation`: the part of the distribution to sample from; None for all of it.
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
        truncation: Truncation | None = None,
    ) -> None:
        self.index = index
        self._truncation = truncation
        self._vocabulary = vocabulary
        self._engine = engine
        self._request_id = request_id
        self._prompt = [int(token) for token in prompt]
        self._seed = seed
        self._temperature = temperature
        self._max_tokens = max_tokens
        self._interruptible = interruptible
        self._started_s = prior.started_s if prior is not None else time.time()
        self._completion = _empty_generation()
        """Completed turns and observations so far."""
        self._turns: list[Turn] = []
        """Boundaries of the turns and observations in `_completion`."""
        self._playback = deque(_recorded_pieces(prior))
        """Pieces of `prior` that are not played back yet."""
        self._turn_start = _empty_generation()
        """Recorded start of the turn that the engine continues."""
        self._request_in_engine = ""
        """ID of the running request, "" if there is none."""
        self._finish_reason = ""
        self.is_cut_short = False
        """True if the engine interrupted the last turn: the workflow must return `sample()` immediately."""

    @property
    def tokens_left(self) -> int:
        """Number of tokens by which the completion may still grow."""
        return self._max_tokens - len(self._completion.tokens)

    @property
    def is_generating(self) -> bool:
        """True while the engine has a request of this session, and after the engine has died with it."""
        return self._request_in_engine != ""

    def limit(self, tokens: int) -> None:
        """Lower the token limit of the completion to `tokens` (>= 1). Call it before the first turn."""
        self._max_tokens = min(self._max_tokens, tokens)

    async def turn(self) -> Generation:
        """Let the policy write until it stops ("stop") or the completion is full ("length"), and return that turn.

        Finish reason "abort": the engine was interrupted; see `is_cut_short`. Raises EngineError.
        """
        generation = self._play_back(by_policy=True)
        if not generation.finish_reason:
            generation = await self._continue_turn(generation)
        self._finish_reason = generation.finish_reason
        self.is_cut_short = generation.finish_reason == ABORTED
        self._append(generation, by_policy=True)
        return generation

    async def observe(self, make: Callable[[], Awaitable[Sequence[int]]]) -> Tokens:
        """Append an observation and return its tokens, int32 [n], truncated at the token limit.

        `make` is called unless an earlier attempt has recorded the observation, even if none of its tokens fit: it may
        be the last action of an environment, on which the reward depends. Raises RuntimeError before the
        first turn, ValueError for a token id outside the vocabulary.
        """
        if not self._completion.spans:
            raise RuntimeError(
                "observe() before the policy has written anything: an observation answers a turn, and gets the policy "
                "version of that turn. Put what comes first into the prompt, or call turn() before"
            )
        recorded = self._play_back(by_policy=False)
        tokens = recorded.tokens
        if not recorded.finish_reason:  # not recorded
            tokens = self._check_tokens(await make())

        if len(tokens) >= self.tokens_left:
            tokens = tokens[: self.tokens_left]
            self._finish_reason = LENGTH
        version = self._completion.spans[-1].version
        spans = [VersionSpan(version, 0, len(tokens))] if len(tokens) else []
        logprobs = np.zeros(len(tokens), np.float32)
        self._append(Generation(tokens, logprobs, spans, "stop"), by_policy=False)
        return tokens

    def sample(self, text: str) -> Sample:
        """The sample with this text, without rewards; unfinished (finish reason "") if the engine interrupted it."""
        if self.is_cut_short:
            return self._build_sample(self._completion, self._turns)
        return msgspec.structs.replace(self._build_ended_sample(), text=text, finish_reason=self._finish_reason)

    def end_early(self, kind: str, reason: str) -> Sample:
        """The sample up to its last complete turn, after its workflow has failed. `kind` becomes the finish reason."""
        return msgspec.structs.replace(self._build_ended_sample(), finish_reason=kind, unverifiable=f"{kind}: {reason}")

    def snapshot(self) -> Sample | None:
        """Copy of the unfinished sample, including tokens that the engine has generated but not yet returned.

        None if there are no tokens yet, or none that the earlier attempt has not saved already.
        """
        completion = self._completion
        turns = self._turns
        if self._request_in_engine:
            generated = self._engine.peek(self._request_in_engine)
            current_turn = self._turn_start
            if generated is not None:
                current_turn = join_generations(current_turn, generated)
            # The boundaries of turns go with the tokens: an engine that continues the sample needs both.
            turns = [*turns, *_record_turn(completion, current_turn, by_policy=True, finish_reason="")]
            completion = join_generations(completion, current_turn)
        elif self._playback:
            return None  # playback has not reached the end of `prior`, which is already saved
        return self._build_sample(completion, turns) if len(completion.tokens) else None

    async def _continue_turn(self, start: Generation) -> Generation:
        """Generate the remainder of a turn after its recorded start (may be empty); returns the whole turn."""
        max_tokens = self.tokens_left - len(start.tokens)
        if max_tokens <= 0:
            # Without a suspension, a workflow that requests turns forever would block the event loop.
            await asyncio.sleep(0)
            return replace(start, finish_reason=LENGTH)

        turn_number = len(self._turns)
        seed = None
        if self._seed is not None:
            seed = offset_seed(self._seed, turn_number)
        prefix = np.concatenate([self._completion.tokens, start.tokens])
        self._turn_start = start
        self._request_in_engine = f"{self._request_id}.{turn_number}"
        request = GenerationRequest(
            request_id=self._request_in_engine,
            prompt=self._prompt,
            max_tokens=max_tokens,
            temperature=self._temperature,
            seed=seed,
            prefix=prefix.tolist(),
            interruptible=self._interruptible,
            truncation=self._truncation,
        )
        # Not in a `finally`: if the engine dies, `snapshot` still needs the ID to read the tokens of the request.
        generated = await self._engine.generate(request)
        self._request_in_engine = ""
        return join_generations(start, generated)

    def _check_tokens(self, observation: Sequence[int]) -> Tokens:
        """Return the observation as int32 [n]. Raises ValueError for an id that would crash engine and trainer."""
        tokens = np.asarray(observation, np.int32)
        limit = self._vocabulary or np.iinfo(np.int32).max
        unknown = tokens[(tokens < 0) | (tokens >= limit)]
        if len(unknown):
            raise ValueError(
                f"observe() got token id {unknown[0]}, but the model has ids 0 to {limit - 1}: engine and trainer have "
                "no embedding for it. Encode the observation with the tokenizer that is passed to the workflow"
            )
        return tokens

    def _play_back(self, *, by_policy: bool) -> Generation:
        """Remove and return the next recorded piece.

        If it has another author, the workflow does not repeat what it did: drop the record and return an empty piece.
        """
        if self._playback and self._playback[0][1] == by_policy:
            return self._playback.popleft()[0]
        self._playback.clear()
        return _empty_generation()

    def _append(self, generation: Generation, *, by_policy: bool) -> None:
        finish_reason = "" if generation.finish_reason == ABORTED else generation.finish_reason
        self._turns += _record_turn(self._completion, generation, by_policy=by_policy, finish_reason=finish_reason)
        self._completion = join_generations(self._completion, generation)

    def _build_ended_sample(self) -> Sample:
        # Without turns, a sample is one turn of the policy. So a single turn need not be recorded.
        turns = self._turns if len(self._turns) > 1 else []
        return self._build_sample(self._completion, turns)

    def _build_sample(self, completion: Generation, turns: list[Turn]) -> Sample:
        mask = completion.sampling_mask
        return Sample(
            tokens=tokens_to_bytes(completion.tokens),
            logprobs=logprobs_to_bytes(completion.logprobs),
            spans=completion.spans,
            turns=turns,
            mask_ids=b"" if mask is None else mask.token_ids.tobytes(),
            mask_counts=b"" if mask is None else mask.counts.tobytes(),
            finish_reason="",
            started_s=self._started_s,
            finished_s=time.time(),
        )


def join_generations(first: Generation, second: Generation) -> Generation:
    """`first` followed by `second`. Adjacent spans of the same version become one."""
    if not len(first.tokens):
        return second  # most turns have nothing before them
    return Generation(
        tokens=np.concatenate([first.tokens, second.tokens]),
        logprobs=np.concatenate([first.logprobs, second.logprobs]),
        spans=join_spans(first.spans, second.spans, offset=len(first.tokens)),
        finish_reason=second.finish_reason,
        sampling_mask=_join_sampling_masks(first, second),
    )


def _join_sampling_masks(first: Generation, second: Generation) -> SamplingMask | None:
    """Masks of both. A part without one (an observation of the environment) gets empty rows."""
    if first.sampling_mask is None and second.sampling_mask is None:
        return None
    masks = []
    for part in (first, second):
        mask = part.sampling_mask
        masks.append(SamplingMask.without_tokens(len(part.tokens)) if mask is None else mask)
    return join_masks(masks)


def _record_turn(completion: Generation, piece: Generation, *, by_policy: bool, finish_reason: str) -> list[Turn]:
    """Record of `piece` after `completion`; empty for a turn of the policy without tokens."""
    if by_policy and not len(piece.tokens):
        return []
    # Empty observations are recorded too. If they were left out, the next recorded turn would not follow when the
    # sample is resumed, so the rest of the record would be dropped and its tools would be called again.
    start = len(completion.tokens)
    return [Turn(start, start + len(piece.tokens), by_policy, finish_reason)]


def _empty_generation() -> Generation:
    return Generation(np.empty(0, np.int32), np.empty(0, np.float32), [], "")


def _recorded_pieces(prior: Sample | None) -> list[tuple[Generation, bool]]:
    """Turns and observations of an earlier attempt, each with True if the policy wrote it."""
    if prior is None:
        return []
    tokens = prior.token_ids()
    logprobs = prior.token_logprobs()
    mask = prior.sampling_mask()
    pieces = []
    for turn in prior.turns or [Turn(0, len(tokens), True)]:
        generation = Generation(
            tokens[turn.start : turn.end],
            logprobs[turn.start : turn.end],
            _slice_spans(prior.spans, turn.start, turn.end),
            turn.finish_reason,
            None if mask is None else mask.slice_rows(turn.start, turn.end),
        )
        pieces.append((generation, turn.by_policy))
    return pieces


def _slice_spans(spans: Sequence[VersionSpan], start: int, end: int) -> list[VersionSpan]:
    """Spans of the tokens [start, end), with positions relative to `start`."""
    sliced = []
    for span in spans:
        first = max(span.start, start) - start
        last = min(span.end, end) - start
        if first < last:
            sliced.append(VersionSpan(span.version, first, last))
    return sliced
