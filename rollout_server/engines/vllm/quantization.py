"""8-bit quantisation of the trainer's weights on their way into the engine.

    checkpoint, update --> quantize_tensors --> vLLM, which sees a checkpoint in the format of compressed-tensors

Each matrix of a layer becomes 8-bit numbers and one float32 scale per row (output channel). vLLM quantises activations
per token while it computes. Embeddings, norms, the output layer and expert routers stay as they are. Checkpoint and
updates take the same path, so the weights of a version have the same bits whether an engine started with them or was
updated to them.

The scheme is `W8A8` of compressed-tensors (https://github.com/vllm-project/compressed-tensors), which vLLM reads on
CPU and CUDA, and vllm-ascend as W8A8_DYNAMIC.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from async_grpo.config.rollout import Quantization
from rollout_server.engines.vllm.platform import LOAD_FORMAT_PREFIX, ROUTERS

_MATRIX = re.compile(r"\.\d+\..*\.weight$")
_MAX_VALUES = {torch.int8: 127.0, torch.float8_e4m3fn: torch.finfo(torch.float8_e4m3fn).max}
_DTYPES: dict[Quantization, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_MIN_SCALE = torch.finfo(torch.float32).tiny
"""Avoids a division by zero in rows of zeros."""


def quantize_tensors(
    tensors: Iterable[tuple[str, torch.Tensor]], kind: Quantization
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors, with each quantised matrix replaced by its 8-bit numbers followed by its scales."""
    for name, tensor in tensors:
        if kind == "none" or not is_quantized(name, tensor.dim()):
            yield name, tensor
        else:
            numbers, scales = quantize_matrix(tensor, kind)
            yield name, numbers
            yield f"{name}_scale", scales


def is_quantized(name: str, dimensions: int) -> bool:
    """True if a tensor of a Hugging Face checkpoint is a matrix to be quantised.

    >>> is_quantized("model.layers.3.mlp.up_proj.weight", 2), is_quantized("model.layers.3.mlp.gate.weight", 2)
    (True, False)
    >>> is_quantized("lm_head.weight", 2), is_quantized("model.layers.3.input_layernorm.weight", 1)
    (False, False)
    """
    return dimensions == 2 and bool(_MATRIX.search(name)) and not re.search(ROUTERS + r"\.weight$", name)


def quantize_matrix(matrix: torch.Tensor, kind: Quantization) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise [rows, columns] to 8-bit numbers of that shape and float32 scales [rows, 1].

    number * scale approximates the element. A row's largest element becomes the largest representable number. Rounding
    is to nearest, ties to even. A row of zeros stays zero.
    """
    dtype = _DTYPES[kind]
    values = matrix.float()
    scales = (values.abs().amax(dim=1, keepdim=True) / _MAX_VALUES[dtype]).clamp_(min=_MIN_SCALE)

    # `float()` returns the matrix itself for float32. Its memory is that of the held weights, so we must not divide in
    # place.
    numbers = values / scales if values is matrix else values.div_(scales)
    if dtype == torch.int8:
        numbers = numbers.round_()
    return numbers.to(dtype), scales


def preserve_packed_scales(model: torch.nn.Module) -> None:
    """Keep the scales of packed int8 matrices alive on CPU. Call before the first reload.

    The product reads scales at their address during packing (`b_scales_ptr` in vLLM's csrc/cpu/dnnl_helper.h). A
    layerwise reload frees that memory, and from the first update on vLLM 0.32 would compute NaN.
    """
    for _, kernel in _packed_layers(model):
        kernel.process_weights_after_loading = partial(_pack, kernel, kernel.process_weights_after_loading)


def restore_weight_attributes(model: torch.nn.Module) -> None:
    """Restore `weight = None` in packed layers that a reload left alone.

    vLLM 0.32 reads the attribute in every product, and its reload deletes it.
    """
    for layer, _ in _packed_layers(model):
        if not hasattr(layer, "weight"):
            layer.register_parameter("weight", None)


def _packed_layers(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, Any]]:
    """Layers whose int8 matrix is packed, with the vLLM kernels that own the packed matrix."""
    for layer in model.modules():
        kernel = getattr(getattr(layer, "scheme", None), "kernel", None)
        if hasattr(kernel, "dnnl_handler"):
            yield layer, kernel


def _pack(kernel: Any, process: Callable[[torch.nn.Module], None], layer: torch.nn.Module) -> None:
    process(layer)
    kernel.dnnl_handler.scales = layer.weight_scale  # a reference that keeps the memory alive


def register_loaders() -> None:
    """Register the quantising model loaders with vLLM in this process. Call before it loads a model."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    def make_loader(kind: Quantization) -> type:
        class QuantizingLoader(DefaultModelLoader):
            """vLLM's checkpoint loader, quantising what it reads."""

            def __init__(self, load_config: Any) -> None:
                load_config.load_format = "auto"
                super().__init__(load_config)

            def get_all_weights(self, *args: Any) -> Generator[tuple[str, torch.Tensor], None, None]:
                yield from quantize_tensors(super().get_all_weights(*args), kind)

        return QuantizingLoader

    for kind in _DTYPES:
        register_model_loader(f"{LOAD_FORMAT_PREFIX}{kind}")(make_loader(kind))
