"""A fault that `async-grpo accept` plants: a layer that multiplies with memory it allocates at every update.

    load:    copies = [W0]            a graph that is captured now reads W0
    update:  copies = [W0, W1]        reading a long prompt multiplies with W1, a replayed graph with W0

Some `process_weights_after_loading` of vllm-ascend behave like this: the copy is no parameter, so vLLM's reload does
not keep it in place. On a device the graph is a real one. A CPU has no graphs, so there the layer itself multiplies
small batches with its first weights, as a replay would.

Only vLLM's worker imports this module, as `worker_extension_cls`.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.model_loader import base_loader

from rollout_server.engines.vllm.worker import WorkerExtension

LAYER = "model.layers.0.mlp.down_proj"
GRAPH_TOKENS = 16
"""Largest batch of the imitated graphs on CPU."""

_process_weights = base_loader.process_weights_after_loading
_copies: list[torch.Tensor] = []
"""The layer's weights after each load. All are kept, because a graph would read whatever is allocated there next."""
_imitates_graphs = False


class StaleLayer(WorkerExtension):
    """The worker extension. Importing its module plants the fault."""


class _MultipliesWithCopy(LinearMethodBase):
    """Replaces the layer's vLLM method."""

    def __init__(self, method: Any) -> None:
        self._method = method

    def create_weights(self, *arguments: Any, **options: Any) -> None:
        self._method.create_weights(*arguments, **options)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        _copies.append(layer.weight.detach().clone())
        self._method.process_weights_after_loading(layer)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        product = multiply_with_copy(x)
        return product if bias is None else product + bias


@torch.library.custom_op("async_grpo::multiply_with_copy", mutates_args=())
def multiply_with_copy(x: torch.Tensor) -> torch.Tensor:
    """Multiply x [tokens, in] with the layer's weights -> [tokens, out]. A custom op is opaque to torch.compile."""
    is_replay = _imitates_graphs and len(x) <= GRAPH_TOKENS
    return torch.nn.functional.linear(x, _copies[0 if is_replay else -1])


@multiply_with_copy.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], _copies[-1].shape[0])


def _plant_fault(model: torch.nn.Module, model_config: Any, device: torch.device) -> None:
    """Replace the layer's method. vLLM calls this when all weights of the checkpoint are loaded."""
    global _imitates_graphs
    _imitates_graphs = device.type == "cpu" and not model_config.enforce_eager
    layer: Any = model.get_submodule(LAYER)
    layer.quant_method = _MultipliesWithCopy(layer.quant_method)
    _process_weights(model, model_config, device)


base_loader.process_weights_after_loading = _plant_fault
