"""What `CpuPlatform` replaces in torch and Megatron-core, so that their CUDA calls are answered by the CPU.

It also gives float32 matrix products on AMD processors to oneDNN. PyTorch gives them to MKL, which has no AVX-512 for
processors of other makers: half of the speed stays unused. oneDNN, which PyTorch contains and uses for bfloat16, has
it. Same precision: sums in float32, in another order.
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
    *("tensor", "as_tensor", "empty", "zeros", "ones", "full", "arange", "linspace", "eye", "empty_strided"),
    *("rand", "randn", "randint", "randperm"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
)

_CPUINFO = Path("/proc/cpuinfo")


def patch_for_cpu() -> None:
    """Install all replacements in this process. Imports megatron, which must not have been imported before."""
    # Fills a cache of the factories: built after they are wrapped, `torch.device("meta")` as a
    # context (which transformers uses) would silently stop working.
    torch.utils._device._device_constructors()
    _answer_device_queries()
    _answer_random_state()
    _redirect_factories()
    show_optimizers_cuda_types()
    _patch_megatron_random()
    _patch_megatron_experts()
    multiply_with_onednn()


class _Done:
    """A stream or an event: operations of the CPU are done when they return, so there is nothing to wait for."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def _at_once(self, *_args: Any, **_kwargs: Any) -> _Done:
        return self

    wait_stream = wait_event = record_event = record = wait = synchronize = _at_once


def _answer_device_queries() -> None:
    stream = _Done()
    torch.cuda.current_device = lambda: CPU
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.Stream = torch.cuda.Event = _Done
    torch.cuda.current_stream = torch.cuda.default_stream = lambda device=None: stream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.Tensor.record_stream = lambda self, stream: None


def _answer_random_state() -> None:
    """The default CPU generator takes the place of the device's."""
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda device="cuda": torch.get_rng_state()
    torch.cuda.set_rng_state = torch.cuda.random.set_rng_state = _set_rng_state
    torch.cuda.manual_seed = torch.cuda.manual_seed_all = lambda seed: torch.default_generator.manual_seed(int(seed))


def _set_rng_state(state: Any, device: Any = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(state)


def _redirect_factories() -> None:
    """`device="cuda"` means the CPU, in tensor factories, `.to` and `.cuda`."""
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.to, torch.nn.Module.to = _on_cpu(torch.Tensor.to), _on_cpu(torch.nn.Module.to)
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *args, **kwargs: self


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if len(args) > 1 and _is_cuda(args[1]):  # of `.to`
            args = (args[0], CPU, *args[2:])
        return function(*args, **kwargs)

    return call


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def show_optimizers_cuda_types() -> None:
    """Megatron's optimizers accept only parameters whose `type()` is `torch.cuda.*`.

    Only callers in Megatron's optimizers see the changed name.
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
    """Without CUDA, tensors of split sizes are not turned into lists."""
    import torch.distributed as dist

    exchange = dist.all_to_all_single

    @functools.wraps(exchange)
    def all_to_all_single(
        output: Any, input: Any, output_split_sizes: Any = None, input_split_sizes: Any = None, **options: Any
    ) -> Any:
        return exchange(output, input, _listed(output_split_sizes), _listed(input_split_sizes), **options)

    dist.all_to_all_single = all_to_all_single


def _listed(sizes: Any) -> Any:
    return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes


def multiply_with_onednn() -> bool:
    """Use oneDNN from now on if that is faster, on an AMD processor with AVX-512. Returns whether it is."""
    cpuinfo = _CPUINFO.read_text(encoding="utf-8") if _CPUINFO.exists() else ""
    gains = "AuthenticAMD" in cpuinfo and torch.backends.cpu.get_cpu_capability() == "AVX512"
    if not (gains and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    _override()
    return True


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`left` [m, k] times `right` [k, n], of any strides: `aten::mm` below autograd.

    The operator is the one that torch.compile puts in the place of a linear layer on a CPU.
    """
    if left.dtype is torch.float32 and left.numel() and right.numel():
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(left, right.t(), None, "none", [], "")
        return result
    empty = left.new_empty(left.shape[0], right.shape[1])
    return torch.mm(left, right, out=empty)  # another operator, which keeps its kernel


@functools.cache
def _override() -> torch.library.Library:
    """Kept, because the override ends with the object."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that there was a kernel before
        library.impl("mm", product, "CPU")
    return library
