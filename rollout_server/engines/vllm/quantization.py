"""Matrices of 8-bit numbers, made from the trainer's weights as these enter the engine.

    checkpoint, update --> quantized_tensors --> vLLM, to which it is a checkpoint of compressed-tensors

Each matrix of a layer becomes 8-bit numbers and one float32 scale for every row, which is an output channel; vLLM
quantises activations for each token while it computes. Embeddings, norms, the output layer and the routers of experts
stay as they are. The checkpoint and every update take the same way, so weights of a version are the same bits whether
an engine started with them or was given them.

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
from rollout_server.engines.vllm.platform import LOAD_FORMAT, ROUTERS

_MATRIX = re.compile(r"\.\d+\..*\.weight$")
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: torch.finfo(torch.float8_e4m3fn).max}
_DTYPES: dict[Quantization, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_LEAST_SCALE = torch.finfo(torch.float32).tiny


def quantized_tensors(
    tensors: Iterable[tuple[str, torch.Tensor]], kind: Quantization
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors under their names; instead of a matrix of a layer its 8-bit numbers, and its scales after it."""
    for name, tensor in tensors:
        if kind == "none" or not is_quantized(name, tensor.dim()):
            yield name, tensor
        else:
            numbers, scales = quantized_matrix(tensor, kind)
            yield name, numbers
            yield f"{name}_scale", scales


def is_quantized(name: str, dimensions: int) -> bool:
    """Whether a tensor of a Hugging Face checkpoint is a matrix that is quantised.

    >>> is_quantized("model.layers.3.mlp.up_proj.weight", 2), is_quantized("model.layers.3.mlp.gate.weight", 2)
    (True, False)
    >>> is_quantized("lm_head.weight", 2), is_quantized("model.layers.3.input_layernorm.weight", 1)
    (False, False)
    """
    return dimensions == 2 and bool(_MATRIX.search(name)) and not re.search(ROUTERS + r"\.weight$", name)


def quantized_matrix(matrix: torch.Tensor, kind: Quantization) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, columns] -> 8-bit numbers of that shape, and float32 scales [rows, 1]: number * scale is near the element.

    A row's largest element becomes the largest number there is; what lies between two numbers goes to the nearer one,
    to the even one in the middle. A row of zeros stays one.
    """
    dtype = _DTYPES[kind]
    values = matrix.float()
    scales = (values.abs().amax(dim=1, keepdim=True) / _LARGEST[dtype]).clamp_(min=_LEAST_SCALE)
    numbers = values.div_(scales) if values is not matrix else values / scales
    return (numbers.round_() if dtype == torch.int8 else numbers).to(dtype), scales


def keep_scales(model: torch.nn.Module) -> None:
    """Before the first reload: have the packed int8 matrices of a CPU keep the scales that they were packed with.

    Their product reads scales from where they were then (`b_scales_ptr` in vLLM's csrc/cpu/dnnl_helper.h), and a
    layerwise reload frees that memory: without this, vLLM 0.32 computes NaN from the first update on.
    """
    for _, kernel in _packed(model):
        kernel.process_weights_after_loading = partial(_pack, kernel, kernel.process_weights_after_loading)


def renew_packed(model: torch.nn.Module) -> None:
    """After a reload: layers that it left alone know again that they have no weight beside the packed one.

    vLLM asks for the attribute in every product, and its reload deletes it (0.32).
    """
    for layer, _ in _packed(model):
        if not hasattr(layer, "weight"):
            layer.register_parameter("weight", None)


def _packed(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, Any]]:
    """Layers whose int8 matrix is packed, and vLLM's kernels that hold it."""
    for layer in model.modules():
        kernel = getattr(getattr(layer, "scheme", None), "kernel", None)
        if hasattr(kernel, "dnnl_handler"):
            yield layer, kernel


def _pack(kernel: Any, process: Callable[[torch.nn.Module], None], layer: torch.nn.Module) -> None:
    process(layer)
    kernel.dnnl_handler.scales = layer.weight_scale


def register_loaders() -> None:
    """Make the loaders known to vLLM in this process, where it is about to load a model."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    def loader(kind: Quantization) -> type:
        class QuantizingLoader(DefaultModelLoader):
            """vLLM's loader of checkpoints, which quantises what it reads."""

            def __init__(self, load_config: Any) -> None:
                load_config.load_format = "auto"
                super().__init__(load_config)

            def get_all_weights(self, *args: Any) -> Generator[tuple[str, torch.Tensor], None, None]:
                yield from quantized_tensors(super().get_all_weights(*args), kind)

        return QuantizingLoader

    for kind in _DTYPES:
        register_model_loader(f"{LOAD_FORMAT}{kind}")(loader(kind))
