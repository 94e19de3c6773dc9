"""Patches of torch and Megatron-core that make their CUDA calls run on the CPU.

Also computes float32 matrix products on AMD processors with oneDNN. PyTorch uses MKL for them, which does not use
AVX-512 on AMD processors: half of the speed is lost. oneDNN, which PyTorch contains and uses for bfloat16, does. The
precision is the same: sums in float32, in another order.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.utils._device

from async_grpo.utils.private_names import check_private_names

CPU = torch.device("cpu")

_FACTORIES = (
    "tensor",
    "as_tensor",
    "empty",
    "zeros",
    "ones",
    "full",
    "arange",
    "linspace",
    "eye",
    "empty_strided",
    "rand",
    "randn",
    "randint",
    "randperm",
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
)
"""Functions of torch that create tensors and take a `device`."""

_CPUINFO = Path("/proc/cpuinfo")


def patch_for_cpu() -> None:
    """Install all patches in this process. Imports megatron, which must not have been imported before."""
    # Fill torch's cache of its factories before we wrap them. If the cache is built afterwards, `torch.device("meta")`
    # as a context, which transformers uses, silently has no effect.
    torch.utils._device._device_constructors()

    _patch_streams()
    _patch_random_state()
    _redirect_factories()
    report_cuda_types_to_optimizers()
    _patch_megatron_random()
    _patch_megatron_experts()
    use_onednn_products()


class _CompletedWork:
    """A stream or an event. CPU operations are complete when they return, so waiting returns immediately."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def _return_self(self, *_args: Any, **_kwargs: Any) -> _CompletedWork:
        return self

    wait_stream = wait_event = record_event = record = wait = synchronize = _return_self


def _patch_streams() -> None:
    stream = _CompletedWork()
    torch.cuda.current_device = lambda: CPU
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.Stream = torch.cuda.Event = _CompletedWork
    torch.cuda.current_stream = torch.cuda.default_stream = lambda device=None: stream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.Tensor.record_stream = lambda self, stream: None


def _patch_random_state() -> None:
    """Use the default CPU generator instead of the device's."""
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda device="cuda": torch.get_rng_state()
    torch.cuda.set_rng_state = torch.cuda.random.set_rng_state = _set_rng_state
    torch.cuda.manual_seed = torch.cuda.manual_seed_all = lambda seed: torch.default_generator.manual_seed(int(seed))


def _set_rng_state(state: Any, device: Any = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(state)


def _redirect_factories() -> None:
    """Make `device="cuda"` mean the CPU in tensor factories, `.to` and `.cuda`."""
    for name in _FACTORIES:
        setattr(torch, name, _redirect_to_cpu(getattr(torch, name)))
    torch.Tensor.to = _redirect_to_cpu(torch.Tensor.to)
    torch.nn.Module.to = _redirect_to_cpu(torch.nn.Module.to)
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *args, **kwargs: self


def _redirect_to_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call_on_cpu(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if len(args) > 1 and _is_cuda(args[1]):  # tensor.to("cuda")
            args = (args[0], CPU, *args[2:])
        return function(*args, **kwargs)

    return call_on_cpu


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


def report_cuda_types_to_optimizers() -> None:
    """Make `Tensor.type()` return `torch.cuda.*` in Megatron's optimizers, which refuse other parameters.

    Other callers get the true name.
    """
    original_type = torch.Tensor.type

    def type_for_caller(self: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return original_type(self, dtype, *args, **kwargs)
        name: str = original_type(self)
        if "/megatron/core/optimizer/" in sys._getframe(1).f_code.co_filename:
            return name.replace("torch.", "torch.cuda.", 1)
        return name

    torch.Tensor.type = type_for_caller


def _patch_megatron_random() -> None:
    """Replace Megatron's setter of the random state. Without CUDA it only queues the state, so it has no effect."""
    import megatron.core.tensor_parallel.random as megatron_random

    check_private_names("trainer on CPU")  # if Megatron has renamed one, replacing it would have no effect
    megatron_random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = _set_rng_state
    logging.getLogger(megatron_random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


def _patch_megatron_experts() -> None:
    """Accept tensors as split sizes in `all_to_all_single`. Without CUDA, Megatron does not convert them to lists."""
    import torch.distributed as dist

    exchange = dist.all_to_all_single

    @functools.wraps(exchange)
    def all_to_all_single(
        output: Any, input: Any, output_split_sizes: Any = None, input_split_sizes: Any = None, **options: Any
    ) -> Any:
        return exchange(output, input, _as_list(output_split_sizes), _as_list(input_split_sizes), **options)

    dist.all_to_all_single = all_to_all_single


def _as_list(sizes: Any) -> Any:
    return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes


def use_onednn_products() -> bool:
    """Use oneDNN for float32 products where it is faster: on AMD processors with AVX-512. Return True if it is used."""
    cpuinfo = _CPUINFO.read_text(encoding="utf-8") if _CPUINFO.exists() else ""
    is_faster = "AuthenticAMD" in cpuinfo and torch.backends.cpu.get_cpu_capability() == "AVX512"
    has_operator = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if not (is_faster and has_operator):
        return False
    _override_mm()
    return True


def onednn_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`left` [m, k] times `right` [k, n], of any strides: `aten::mm` below autograd.

    Calls the operator that torch.compile uses for linear layers on a CPU.
    """
    if left.dtype is torch.float32 and left.numel() and right.numel():
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(left, right.t(), None, "none", [], "")
        return result
    empty = left.new_empty(left.shape[0], right.shape[1])
    # `mm` with `out` is another operator, whose kernel we do not override: plain `mm` would call this function again.
    return torch.mm(left, right, out=empty)


@functools.cache
def _override_mm() -> torch.library.Library:
    """Override `aten::mm`. The cache keeps the library alive: torch removes the override when it is collected."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # torch warns about the earlier kernel
        library.impl("mm", onednn_product, "CPU")
    return library
