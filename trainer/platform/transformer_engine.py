"""Layers of NVIDIA's Transformer Engine in the places of our own.

Norms and linear layers always; attention where its kernels take packed sequences: in bfloat16, and with no sequence
split over ranks (there our own attention gathers keys and values). Norms stay modules of their own, beside the linear
layers: fused, they would carry other names.

Has not run on a GPU yet (docs/platforms.md).
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from async_grpo.versions import INSTALL_TRANSFORMER_ENGINE
from trainer.platform.base import missing
from trainer.platform.swap import swap


def with_transformer_engine(spec: Any, config: Any) -> Any:
    """`spec` for a TransformerConfig, in Transformer Engine's layers. Raises DependencyError if it does not load."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    from trainer.model.spec import PackedAttention, RMSNorm

    theirs = _classes()
    by = {
        RMSNorm: theirs["TENorm"],
        ColumnParallelLinear: theirs["TEColumnParallelLinear"],
        RowParallelLinear: theirs["TERowParallelLinear"],
    }
    if config.params_dtype == torch.bfloat16 and config.context_parallel_size == 1:
        by[PackedAttention] = theirs["TEDotProductAttention"]
    return swap(spec, by)


def _classes() -> dict[str, Any]:
    """Megatron's wrappers, which exist without Transformer Engine too, but not usably."""
    from megatron.core.extensions import transformer_engine as extension

    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError) as error:  # built for another torch, it fails while it loads
        raise missing("cuda", "transformer_engine", error, INSTALL_TRANSFORMER_ENGINE) from error
    names = ("TENorm", "TEColumnParallelLinear", "TERowParallelLinear", "TEDotProductAttention")
    return {name: getattr(extension, name) for name in names}
