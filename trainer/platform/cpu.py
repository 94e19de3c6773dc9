"""Megatron-core on CPU: the calls to torch.cuda that it makes are answered by the CPU.

Megatron-core has no CPU backend, but all its parallelism (tensor, pipeline, data, distributed
optimizer) is torch and torch.distributed. `CpuPlatform.activate` replaces the few CUDA entry points
that it uses. That depends on internals of one version, so the version is checked exactly, and the
replacement happens only in a process that asked for it and before megatron is imported.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import resource
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import psutil
import torch
import torch.utils._device

from async_grpo.config.trainer import TrainerConfig
from async_grpo.errors import ConfigError
from async_grpo.private_names import check_private_names
from trainer.platform.base import MemoryUse, require_megatron
from trainer.platform.products import multiply_with_onednn

CPU = torch.device("cpu")

_FACTORIES = (
    *("tensor", "as_tensor", "empty", "zeros", "ones", "full", "arange", "linspace", "eye", "empty_strided"),
    *("rand", "randn", "randint", "randperm"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
)


class CpuPlatform:
    """Gloo, float32 or bfloat16, a pure-PyTorch layer spec."""

    name = "cpu"
    device = "cpu"
    backend = "gloo"

    def activate(self, threads: int) -> None:
        """Install the replacements and set the number of torch threads. Raises ConfigError."""
        _check_environment()
        torch.set_num_threads(threads)
        # "Transformer Engine / Apex is not installed": so it is meant. And megatron uses older names of torch's.
        warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
        for caller in ("megatron", "torch.distributed"):
            warnings.filterwarnings("ignore", category=FutureWarning, module=caller)
        # Fills a cache of the factories: built after they are wrapped, `torch.device("meta")` as a
        # context (which transformers uses) would silently stop working.
        torch.utils._device._device_constructors()
        _answer_device_queries()
        _answer_random_state()
        _redirect_factories()
        _show_optimizers_cuda_types()
        _patch_megatron_random()
        _patch_megatron_experts()
        multiply_with_onednn()

    def configure(self, config: TrainerConfig) -> None:
        """Nothing stands below Megatron here."""

    def layer_spec(self, config: Any) -> Any:
        """RMSNorm and packed attention in plain PyTorch."""
        from trainer.model.spec import block_spec

        return block_spec(config)

    def synchronize(self) -> None:
        """Operations of the CPU are done when they return."""

    def memory(self) -> MemoryUse:
        """Of this process; its peak is that of its whole life, which Linux does not reset."""
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        return MemoryUse(psutil.Process().memory_info().rss, peak_bytes, psutil.virtual_memory().total)

    def reset_peak_memory(self) -> None:
        """Linux does not."""

    def peak_flops(self, precision: str) -> float | None:
        """Not known: it depends on cores, clock and instruction set."""
        return None


def _check_environment() -> None:
    if "megatron.core" in sys.modules:
        raise ConfigError(
            "the cpu platform must be activated before megatron is imported, and it already is: "
            "megatron would keep calling CUDA. Activate the platform first thing in the process"
        )
    if torch.cuda.is_available():
        raise ConfigError(
            "trainer.platform is cpu, but torch sees a CUDA device, whose calls would be redirected to the "
            "CPU. Hide it with CUDA_VISIBLE_DEVICES=''"
        )
    require_megatron("cpu")
    check_private_names("trainer on CPU, torch")


class _Stream:
    """CPU operations are synchronous: there is nothing to wait for."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()


class _Event:
    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self._at_s = 0.0

    def record(self, stream: Any = None) -> None:
        self._at_s = time.perf_counter()

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: _Event) -> float:
        return (end._at_s - self._at_s) * 1e3


def _answer_device_queries() -> None:
    stream = _Stream()
    torch.cuda.current_device = lambda: CPU
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.Stream, torch.cuda.Event = _Stream, _Event
    torch.cuda.current_stream = torch.cuda.default_stream = lambda device=None: stream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.Tensor.record_stream = lambda self, stream: None


def _answer_random_state() -> None:
    """The default CPU generator plays the part of the device's."""
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda device="cuda": torch.get_rng_state()
    torch.cuda.set_rng_state = torch.cuda.random.set_rng_state = _set_rng_state
    torch.cuda.manual_seed = torch.cuda.manual_seed_all = _seed


def _set_rng_state(state: Any, device: Any = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(state)


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _redirect_factories() -> None:
    """`device="cuda"` means the CPU, in tensor factories, `.to` and `.cuda`."""
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.to, torch.nn.Module.to = _to_cpu(torch.Tensor.to), _to_cpu(torch.nn.Module.to)
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *args, **kwargs: self


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return call


def _to_cpu(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and _is_cuda(args[0]):
            args = (CPU, *args[1:])
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return method(self, *args, **kwargs)

    return call


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def _show_optimizers_cuda_types() -> None:
    """Megatron's optimizers accept only parameters whose `type()` is `torch.cuda.*`.

    The caller is looked at, so that everything else still sees the true name.
    """
    original = torch.Tensor.type

    def seen_type(self: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return original(self, dtype, *args, **kwargs)
        name: str = original(self)
        if "/megatron/core/optimizer/" in sys._getframe(1).f_code.co_filename:
            return name.replace("torch.", "torch.cuda.", 1)
        return name

    torch.Tensor.type = seen_type


def _patch_megatron_random() -> None:
    """Without CUDA, megatron's own setter only queues the state: a silent no-op."""
    import megatron.core.tensor_parallel.random as megatron_random

    check_private_names("trainer on CPU")  # a name that has moved would be replaced in vain
    megatron_random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = _set_rng_state
    logging.getLogger(megatron_random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


def _patch_megatron_experts() -> None:
    """Without CUDA, tensors of split sizes are not turned into lists; without Transformer Engine, a name is missing."""
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import torch.distributed as dist

    exchange = dist.all_to_all_single

    @functools.wraps(exchange)
    def all_to_all_single(
        output: Any, input: Any, output_split_sizes: Any = None, input_split_sizes: Any = None, **options: Any
    ) -> Any:
        return exchange(output, input, _listed(output_split_sizes), _listed(input_split_sizes), **options)

    dist.all_to_all_single = all_to_all_single
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _listed(sizes: Any) -> Any:
    return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes
