"""Matrix products in float32 on AMD processors, by oneDNN.

PyTorch gives them to MKL, which has no AVX-512 for processors of other makers: half of the speed stays unused. oneDNN,
which PyTorch contains and uses for bfloat16, has it. Same precision: sums in float32, in another order.
"""

from __future__ import annotations

import functools
import warnings
from pathlib import Path

import torch

_CPUINFO = Path("/proc/cpuinfo")


def multiply_with_onednn() -> bool:
    """In this process, from now on, where it gains: on an AMD processor with AVX-512. Returns whether it does."""
    gains = "AuthenticAMD" in _cpuinfo() and torch.backends.cpu.get_cpu_capability() == "AVX512"
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


def _cpuinfo() -> str:
    return _CPUINFO.read_text(encoding="utf-8") if _CPUINFO.exists() else ""
