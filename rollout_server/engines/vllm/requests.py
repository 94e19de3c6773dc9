"""Requests inside vLLM: our record of each, and the state that vLLM's front end keeps of them.

Functions with a parameter `llm` read the state of vLLM's AsyncLLM (None before it has started). Only
`wait_for_outputs` waits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from async_grpo.errors import RequestRefused
from async_grpo.wire.sampling_mask import SamplingMask
from rollout_server.engines.base import Generation, GenerationRequest, SpanLog, spans_from_labels, version_of_label
from rollout_server.engines.vllm.sampling_masks import FlatLogprobs, read_sampling_mask, reported_logprobs


class EngineRequest:
    """One request inside vLLM. A request of the caller that is resubmitted gets a new one."""

    def __init__(
        self, vllm_id: str, version: int, *, interruptible: bool, is_stream: bool = False, is_truncated: bool = False
    ) -> None:
        """version: of the weights when the request was submitted. is_truncated: the output has a sampling mask."""
        self.vllm_id = vllm_id
        self.span_log = SpanLog(version)
        self.submitted_s = time.monotonic()
        self.interruptible = interruptible
        self.is_stream = is_stream
        self.is_truncated = is_truncated
        self.wants_vocabulary = False
        """True if the output has the log-probabilities of all tokens."""
        self.yielded_tokens = 0
        """Tokens that the reader of a stream has received."""
        self.counted_tokens = 0
        """Tokens of this request in the engine's last reported load."""
        self.must_resubmit = False
        """True if an update arrived before the first token."""
        self.vllm_state: Any = None
        """vLLM's RequestState of a stream, once it has a token."""


def make_sampling_params(
    request: GenerationRequest,
    stop_tokens: Sequence[int],
    *,
    is_stream: bool,
    wants_vocabulary: bool = False,
    vocabulary: int | None = None,
) -> Any:
    """Build vLLM's SamplingParams, with log-probabilities of the sampled tokens, of the kept ones under truncation, or
    of the whole vocabulary. vocabulary: its size; None: unknown."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    logprobs = -1 if wants_vocabulary else 0
    truncation_arguments: dict[str, Any] = {}
    truncation = request.truncation
    if truncation is not None:
        logprobs = reported_logprobs(truncation, vocabulary)
        truncation_arguments = {
            "top_k": truncation.top_k,
            "top_p": truncation.top_p,
            "min_p": truncation.min_p,
            "repetition_penalty": truncation.repetition_penalty,
            # vLLM counts from its own first token, which follows the prefix.
            "min_tokens": min(max(0, truncation.min_tokens - len(request.prefix)), request.max_tokens),
        }
    return SamplingParams(
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        seed=request.seed,
        stop_token_ids=list(stop_tokens),
        logprobs=logprobs,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA if is_stream else RequestOutputKind.FINAL_ONLY,
        **truncation_arguments,
    )


def check_token_ids(request: GenerationRequest, vocabulary: int | None, name: str) -> None:
    """Raise RequestRefused if a token id of prompt or prefix is not in [0, vocabulary). None: unknown, no check."""
    tokens = [*request.prompt, *request.prefix]
    if vocabulary is None or not tokens:
        return
    lowest, highest = min(tokens), max(tokens)
    if lowest < 0 or highest >= vocabulary:
        raise RequestRefused(
            f"{name}: request {request.request_id} has token id {lowest if lowest < 0 else highest}, outside the "
            f"model's 0 to {vocabulary - 1}. Encode prompts and observations with the tokenizer of this model"
        )


def read_generation(output: Any, engine_request: EngineRequest) -> Generation:
    """Convert vLLM's final output, with the versions that vLLM reports, else those in the request's span log."""
    completion = output.outputs[0]
    tokens = np.asarray(completion.token_ids, np.int32)
    labels = getattr(completion, "weight_versions", None)
    derived = engine_request.span_log.spans(len(tokens))
    logprobs, mask = _read_logprobs(completion.logprobs, engine_request)
    return Generation(
        tokens=tokens,
        logprobs=logprobs,
        spans=derived if labels is None else spans_from_labels(labels),
        finish_reason=completion.finish_reason,
        sampling_mask=mask,
    )


def take_next_piece(llm: Any, output: Any, engine_request: EngineRequest) -> Generation:
    """Convert one output of a stream and count its tokens as yielded."""
    completion = output.outputs[0]
    start = engine_request.yielded_tokens
    engine_request.yielded_tokens += len(completion.token_ids)
    if engine_request.vllm_state is None:
        engine_request.vllm_state = request_states(llm).get(engine_request.vllm_id)

    # vLLM has already dropped the state if the whole completion came as one piece. Its labels are then in the output.
    labels = getattr(completion, "weight_versions", None) or []
    label_starts = [(label.version, label.start) for label in labels] or _label_starts(engine_request.vllm_state)
    span_log = _span_log_from_labels(label_starts) or engine_request.span_log
    logprobs, mask = _read_logprobs(completion.logprobs, engine_request)
    return Generation(
        tokens=np.asarray(completion.token_ids, np.int32),
        logprobs=logprobs,
        spans=span_log.spans(engine_request.yielded_tokens, since=start),
        finish_reason=completion.finish_reason or "",
        sampling_mask=mask,
    )


def _read_logprobs(
    flat: FlatLogprobs, engine_request: EngineRequest
) -> tuple[npt.NDArray[np.float32], SamplingMask | None]:
    """Log-probabilities of the sampled tokens, float32 [n], and the sampling mask of a truncated request."""
    if not engine_request.is_truncated:
        return np.asarray(flat.logprobs, np.float32), None
    mask, logprobs = read_sampling_mask(flat)
    return logprobs, mask


def read_vocabulary_logprobs(output: Any) -> npt.NDArray[np.float32]:
    """Log-probabilities [V] of all tokens at the first position of an output that was requested with them."""
    flat = output.outputs[0].logprobs
    first_position = slice(flat.start_indices[0], flat.end_indices[0])
    tokens = np.asarray(flat.token_ids[first_position])
    logprobs = np.full(tokens.max() + 1, np.nan, np.float32)
    logprobs[tokens] = flat.logprobs[first_position]
    return logprobs


def request_states(llm: Any) -> dict[str, Any]:
    """vLLM's RequestState of each request in flight, by `EngineRequest.vllm_id`."""
    if llm is None:
        return {}
    states = {}
    for state in llm.output_processor.request_states.values():
        # Newer releases add a random suffix to `request_id` and keep ours in `external_req_id`.
        states[getattr(state, "external_req_id", None) or state.request_id] = state
    return states


def token_counts(llm: Any) -> dict[str, int]:
    """Number of tokens generated so far of each request in flight, by `EngineRequest.vllm_id`."""
    return {vllm_id: len(state.detokenizer.output_token_ids) for vllm_id, state in request_states(llm).items()}


def read_partial(llm: Any, engine_request: EngineRequest) -> Generation | None:
    """Tokens of a request in flight so far, with finish reason "".

    None if it has no token, or if vLLM's front end no longer has the request.
    """
    state = request_states(llm).get(engine_request.vllm_id)
    if state is None or not state.detokenizer.output_token_ids:
        return None
    logprobs, mask = _read_logprobs(state.logprobs_processor.logprobs, engine_request)
    tokens = np.asarray(state.detokenizer.output_token_ids, np.int32)[: len(logprobs)]
    span_log = _span_log_from_labels(_label_starts(state)) or engine_request.span_log
    return Generation(
        tokens,
        logprobs[: len(tokens)],
        span_log.spans(len(tokens)),
        finish_reason="",
        sampling_mask=None if mask is None else mask.slice_rows(0, len(tokens)),
    )


async def wait_for_outputs(llm: Any) -> None:
    """Return once vLLM's front end has processed every output that its engine sent before a pause.

    The reply to a pause overtakes outputs that still wait in `outputs_queue`, and vLLM only sleeps for 20 ms to let
    them through. A front end that is further behind would count too few tokens as old, and label old tokens with the
    new version.
    """
    from vllm.v1.engine import EngineCoreOutputs

    # The engine's outputs and its reply to the pause arrive on one socket in order, so all outputs from before the
    # pause are in the queue by now. The handler takes the next outputs only after it has processed the last ones. So
    # once it has taken our empty ones from the end of the queue, nothing is left to process. An empty queue alone would
    # not show that: the handler yields to the event loop after every 128 outputs.
    queue = llm.engine_core.outputs_queue
    queue.put_nowait(EngineCoreOutputs())
    while not queue.empty():  # noqa: ASYNC110  (vLLM's queue has no event for it)
        await asyncio.sleep(0)

    # Let the tasks of requests that have just finished run. vLLM has already dropped these requests, so they would
    # be resubmitted otherwise.
    for _ in range(2):
        await asyncio.sleep(0)


def _label_starts(state: Any) -> Sequence[tuple[str, int]]:
    """vLLM's labels of a request in flight, each with its first token; empty before 0.28 or without a token."""
    starts: Sequence[tuple[str, int]] = getattr(state, "weight_version_starts", ())
    return starts


def _span_log_from_labels(starts: Sequence[tuple[str, int]]) -> SpanLog | None:
    if not starts:
        return None
    log = SpanLog(version_of_label(starts[0][0]))
    for label, start in starts[1:]:
        log.record_update(start, version_of_label(label))
    return log


def kv_use(llm: Any) -> float:
    """Fraction of the KV cache's blocks that requests in flight need; 0 if the size of the cache is unknown."""
    cache = getattr(getattr(llm, "vllm_config", None), "cache_config", None)
    cache_blocks = getattr(cache, "num_gpu_blocks", None)
    block_tokens = getattr(cache, "block_size", None)
    if not cache_blocks or not block_tokens:
        return 0.0

    used_blocks = 0
    for state in request_states(llm).values():
        length = state.prompt_len + len(state.detokenizer.output_token_ids)
        used_blocks += -(-length // block_tokens)
    return float(used_blocks / cache_blocks)
