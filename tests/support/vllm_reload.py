"""Reloads the weights of a small Qwen2 made of a release's own layers: part of `vllm_releases`.

On CUDA and Ascend the layers are those of the device, their tensors are the CPU's, and nothing is computed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from async_grpo.config.rollout import Quantization
from async_grpo.weights.base import HeldWeights
from async_grpo.weights.manifest import TensorLayout, TensorSpec
from rollout_server.engines.vllm.compat import find_vllm_api
from rollout_server.engines.vllm.quantization import quantize_tensors
from rollout_server.engines.vllm.reload import LayerwiseReload

CHANGED = "model.layers.1.mlp.gate_proj.weight"
UNREAD = "weight_offset"
"""Parameter that vllm-ascend creates for all int8 matrices, and reads only for asymmetric ones."""
_OPERATORS = (
    "silu_and_mul(Tensor! out, Tensor input) -> ()",
    "rms_norm(Tensor! out, Tensor input, Tensor weight, float epsilon) -> ()",
    "fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor weight, float epsilon) -> ()",
    "rotary_embedding(Tensor positions, Tensor! query, Tensor!? key, int size, Tensor cache, bool neox) -> ()",
)
"""Compiled operators of vLLM for CUDA that layers look up at construction."""
Tensors = dict[str, torch.Tensor]


def wrong_reloads(kind: str, config: Any, quantization: Quantization = "none") -> list[str]:
    """Reload all weights, then one changed tensor, and return what is wrong.

    Every parameter must equal that of a model loaded with these weights, and must not move in memory.
    """
    from vllm.config import set_current_vllm_config

    torch.set_default_dtype(torch.bfloat16)
    _prepare(kind, config)
    with set_current_vllm_config(config):
        _initialize_process_group()
        shapes = _shapes(config.model_config.hf_config)
        model = _model(config, _random(shapes), quantization)
        addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
        reader = _Reader(_random(shapes))
        reload = LayerwiseReload(find_vllm_api(), model, config.model_config, quantization)
        reload._source = SimpleNamespace(open=lambda weights: reader)  # type: ignore[assignment]
        problems = []
        for version in (1, 2):
            reload.load_weights(HeldWeights.in_store(Path("store"), epoch=1, version=version))
            expected = dict(_model(config, reader.tensors, quantization).named_parameters())
            for name, parameter in model.named_parameters():
                if name.endswith(UNREAD):
                    continue
                if not torch.equal(parameter, expected[name]):
                    problems.append(f"version {version}: {name} is wrong")
                if parameter.data_ptr() != addresses[name]:
                    problems.append(f"version {version}: {name} has moved")
            reader.change(CHANGED)
    return problems


@cache
def _initialize_process_group() -> None:
    """Make this process a group by itself; layers need one."""
    from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel

    with tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, backend="gloo")
        initialize_model_parallel(1)


@cache
def _define_operators() -> torch.library.Library:
    """Define the operators. Cached, because the definitions end with the object."""
    library = torch.library.Library("_C", "FRAGMENT")
    for schema in _OPERATORS:
        library.define(schema)
    return library


def _prepare(kind: str, config: Any) -> None:
    if kind == "cuda":
        _define_operators()
    elif kind == "ascend":
        from vllm_ascend.ascend_config import init_ascend_config
        from vllm_ascend.utils import register_ascend_customop

        init_ascend_config(config)
        register_ascend_customop(config)  # as its worker does


def _model(config: Any, tensors: Tensors, quantization: Quantization) -> torch.nn.Module:
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

    config.compilation_config.static_forward_context.clear()  # each name stands for one layer
    model: torch.nn.Module = initialize_model(config)
    model.load_weights(quantize_tensors(tensors.items(), quantization))  # type: ignore[operator]
    process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    return model


def _random(shapes: dict[str, tuple[int, ...]]) -> Tensors:
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def _shapes(hf: Any) -> dict[str, tuple[int, ...]]:
    """The tensors of a Qwen2 checkpoint."""
    width = hf.hidden_size
    hidden = hf.intermediate_size
    groups = hf.num_key_value_heads
    keys = width // hf.num_attention_heads * groups
    layer = {
        **{f"self_attn.{part}_proj.weight": (size, width) for part, size in (("q", width), ("k", keys), ("v", keys))},
        **{f"self_attn.{part}_proj.bias": (size,) for part, size in (("q", width), ("k", keys), ("v", keys))},
        **{"self_attn.o_proj.weight": (width, width), "mlp.down_proj.weight": (width, hidden)},
        **{"mlp.gate_proj.weight": (hidden, width), "mlp.up_proj.weight": (hidden, width)},
        **{"input_layernorm.weight": (width,), "post_attention_layernorm.weight": (width,)},
    }
    layers = range(hf.num_hidden_layers)
    shapes = {f"model.layers.{index}.{name}": shape for index in layers for name, shape in layer.items()}
    ends = {"model.embed_tokens.weight": (hf.vocab_size, width), "model.norm.weight": (width,)}
    return shapes | ends | ({} if hf.tie_word_embeddings else {"lm_head.weight": (hf.vocab_size, width)})


class _Reader:
    """Reader of a version of the weights in memory."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors
        self.changed: list[str] | None = None
        specs = [
            TensorSpec(name=name, dtype="bfloat16", shape=list(tensor.shape), offset=0, nbytes=tensor.nbytes)
            for name, tensor in tensors.items()
        ]
        self.layout = TensorLayout(tensors=specs, total_bytes=0)

    def change(self, name: str) -> None:
        """Make the next version, which differs in one tensor."""
        self.changed = [name]
        self.tensors = self.tensors | {name: torch.randn(self.tensors[name].shape)}

    def changed_since(self, version: object) -> list[TensorSpec] | None:
        return None if self.changed is None else [spec for spec in self.layout.tensors if spec.name in self.changed]

    def read(self, spec: TensorSpec) -> memoryview:
        return memoryview(self.tensors[spec.name].view(torch.uint8).numpy().tobytes())

    def __iter__(self) -> Iterator[tuple[TensorSpec, memoryview]]:
        for spec in self.layout.tensors:
            yield spec, self.read(spec)

    def verify(self) -> None:
        """Do nothing: nothing overwrites the weights."""
