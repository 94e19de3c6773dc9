"""Checks that run in a process with an unpacked vLLM: `run_python("from ... import NAME; NAME(...)", ...)`.

vLLM's Python runs unchanged. Mocks replace modules that are compiled or absent on a CPU, and the platform's answers
about its device: an H100 with 80 GiB, or an Ascend 910B.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import traceback
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, create_autospec

import msgspec
import numpy as np
import torch

from async_grpo.config.rollout import Quantization, RolloutConfig
from async_grpo.errors import ConfigError, LogprobsWrong
from async_grpo.utils import private_names
from async_grpo.utils.private_names import PRIVATE_NAMES
from async_grpo.weights.base import HeldWeights
from rollout_server.engines.base import Generation, GenerationRequest, Truncation
from rollout_server.engines.proof import kept_tokens, prove_logprobs
from rollout_server.engines.vllm.compat import LOGPROBS_MODE, check_float32_head, report_sampled_logprobs
from rollout_server.engines.vllm.engine import VllmEngine
from rollout_server.engines.vllm.platform import set_environment
from rollout_server.engines.vllm.requests import make_sampling_params
from rollout_server.engines.vllm.sampling_masks import read_sampling_mask, reported_logprobs
from tests.support.vllm_reload import wrong_reloads

GIB = 1 << 30
VOCABULARY = 50
"""Vocabulary size of the proof's engine."""
_ABSENT = frozenset(
    {
        *("gguf", "torch_npu", "acl", "flashinfer", "amdsmi", "pynvml"),
        *("tilelang", "depyf", "scipy", "torchvision"),
    }
)
_COMPILED = frozenset(
    {
        *("vllm._C", "vllm._moe_C", "vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", "vllm.cumem_allocator"),
        *("vllm.vllm_flash_attn", "vllm_ascend.vllm_ascend_C"),
        "vllm.model_executor.layers.mamba.ops.ssd_chunk_scan",  # a kernel of Triton
    }
)


@cache
def _needs_humming() -> bool:
    """True for older releases, which import `humming` without checking that it is installed."""
    (package,) = importlib.util.find_spec("vllm").submodule_search_locations  # type: ignore[union-attr, misc]
    return not (Path(package) / "utils" / "humming.py").exists()


class _MockModule(types.ModuleType):
    """A module in which every name is a mock."""

    __version__ = "3.6.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        mock = MagicMock(name=f"{self.__name__}.{name}")
        mock.__name__ = name
        setattr(self, name, mock)
        return mock


class MockFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds mocks for packages that are absent on a CPU and for compiled modules."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        root = name.partition(".")[0]
        is_mocked = root in _ABSENT or name in _COMPILED or (root == "humming" and _needs_humming())
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_mocked else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _MockModule(spec.name)
        module.__path__ = []
        module.__file__ = f"{spec.name}/__init__.py"
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: the names are created on access."""


def use_device(kind: str) -> None:
    """Make vLLM detect a device, cuda or ascend. Does nothing for `cpu`."""
    if kind == "cpu":
        return
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    sys.meta_path.insert(0, MockFinder())
    torch.accelerator.synchronize = lambda *_: None
    torch.Tensor.pin_memory = lambda tensor, *_: tensor
    if kind == "ascend":
        import torch_npu

        torch.utils.rename_privateuse1_backend("npu")
        torch._register_device_module("npu", torch_npu.npu)
        torch.distributed.is_hccl_available = lambda: True
    import vllm.platforms as platforms

    if kind == "cuda":
        from vllm.platforms.cuda import NonNvmlCudaPlatform as Platform
        from vllm.platforms.interface import DeviceCapability

        Platform.get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
        Platform.get_device_name = classmethod(lambda cls, device_id=0: "NVIDIA H100 80GB HBM3")
        Platform.get_device_total_memory = classmethod(lambda cls, device_id=0: 80 * GIB)
        Platform.device_count = classmethod(lambda cls: 8)
        Platform.is_cumem_allocator_available = classmethod(lambda cls: True)
        for name in ("fp8", "block_fp8"):
            setattr(torch.ops._C, f"cutlass_scaled_mm_supports_{name}", lambda capability: True)
    else:
        with suppress(ImportError):  # a source archive lacks it
            pass
        sys.modules.setdefault("vllm_ascend._build_info", SimpleNamespace(__device_type__="A2"))  # type: ignore[arg-type]
        from vllm_ascend.platform import NPUPlatform as Platform

        Platform.get_device_name = classmethod(lambda cls, device_id=0: "Ascend910B3")
        Platform.get_device_total_memory = classmethod(lambda cls, device_id=0: 64 * GIB)
    platforms._current_platform = Platform()
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()  # a subprocess would have no mocks


def examine(kind: str, model_dir: str, rollout: str) -> None:
    """Run all checks below and print their findings by name; an exception in a check is its finding.

    rollout: configuration of a rollout server as JSON.
    """
    use_device(kind)
    import vllm.config.vllm

    vllm.config.vllm.HAS_TRITON = kind != "cpu"
    config = RolloutConfig.model_validate_json(rollout)
    set_environment(config.vllm)
    engine = VllmEngine(Path(model_dir), config, precision="bfloat16")

    def reloads(quantization: Quantization) -> list[str]:
        if kind == "cpu" or (kind == "ascend" and quantization == "fp8"):
            return []
        settings = config.vllm.model_copy(update={"enforce_eager": True, "quantization": quantization})
        eager = VllmEngine(Path(model_dir), config.model_copy(update={"vllm": settings}), precision="bfloat16")
        return wrong_reloads(kind, engine_config(eager), quantization)

    parts: dict[str, Callable[[], Any]] = {
        "names": missing_names,
        "effective": lambda: effective(engine),
        "calls": lambda: refused_calls(engine),
        "outputs": lambda: asyncio.run(uncounted_outputs()),
        "worker": lambda: worker_conflicts(kind),
        "update": lambda: unfinished_update(kind),
        "logprobs": lambda: sampled_logprobs(kind),
        "proof": lambda: asyncio.run(proven(kind)),
        "truncation": lambda: truncated_logprobs(kind),
        "head": lambda: float32_head(engine),
        "reload": lambda: reloads("none"),
        "reload int8": lambda: reloads("int8"),
        "reload fp8": lambda: reloads("fp8"),
        "device": lambda: unshared_device(kind, engine),
    }
    found: dict[str, Any] = {}
    for name, part in parts.items():
        try:
            found[name] = part()
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            found[name] = [f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"]
    print("\n" + json.dumps(found), flush=True)
    os._exit(0)  # threads of mocks do not end by themselves


def missing_names() -> list[str]:
    """Names of async_grpo/utils/private_names.py that this release lacks."""
    users = ("engine", "engine worker")
    found = {name: private_names.explain_missing(name) for user in users for name in PRIVATE_NAMES[user].names}
    return [f"{name}: {why}" for name, why in found.items() if why]


def effective(engine: VllmEngine) -> dict[str, Any]:
    """vLLM's effective settings for the engine's arguments."""
    config = engine_config(engine)
    scheduler = config.scheduler_config
    compilation = config.compilation_config
    return {
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "chunked_prefill": scheduler.enable_chunked_prefill,
        "prefix_cache": config.cache_config.enable_prefix_caching,
        "eager": config.model_config.enforce_eager,
        "graphs": compilation.cudagraph_mode.name,
        "largest_graph": max(compilation.cudagraph_capture_sizes or [0]),
        "logprobs_mode": config.model_config.logprobs_mode,
        "max_logprobs": config.model_config.max_logprobs,
        "runner": 2 if config.use_v2_model_runner else 1,
        "backend": config.weight_transfer_config.backend,
    }


def engine_config(engine: VllmEngine) -> Any:
    """vLLM's configuration of the engine."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    # AsyncLLM.from_engine_args, which the engine calls, has this context by default.
    return AsyncEngineArgs(**engine._engine_arguments()).create_engine_config(UsageContext.ENGINE_CONTEXT)


def refused_calls(engine: VllmEngine) -> list[str]:
    """Run the engine's code with a mock AsyncLLM that accepts only the calls of this release."""
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = create_autospec(AsyncLLM, instance=True)
    llm.output_processor = SimpleNamespace(request_states={})
    engine._llm = llm
    engine._stop_tokens = (2,)
    asyncio.run(_use(engine, llm))
    used = {call[0] for call in llm.method_calls}
    wanted = {
        *("init_weight_transfer_engine", "collective_rpc", "start_weight_update", "pause_generation", "abort"),
        *("update_weights", "finish_weight_update", "resume_generation", "generate", "sleep", "wake_up", "shutdown"),
    }
    return [f"AsyncLLM.{name} was not called" for name in sorted(wanted - used)]


async def _use(engine: VllmEngine, llm: Any) -> None:
    from rollout_server.engines.base import GenerationRequest
    from rollout_server.engines.vllm.requests import EngineRequest

    llm.engine_core = SimpleNamespace(outputs_queue=asyncio.Queue())
    llm.output_handler = asyncio.ensure_future(_take_outputs(llm.engine_core.outputs_queue))
    await engine._transfer.initialize_workers(llm)
    await engine._replace_weights(HeldWeights.in_store(Path("store"), epoch=1, version=1), "keep")
    request = GenerationRequest("name", (1, 2), 4, temperature=0.8, seed=1)
    for wants_vocabulary in (False, True):
        llm.generate.return_value = _outputs()
        engine_request = EngineRequest("name#1", 1, interruptible=True)
        engine_request.wants_vocabulary = wants_vocabulary
        async for _ in engine._submit_request(request, engine_request):
            pass
    await engine.sleep()
    await engine.wake()
    await engine.aclose()
    llm.output_handler.cancel()


async def _take_outputs(queue: asyncio.Queue[Any]) -> None:
    while True:
        await queue.get()


async def _outputs() -> Any:
    yield None


async def uncounted_outputs() -> list[str]:
    """Check that `wait_for_outputs` returns after this release's output handler has processed all queued outputs."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import AsyncMPClient

    from rollout_server.engines.vllm.requests import wait_for_outputs

    llm = object.__new__(AsyncLLM)
    client = object.__new__(AsyncMPClient)
    processor = MagicMock()
    processed: list[Any] = []
    processor.process_outputs.side_effect = lambda outputs, *_, **__: (
        processed.extend(outputs) or SimpleNamespace(request_outputs=[], reqs_to_abort=[])
    )
    for owner in (llm, client):
        vars(owner)["shutdown"] = lambda *_, **__: None  # which their __del__ calls
    vars(client).update(outputs_queue=asyncio.Queue(), _ensure_output_queue_task=lambda: None)
    vars(llm).update(engine_core=client, output_processor=processor, output_handler=None)
    vars(llm).update(log_stats=False, logger_manager=None, renderer=MagicMock())
    llm._run_output_handler()
    made = [EngineCoreOutput(request_id=str(number), new_token_ids=[1]) for number in range(600)]
    for start in (0, 300):  # the handler yields to the event loop within each: it takes 128 at a time
        client.outputs_queue.put_nowait(EngineCoreOutputs(outputs=made[start : start + 300]))
    await wait_for_outputs(llm)
    llm.output_handler.cancel()
    return [] if processed == made else [f"{len(processed)} of {len(made)} outputs had been processed after the wait"]


def worker_conflicts(kind: str) -> list[str]:
    """Conflicts of our part of a worker with this release.

    These are abstract methods of the transfer engine that we lack, names that vLLM's worker has too, and a model runner
    that has its sampler elsewhere.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from rollout_server.engines.vllm import worker

    engine = WeightTransferEngineFactory._registry[worker.BACKEND]()
    found = [f"WeightTransferEngine.{name} is abstract, and not ours" for name in sorted(engine.__abstractmethods__)]
    workers, runners = _PARTS[kind]
    theirs = attribute(workers)
    found += [f"{workers} has {name} too" for name in vars(worker.WorkerExtension) if _hides(theirs, name)]
    found += [why for runner in runners if (why := private_names.explain_missing(f"{runner}.sampler"))]
    for name in ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"):
        found += [] if hasattr(theirs, name) else [f"{workers} has no {name}"]
    return found


def unfinished_update(kind: str) -> list[str]:
    """Run a weight update through the methods of vLLM's worker, and check that the right version is loaded."""
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from rollout_server.engines.vllm import compat, worker

    loaded: list[Any] = []
    worker.LayerwiseReload = lambda *_: SimpleNamespace(load_weights=loaded.append)
    model = torch.nn.Linear(1, 1)
    vllm_config = MagicMock()
    make = WeightTransferEngineFactory.create_engine
    given = {"config": WeightTransferConfig(backend=worker.BACKEND), "device": torch.device("cpu"), "model": model}
    given |= {"vllm_config": vllm_config, "parallel_config": vllm_config.parallel_config}
    theirs = attribute(_PARTS[kind][0])
    bare = object.__new__(theirs)
    vars(bare).update(
        weight_transfer_engine=make(**compat.accepted_arguments(make, **given)), _weight_update_active=False, rank=0,
        _weight_update_is_draft=False, _is_checkpoint_format=True, model_runner=MagicMock(model=model),
        vllm_config=vllm_config, model_config=vllm_config.model_config, device=torch.device("cpu"),
    )  # fmt: skip
    held = HeldWeights.in_store(Path("store"), epoch=1, version=7)
    bare.init_weight_transfer_engine({})
    bare.start_weight_update(**compat.accepted_arguments(bare.start_weight_update, is_checkpoint_format=False))
    bare.update_weights({"held": msgspec.json.encode(held).decode(), "dtype": "bfloat16"})
    bare.finish_weight_update(**compat.accepted_arguments(bare.finish_weight_update, weight_version="7"))
    return [] if loaded == [held] else [f"{theirs.__name__}.update_weights loaded {loaded}, not {held}"]


def unshared_device(kind: str, engine: VllmEngine) -> list[str]:
    """Obstacles to sharing the device with the trainer.

    The engine must sleep with requests in flight, which lose only their cache, and must use the configured size of the
    KV cache without measuring memory.
    """
    from vllm.v1.engine.core import EngineCore

    os.environ.pop("PYTORCH_NPU_ALLOC_CONF", None)  # vllm-ascend sets it for engines that do not sleep
    engine._sleep_mode = True
    core = MagicMock()
    config = engine_config(engine)
    sleeps = config.model_config.enable_sleep_mode
    found = [] if sleeps is (kind != "cpu") else [f"enable_sleep_mode is {sleeps}"]
    core.pause_scheduler.return_value = None
    core.model_executor.is_sleeping = False
    EngineCore.sleep(core, level=1, mode="keep")
    EngineCore.wake_up(core)
    steps = [(name, arguments) for name, _, arguments in core.mock_calls]
    if steps[0] != ("pause_scheduler", {"mode": "keep", "clear_cache": True}):
        found.append(f"EngineCore.sleep begins with {steps[0]}")
    expected = ["pause_scheduler", "model_executor.sleep", "model_executor.wake_up", "resume_scheduler"]
    found += [] if [name for name, _ in steps] == expected else [f"EngineCore sleeps and wakes by {steps}"]
    if kind == "cpu":
        return found
    bare = object.__new__(attribute(_PARTS[kind][0]))
    vars(bare).update(
        cache_config=SimpleNamespace(kv_cache_memory_bytes=5), init_snapshot=SimpleNamespace(free_memory=GIB),
        model_runner=MagicMock(), vllm_config=config, model_config=config.model_config,
        parallel_config=config.parallel_config, randomize_dummy_inputs=False,
    )  # fmt: skip
    size = bare.determine_available_memory()
    return [*found, *([] if size == 5 else [f"determine_available_memory gives {size}, not 5"])]


_PARTS = {
    "cpu": ("vllm.v1.worker.cpu_worker:CPUWorker", ("vllm.v1.worker.gpu_model_runner:GPUModelRunner",)),
    "cuda": (
        "vllm.v1.worker.gpu_worker:Worker",
        ("vllm.v1.worker.gpu_model_runner:GPUModelRunner", "vllm.v1.worker.gpu.model_runner:GPUModelRunner"),
    ),
    "ascend": (
        "vllm_ascend.worker.worker:NPUWorker",
        ("vllm_ascend.worker.model_runner_v1:NPUModelRunner",),
    ),
}
"""The worker and its model runners, by the kind of device."""


def _hides(owner: type, name: str) -> bool:
    return not name.startswith("__") and name in dir(owner)


def attribute(name: str) -> Any:
    module, _, last = name.partition(":")
    return getattr(importlib.import_module(module), last)


def sampled_logprobs(kind: str) -> list[str]:
    """Check that this release's sampler reports log-probabilities of the sampled distribution, at T = 0.8."""
    sampler = sampler_of(kind)
    report_sampled_logprobs(sampler)
    temperature = 0.8
    logits = torch.tensor([[0.0, 1.0, 2.0, 4.0], [3.0, -1.0, 0.5, 0.0]])
    output = sampler(logits.clone(), sampling_metadata(temperature, rows=2))
    tokens = output.sampled_token_ids.long()
    found = output.logprobs_tensors.logprobs[:, :1]
    expected = (logits / temperature).log_softmax(-1).gather(1, tokens.view(2, 1))
    if (found - expected).abs().max() < 1e-5:
        return []
    return [f"{type(sampler).__name__}: reports {found.tolist()}, and samples from {expected.tolist()}"]


def truncated_logprobs(kind: str) -> list[str]:
    """Check that this release reports the kept tokens of truncated sampling as `read_sampling_mask` reads them.

    Per position: the sampled token, then as many tokens as were requested in descending order, with log-probabilities
    over the kept tokens, and -inf for all others.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.logprobs import create_sample_logprobs
    from vllm.v1.engine.logprobs import LogprobsProcessor

    truncation, temperature, rows, prompt, written = Truncation(8, top_p=0.9, repetition_penalty=1.3), 0.8, 6, [1, 2], 5
    count = reported_logprobs(truncation, VOCABULARY)
    request = GenerationRequest("kept", prompt, rows, temperature, truncation=truncation)
    params = make_sampling_params(request, (2,), is_stream=False, vocabulary=VOCABULARY)

    sampler = sampler_of(kind)
    report_sampled_logprobs(sampler)
    if kind == "ascend":
        # torch_npu's operator is a mock here, so vLLM's function is in its place.
        module = importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler")
        sampler.topk_topp_sampler.apply_top_k_top_p = module.apply_top_k_top_p
    logits_NV = 2 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(2))
    metadata = dataclasses.replace(
        sampling_metadata(temperature, rows, params.num_logprobs),
        top_k=torch.full((rows,), params.top_k),
        top_p=torch.full((rows,), params.top_p),
        no_penalties=False,
        prompt_token_ids=torch.tensor([prompt] * rows),
        output_token_ids=[[written]] * rows,
        repetition_penalties=torch.full((rows,), params.repetition_penalty),
        frequency_penalties=torch.zeros(rows),
        presence_penalties=torch.zeros(rows),
    )
    output = sampler(logits_NV.clone(), metadata)
    tensors = output.logprobs_tensors
    front_end = LogprobsProcessor(None, create_sample_logprobs(params.flat_logprobs), None, 0.0, count, None)
    front_end._update_sample_logprobs(tensors.tolists())
    mask, logprobs_N = read_sampling_mask(front_end.logprobs)  # type: ignore[arg-type]

    findings = []
    if getattr(AsyncEngineArgs, "return_sampling_mask", False):
        findings.append("return_sampling_mask is on by default, and then requests without top_k are refused")
    if tensors.logprobs.shape != (rows, count + 1):
        findings.append(f"{list(tensors.logprobs.shape)} log-probabilities for {rows} positions, {count} requested")
    if (tensors.logprobs[:, 1:].diff() > 0).any():
        findings.append("the most likely tokens are not in descending order")
    for row in range(rows):
        scaled = _penalised(logits_NV[row].double(), [*prompt, written], truncation.repetition_penalty) / temperature
        scaled = scaled.log_softmax(-1).numpy()
        kept, token = kept_tokens(scaled, truncation, slack=0.0), int(output.sampled_token_ids[row, 0])
        found = set(mask.slice_rows(row, row + 1).token_ids.tolist())
        expected = scaled[token] - np.log(np.exp(scaled[sorted(kept)]).sum())
        if found != kept or abs(float(logprobs_N[row]) - expected) > 1e-5:
            findings.append(f"keeps {sorted(found)}, not {sorted(kept)}; reports {logprobs_N[row]}, not {expected}")
    return findings


def _penalised(logits_V: torch.Tensor, repeated: list[int], penalty: float) -> torch.Tensor:
    found = logits_V.clone()
    found[repeated] = torch.where(found[repeated] > 0, found[repeated] / penalty, found[repeated] * penalty)
    return found


def float32_head(engine: VllmEngine) -> list[str]:
    """Check that `check_float32_head` accepts exactly the releases that compute logits in float32 on request."""
    engine._fp32_head = True
    dtype = engine_config(engine).model_config.head_dtype
    engine._fp32_head = False
    try:
        check_float32_head()
    except ConfigError:
        return [] if dtype != torch.float32 else ["computes logits in float32, and is refused"]
    return [] if dtype == torch.float32 else [f"computes logits in {dtype}, and is accepted"]


def sampler_of(kind: str) -> Any:
    """Create this release's sampler as its model runner does."""
    if kind == "ascend":
        from vllm_ascend.sample import sampler as module

        module.get_ascend_config = lambda: SimpleNamespace(enable_reduce_sample=False, enable_async_exponential=False)
        return module.AscendSampler()
    from vllm.v1.sample.sampler import Sampler

    return Sampler(logprobs_mode=LOGPROBS_MODE)


class SamplerEngine:
    """The part of an engine that a proof uses: a table of logits by the last token, and a vLLM sampler."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.description = type(sampler).__name__
        self._logits_VV = 3 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(1))

    async def vocabulary_logprobs(self, prompt: Sequence[int]) -> Any:
        _, found = self._sample(prompt[-1], 1.0, VOCABULARY)
        row = np.empty(VOCABULARY, np.float32)
        row[found.logprob_token_ids[0].numpy()] = found.logprobs[0].numpy()
        return row

    async def generate(self, request: GenerationRequest) -> Generation:
        tokens = [request.prompt[-1]]
        logprobs = []
        for _ in range(request.max_tokens):
            token, found = self._sample(tokens[-1], request.temperature, 0)
            tokens.append(token)
            logprobs.append(float(found.logprobs[0, 0]))
        return Generation(np.array(tokens[1:], np.int32), np.array(logprobs, np.float32), [], "length")

    def _sample(self, last: int, temperature: float, logprobs: int) -> tuple[int, Any]:
        metadata = sampling_metadata(temperature, rows=1, logprobs=logprobs)
        output = self._sampler(self._logits_VV[[last]].clone(), metadata)
        return int(output.sampled_token_ids), output.logprobs_tensors


async def proven(kind: str) -> list[str]:
    """Check that the proof passes with this release's sampler only after the worker extension has set its mode."""
    findings = []
    for mode in ("raw_logprobs", LOGPROBS_MODE):
        sampler = sampler_of(kind)
        for part in (sampler, sampler.topk_topp_sampler):
            part.logprobs_mode = "raw_logprobs"
        if mode == LOGPROBS_MODE:
            report_sampled_logprobs(sampler)
        refused = ""
        try:
            await prove_logprobs(
                SamplerEngine(sampler),  # type: ignore[arg-type]
                vocabulary=VOCABULARY,
                temperature=0.8,
                precision="float32",
                timeout_s=60.0,
            )
        except LogprobsWrong as error:
            refused = str(error)
        if bool(refused) == (mode == LOGPROBS_MODE):
            findings.append(f"a sampler that reports {mode} is {refused or 'proven'}")
    return findings


def sampling_metadata(temperature: float, rows: int, logprobs: int = 0) -> Any:
    """vLLM's metadata of a batch at one temperature. `logprobs`: number of tokens reported besides the sampled one."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    known = {
        "temperature": torch.full((rows,), temperature), "all_greedy": False, "all_random": True, "generators": {},
        "max_num_logprobs": logprobs, "no_penalties": True, "output_token_ids": [[] for _ in range(rows)],
        "bad_words_token_ids": {}, "logitsprocs": LogitsProcessors(),
    }  # fmt: skip
    needed = [each for each in dataclasses.fields(SamplingMetadata) if each.default is dataclasses.MISSING]
    return SamplingMetadata(**{each.name: known.get(each.name) for each in needed})
