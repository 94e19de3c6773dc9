"""Requests inside vLLM: what this project keeps of each, and what vLLM's front end shows of them.

The functions that take `llm` read the state of vLLM's AsyncLLM (None before it has started). Only
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
from rollout_server.engines.base import Generation, GenerationRequest, SpanLog, spans_from_labels, version_of_label


class EngineRequest:
    """One request inside vLLM."""

    def __init__(self, vllm_id: str, version: int, *, interruptible: bool, streams: bool = False) -> None:
        """`version`: of the weights when the request was submitted."""
        self.vllm_id = vllm_id
        self.spans = SpanLog(version)
        self.submitted_s = time.monotonic()
        self.interruptible = interruptible
        self.streams = streams
        self.vocabulary = False
        """Whether its output has the log-probabilities of all tokens."""
        self.passed_on = 0
        """Tokens that the reader of a stream has."""
        self.counted = 0
        """Tokens that the engine's load has shown of this request."""
        self.resubmit = False
        """True if an update came before the first token: the request is made again."""
        self.state: Any = None
        """vLLM's RequestState of a stream, once it has a token."""


def sampling_params(
    request: GenerationRequest, stop_tokens: Sequence[int], *, streams: bool, vocabulary: bool = False
) -> Any:
    """vLLM's SamplingParams of the request, with log-probabilities of the sampled tokens, or of the `vocabulary`."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        seed=request.seed,
        stop_token_ids=list(stop_tokens),
        logprobs=-1 if vocabulary else 0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA if streams else RequestOutputKind.FINAL_ONLY,
    )


def check_tokens(request: GenerationRequest, vocabulary: int | None, name: str) -> None:
    """Raise RequestRefused if a token id of the prompt or the prefix is not in [0, vocabulary); None: unknown."""
    tokens = [*request.prompt, *request.prefix]
    if vocabulary is None or not tokens:
        return
    lowest, highest = min(tokens), max(tokens)
    if lowest < 0 or highest >= vocabulary:
        raise RequestRefused(
            f"{name}: request {request.request_id} has token id {lowest if lowest < 0 else highest}, and those of the "
            f"model are 0 to {vocabulary - 1}. Encode prompts and observations with the tokenizer of this model"
        )


def generation_of(output: Any, active: EngineRequest) -> Generation:
    """The completion of vLLM's final output, with the spans that vLLM reports, or else those kept here."""
    completion = output.outputs[0]
    tokens = np.asarray(completion.token_ids, np.int32)
    labels = getattr(completion, "weight_versions", None)
    return Generation(
        tokens=tokens,
        logprobs=np.asarray(completion.logprobs.logprobs, np.float32),
        spans=spans_from_labels(labels) if labels is not None else active.spans.spans(len(tokens)),
        finish_reason=completion.finish_reason,
    )


def next_piece(llm: Any, output: Any, active: EngineRequest) -> Generation:
    """The next piece of a stream, with the spans that vLLM reports, or else those kept here; its tokens count as
    passed on."""
    completion = output.outputs[0]
    since, active.passed_on = active.passed_on, active.passed_on + len(completion.token_ids)
    if active.state is None:
        active.state = request_states(llm).get(active.vllm_id)
    # vLLM has dropped the state if the whole completion came as one piece; then its labels are in the output.
    labels = getattr(completion, "weight_versions", None) or []
    starts = [(label.version, label.start) for label in labels] or _label_starts(active.state)
    log = _labelled_spans(starts) or active.spans
    return Generation(
        tokens=np.asarray(completion.token_ids, np.int32),
        logprobs=np.asarray(completion.logprobs.logprobs, np.float32),
        spans=log.spans(active.passed_on, since=since),
        finish_reason=completion.finish_reason or "",
    )


def vocabulary_of(output: Any) -> npt.NDArray[np.float32]:
    """The log-probabilities of all tokens in the first place of a completion that was asked for the vocabulary."""
    found = output.outputs[0].logprobs
    here = slice(found.start_indices[0], found.end_indices[0])
    tokens = np.asarray(found.token_ids[here])
    logprobs = np.full(tokens.max() + 1, np.nan, np.float32)
    logprobs[tokens] = found.logprobs[here]
    return logprobs


def request_states(llm: Any) -> dict[str, Any]:
    """What vLLM's front end keeps of each request in flight, by its id in vLLM."""
    if llm is None:
        return {}
    states = llm.output_processor.request_states.values()
    return {getattr(state, "external_req_id", None) or state.request_id: state for state in states}


def token_counts(llm: Any) -> dict[str, int]:
    """Number of tokens that each request in flight has so far, by its id in vLLM."""
    return {vllm_id: len(state.detokenizer.output_token_ids) for vllm_id, state in request_states(llm).items()}


def generated_so_far(llm: Any, active: EngineRequest) -> Generation | None:
    """What a request in flight has so far (finish reason ""), with the spans that vLLM reports, or else those kept
    here; None if it has no token, or vLLM no longer knows it."""
    state = request_states(llm).get(active.vllm_id)
    if state is None or not state.detokenizer.output_token_ids:
        return None
    logprobs = np.asarray(state.logprobs_processor.logprobs.logprobs, np.float32)
    tokens = np.asarray(state.detokenizer.output_token_ids, np.int32)[: len(logprobs)]
    log = _labelled_spans(_label_starts(state)) or active.spans
    return Generation(tokens, logprobs[: len(tokens)], log.spans(len(tokens)), "")


async def wait_for_outputs(llm: Any) -> None:
    """Return once vLLM's front end has counted every token that its engine made before a pause.

    The reply to a pause overtakes outputs that wait in `outputs_queue`, and vLLM sleeps for only 20 ms to let them
    through. A front end that is further behind would count too few tokens as old, and old tokens would get the new
    version.
    """
    from vllm.v1.engine import EngineCoreOutputs

    # The output handler takes the next outputs only after it has processed the last. So once it has taken these empty
    # ones, which are behind all others, nothing is under way. An empty queue alone would not show that: the handler
    # yields to the event loop after every 128 outputs.
    queue = llm.engine_core.outputs_queue
    queue.put_nowait(EngineCoreOutputs())
    while not queue.empty():  # noqa: ASYNC110  (vLLM's queue has no event for it)
        await asyncio.sleep(0)
    # The tasks of requests that have just finished get their turn. They would be made again otherwise, because vLLM no
    # longer knows them.
    for _ in range(2):
        await asyncio.sleep(0)


def _label_starts(state: Any) -> Sequence[tuple[str, int]]:
    """vLLM's labels of a request in flight, each with its first token; none before 0.28, or without a token."""
    starts: Sequence[tuple[str, int]] = getattr(state, "weight_version_starts", ())
    return starts


def _labelled_spans(starts: Sequence[tuple[str, int]]) -> SpanLog | None:
    if not starts:
        return None
    log = SpanLog(version_of_label(starts[0][0]))
    for label, start in starts[1:]:
        log.record_update(start, version_of_label(label))
    return log


def kv_use(llm: Any) -> float:
    """Share of the KV cache's blocks that the requests in flight need; 0 if the size of the cache is unknown."""
    cache = getattr(getattr(llm, "vllm_config", None), "cache_config", None)
    blocks, size = getattr(cache, "num_gpu_blocks", None), getattr(cache, "block_size", None)
    if not blocks or not size:
        return 0.0
    states = request_states(llm).values()
    lengths = [state.prompt_len + len(state.detokenizer.output_token_ids) for state in states]
    return float(sum(-(-length // size) for length in lengths) / blocks)
