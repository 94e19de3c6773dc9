"""Quantised matrices equal those of compressed-tensors, the format that vLLM reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from async_grpo.config.rollout import Quantization
from rollout_server.engines.vllm.platform import quantization_arguments
from rollout_server.engines.vllm.quantization import quantize_matrix, quantize_tensors

MATRIX = torch.randn(48, 64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_equals_compressed_tensors(dtype: torch.dtype) -> None:
    library = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils.helpers import calculate_qparams

    matrix = MATRIX.to(dtype)
    args = library.QuantizationArgs(**_group("fp8")["weights"])
    ends = (matrix.float().amin(1, keepdim=True), matrix.float().amax(1, keepdim=True))
    scales, zero = calculate_qparams(*ends, args)
    numbers, own_scales = quantize_matrix(matrix, "fp8")
    assert torch.equal(own_scales, scales)
    assert torch.equal(numbers.float(), quantize(matrix.float(), scales, zero, args, dtype=numbers.dtype).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_rounds_to_nearest_and_uses_the_full_range(dtype: torch.dtype) -> None:
    matrix = MATRIX.to(dtype)
    numbers, scales = quantize_matrix(matrix, "int8")
    assert ((numbers * scales - matrix.float()).abs() <= scales / 2 * (1 + 1e-5)).all()
    assert (numbers.abs().amax(1) == 127).all()
    assert torch.equal(matrix, MATRIX.to(dtype))  # the input is not modified


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_rows_of_zeros_and_tiny_numbers_stay_finite(kind: Quantization) -> None:
    matrix = torch.zeros(2, 4)
    matrix[1] = 1e-42
    numbers, scales = quantize_matrix(matrix, kind)
    assert (numbers.float() * scales).isfinite().all()
    assert (numbers[0].float() == 0).all()


def test_only_layer_matrices_are_quantised() -> None:
    names = {
        "model.embed_tokens.weight": 2,
        "model.layers.0.self_attn.q_proj.weight": 2,
        "model.layers.0.self_attn.q_proj.bias": 1,
        "model.layers.0.mlp.gate.weight": 2,
        "model.layers.0.mlp.experts.3.gate_proj.weight": 2,
        "model.layers.0.input_layernorm.weight": 1,
        "lm_head.weight": 2,
    }
    tensors = {name: torch.ones([2] * dimensions) for name, dimensions in names.items()}
    quantised = dict(quantize_tensors(tensors.items(), "int8"))
    int8_names = {name for name, tensor in quantised.items() if tensor.dtype == torch.int8}
    assert int8_names == {"model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.experts.3.gate_proj.weight"}
    assert set(quantised) == set(names) | {f"{name}_scale" for name in int8_names}
    assert all(quantised[name] is tensor for name, tensor in tensors.items() if name not in int8_names)
    assert dict(quantize_tensors(tensors.items(), "none")) == tensors


def _group(kind: Quantization) -> dict[str, Any]:
    scheme = quantization_arguments(kind)["hf_overrides"]["quantization_config"]
    group: dict[str, Any] = scheme["config_groups"]["group_0"]
    return group
