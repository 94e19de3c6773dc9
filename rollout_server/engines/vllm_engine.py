"""vLLM as the engine: CPU, CUDA or Ascend, whichever build of it is installed.

    generate --> gate --> AsyncLLM.generate --> final output --> Generation
                  ^                                ^
    update_weights: close the gate, pause, load from the store, resume, open the gate

`generate` waits for the gate (opened by `update_weights`) and for vLLM. Every request carries the
identity of its weights as the salt of the prefix cache, so that no prefix is ever taken over from
other weights. A request that has no token yet when new weights arrive is submitted again under the
new salt: tokens of one version only then come from that version alone, prompt included.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from async_grpo.config.schema import Precision, VllmConfig
from async_grpo.errors import DependencyError, EngineError
from async_grpo.weights.manifest import Identity
from async_grpo.weights.store import WeightStore
from rollout_server.engines import spans
from rollout_server.engines.checkpoint import check_layout, has_tied_head, stop_tokens, tensor_shapes
from rollout_server.engines.kinship import claim_ownership
from rollout_server.engines.protocol import EngineLoad, Generation, GenerationRequest, Interruption

_WORKER_EXTENSION = "rollout_server.engines.vllm_worker.WorkerExtension"
_CPU_STEP_TOKENS = 2048
"""Prompt tokens that one step of the CPU engine reads at most (or one whole prompt, if that is longer)."""
_BEFORE_ANY_UPDATE = Identity(spans.CHECKPOINT_VERSION, spans.CHECKPOINT_VERSION)


class Flight:
    """One request inside vLLM."""

    def __init__(self, version: int) -> None:
        self.spans = spans.SpanLog(version)
        self.resubmit = False


class VllmEngine:
    """The `Engine` protocol on vLLM's AsyncLLM. One update at a time; any number of requests."""

    def __init__(
        self, model_dir: Path, config: VllmConfig, *, precision: Precision, seed: int = 0, name: str = "rollout"
    ) -> None:
        """Cheap; `start` loads. `model_dir` is a Hugging Face checkpoint folder with safetensors."""
        self._model_dir = model_dir
        self._config = config
        self._precision = precision
        self._seed = seed
        self._name = name
        self._llm: Any = None
        self._identity = _BEFORE_ANY_UPDATE
        self._failure: EngineError | None = None
        self._flights: dict[str, Flight] = {}
        self._submissions = 0
        self._finished_tokens = 0
        self._reported_tokens = 0
        self._gate = asyncio.Event()

    async def start(self) -> None:
        """Load the model and be ready to generate. Raises EngineError, DependencyError.

        Starts vLLM's processes with the spawn method: the main module must be importable without
        side effects. Blocks the event loop while the engine starts.
        """
        set_environment(self._config)
        claim_ownership()
        try:
            import vllm  # noqa: F401
        except ImportError as error:
            raise DependencyError(
                f"vLLM cannot be imported ({error}). Install one of the extras rollout-cpu, rollout-cuda, "
                "rollout-ascend."
            ) from error
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._shapes = tensor_shapes(self._model_dir)
        self._stop_tokens = stop_tokens(self._model_dir)
        self._tied_head = has_tied_head(self._model_dir)
        try:
            self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**self._engine_arguments()))
            await self._init_weight_transfer()
        except Exception as error:
            raise EngineError(f"{self._name}: vLLM did not start with {self._model_dir}: {error}") from error
        self._gate.set()

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one completion. Raises EngineError if the engine has failed or refuses the request."""
        while True:
            await self._gate.wait()
            self._raise_failure()
            flight = Flight(self.version)
            output = await self._fly(request, flight)
            self._raise_failure()
            if not flight.resubmit:
                break
        generation = _generation(output, flight)
        self._finished_tokens += len(generation.tokens)
        return generation

    async def update_weights(self, store: Path, *, epoch: int, version: int, interruption: Interruption) -> float:
        """Load `version` from `store` while requests are in flight; returns the seconds paused.

        Raises WeightsError, with nothing touched, if the store does not hold that version of this
        model; EngineError if loading fails, after which this engine refuses to generate.
        """
        identity = Identity(epoch, version)
        self._raise_failure()
        self._check_store(store, identity)
        self._gate.clear()
        started = time.monotonic()
        try:
            await self._llm.pause_generation(mode="keep", clear_cache=interruption == "recompute")
            await self._mark_flights(version)
            await self._load(store, identity)
            self._identity = identity
            await self._llm.resume_generation()
        except BaseException as error:
            await self._give_up(f"the update to {identity} did not finish: {type(error).__name__}: {error}", error)
        finally:
            self._gate.set()
        return time.monotonic() - started

    @property
    def version(self) -> int:
        """Policy version that the next token will be sampled from (-1: the checkpoint's)."""
        return self._identity.version

    def load(self) -> EngineLoad:
        """Requests with and without a first token; tokens of finished and running requests."""
        counts = self._token_counts()
        running = sum(1 for count in counts.values() if count)
        self._reported_tokens = max(self._reported_tokens, self._finished_tokens + sum(counts.values()))
        return EngineLoad(running, len(self._flights) - running, self._reported_tokens)

    async def aclose(self) -> None:
        """Stop vLLM and its processes; requests in flight fail."""
        if self._llm is not None:
            self._failure = self._failure or EngineError(f"{self._name}: the engine was closed.")
            self._llm.shutdown()
            self._llm = None

    async def _fly(self, request: GenerationRequest, flight: Flight) -> Any:
        """Submit once and wait for the final output; vLLM aborts the request if this is cancelled."""
        from vllm import TokensPrompt

        self._submissions += 1
        flight_id = f"{request.request_id}#{self._submissions}"
        prompt = TokensPrompt(
            prompt_token_ids=[*request.prompt, *request.prefix],
            cache_salt=f"{self._identity.epoch}:{self._identity.version}",
        )
        self._flights[flight_id] = flight
        try:
            outputs = [output async for output in self._llm.generate(prompt, self._sampling(request), flight_id)]
        except Exception as error:
            raise EngineError(
                f"{self._name}: request {request.request_id} failed: {type(error).__name__}: {error}"
            ) from error
        finally:
            del self._flights[flight_id]
        return outputs[-1]

    def _sampling(self, request: GenerationRequest) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            seed=request.seed,
            stop_token_ids=self._stop_tokens,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    async def _mark_flights(self, version: int) -> None:
        """Note which tokens are old, and send requests without any back to the gate.

        A request that vLLM's front end does not know is on its way in, with the old salt, or on its
        way out, with tokens whose versions can no longer be told: it is made again too.
        """
        counts = self._token_counts()
        for flight_id, flight in self._flights.items():
            tokens = counts.get(flight_id, 0)
            flight.spans.update(tokens, version)
            flight.resubmit = tokens == 0
        known = [flight_id for flight_id, flight in self._flights.items() if flight.resubmit and flight_id in counts]
        await self._llm.abort(known)

    async def _load(self, store: Path, identity: Identity) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        info = {"store": str(store), "epoch": identity.epoch, "version": identity.version}
        await self._llm.start_weight_update()
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info=info))
        finish = self._llm.finish_weight_update
        if "weight_version" in inspect.signature(finish).parameters:
            await finish(weight_version=str(identity.version))
        else:
            await finish()

    def _check_store(self, store: Path, identity: Identity) -> None:
        opened = WeightStore.open(store)
        opened.snapshot(identity)
        check_layout(opened.layout, self._shapes, tied_head=self._tied_head)

    async def _give_up(self, reason: str, cause: BaseException) -> NoReturn:
        """Half-loaded weights must not generate: fail every request, now and later."""
        self._failure = EngineError(f"{self._name}: {reason}. The engine stays paused; restart this rollout server.")
        with suppress(Exception):  # the engine may be dead, and then its requests fail by themselves
            await self._llm.abort(list(self._flights))
        if not isinstance(cause, Exception):  # cancelled
            raise cause
        raise self._failure from cause

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._llm is None:
            raise EngineError(f"{self._name}: the engine was not started.")

    def _token_counts(self) -> dict[str, int]:
        """Tokens that each request in flight has so far, as known to vLLM's front end."""
        if self._llm is None:
            return {}
        states = self._llm.output_processor.request_states.values()
        return {
            getattr(state, "external_req_id", None) or state.request_id: len(state.detokenizer.output_token_ids)
            for state in states
        }

    async def _init_weight_transfer(self) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))

    def _engine_arguments(self) -> dict[str, Any]:
        from vllm.config import WeightTransferConfig
        from vllm.platforms import current_platform

        arguments: dict[str, Any] = {
            "model": str(self._model_dir),
            "dtype": self._precision,
            "seed": self._seed,
            "max_model_len": self._config.max_model_len,
            "tensor_parallel_size": self._config.tensor_parallel,
            "enforce_eager": self._config.enforce_eager,
            "skip_tokenizer_init": True,
            "logprobs_mode": "processed_logprobs",
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            "worker_extension_cls": _WORKER_EXTENSION,
            "weight_transfer_config": WeightTransferConfig(backend="zmq"),
        }
        if current_platform.is_cpu():
            arguments["kv_cache_memory_bytes"] = self._config.kv_cache_bytes
            # A prompt read in pieces makes vLLM 0.32 rewind the request's random generator, which a CPU generator
            # cannot do ("CPU Generator does not use offset"), and the engine dies: so prompts are read whole.
            arguments["enable_chunked_prefill"] = False
            arguments["max_num_batched_tokens"] = max(_CPU_STEP_TOKENS, self._config.max_model_len)
        else:
            arguments["gpu_memory_utilization"] = self._config.gpu_memory_utilization
        return arguments | self._config.extra


def set_environment(config: VllmConfig) -> None:
    """What vLLM reads from the environment, where the user has not said otherwise.

    Must come before vllm is imported. `nobind`: vLLM would otherwise bind every engine of the
    machine to the same first cores.
    """
    defaults = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(config.threads),
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(config.multiprocessing)),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _generation(output: Any, flight: Flight) -> Generation:
    completion = output.outputs[0]
    tokens = np.asarray(completion.token_ids, np.int32)
    labels = getattr(completion, "weight_versions", None)
    return Generation(
        tokens=tokens,
        logprobs=np.asarray(completion.logprobs.logprobs, np.float32),
        spans=spans.from_labels(labels) if labels is not None else flight.spans.spans(len(tokens)),
        finish_reason=completion.finish_reason,
    )
