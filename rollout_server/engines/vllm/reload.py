"""Replaces the weights of a running vLLM model layer by layer, reloading only blocks that changed.

    tensors that changed --> their blocks --> load_weights --> finalize --> verify
                                                   |
                          a layer has some but not all of its weights: load all other tensors too

vLLM's layerwise reload restores the loadable form of every layer, collects its weights, and processes the layer once it
has all of them (packing, fusing). It puts layers that got no weights back as they were. A layer that got only a part of
its weights would be processed with garbage for the rest. Two measures prevent that:

- a changed tensor is loaded together with its block, `model.layers.3.mlp` or `model.layers.3.self_attn`: vLLM fuses
  within blocks (q, k, v; gate, up; experts);
- before vLLM finalizes, we read its count of loaded elements per layer. If a layer has some but not all of its weights,
  we load all tensors that were left out, which makes it a full reload.

So a model with other block boundaries costs time but never correctness.

A captured graph reads weights at the addresses of its capture. If processing allocates new memory, the graph keeps
using the old weights, in decoding only. `check_addresses` refuses such a reload.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from async_grpo.config.rollout import Quantization
from async_grpo.errors import EngineError
from async_grpo.weights.base import HeldWeights, TensorReader
from async_grpo.weights.manifest import TensorSpec, WeightVersion
from async_grpo.weights.source_reader import SourceReader
from rollout_server.engines.vllm.compat import VllmCompat
from rollout_server.engines.vllm.quantization import preserve_packed_scales, quantize_tensors, restore_weight_attributes
from rollout_server.engines.vllm.staging import StagingBuffer, Tensors

_BLOCK = re.compile(r"(.*?\.\d+\.[^.]+)\.")
_HEAD = "lm_head.weight"


class LayerwiseReload:
    """Reloads the weights of one model in one worker."""

    def __init__(
        self,
        api: VllmCompat,
        model: torch.nn.Module,
        model_config: Any,
        quantization: Quantization = "none",
        staging: StagingBuffer | None = None,
        captured_graphs: bool = False,
    ) -> None:
        """`captured_graphs`: True if graphs read the weights, so that no tensor of the model may move."""
        self._api = api
        self._model = model
        self._model_config = model_config
        self._quantization = quantization
        preserve_packed_scales(model)
        self._staging = staging
        self._captured_graphs = captured_graphs
        self._source = SourceReader()
        self._loaded: WeightVersion | None = None
        """Version in the model; None before the first update and after a failed one."""
        self._full_counts: dict[torch.nn.Module, int] = {}
        """Loaded elements after a full load, for layers that vLLM never considers complete (a padded vocabulary)."""

    def start_staging(self, weights: HeldWeights) -> None:
        """Start to stage the tensors that `load_weights` will load. Raises WeightsError if the version is missing."""
        if self._staging is None:
            return
        reader = self._source.open(weights)
        names = self._names_to_load(reader)
        tensors = {}
        for spec in reader.layout.tensors:
            if spec.name in names:
                tensors[spec.name] = partial(_read_tensors, reader, spec, self._quantization)
        self._staging.start_staging(weights.identity, tensors.items())

    def load_weights(self, weights: HeldWeights) -> None:
        """Load the held version: only what differs from the loaded version if that is known, else everything.

        Raises WeightsError if the version is missing, WeightsCorrupt if it was overwritten meanwhile; the next update
        then loads everything. Raises EngineError if a tensor moved that captured graphs read.
        """
        reader = self._source.open(weights)
        names = self._names_to_load(reader)

        # From here on the model may be a mixture. After an error the next update must load everything.
        self._loaded = None
        staged = {} if self._staging is None else self._staging.collect_staged(weights.identity)
        addresses = tensor_addresses(self._model) if self._captured_graphs else {}
        if names:
            self._reload(reader, names, staged)
        if self._captured_graphs:
            check_addresses(addresses, tensor_addresses(self._model))

        # Verify last: until vLLM has finalized, layers still refer to the mapped bytes of the store.
        reader.verify()
        self._loaded = weights.identity

    def _names_to_load(self, reader: TensorReader) -> set[str]:
        names = [spec.name for spec in reader.layout.tensors]
        changed = None if self._loaded is None else reader.changed_since(self._loaded)
        # Without vLLM's counts a partly loaded layer could not be detected.
        if changed is None or self._api.layer_info is None:
            return set(names)
        return expand_to_blocks(names, [spec.name for spec in changed])

    def _reload(self, reader: TensorReader, names: Collection[str], staged: Mapping[str, Tensors]) -> None:
        self._api.initialize_reload(self._model)
        self._model.load_weights(_iterate_tensors(reader, names, self._quantization, staged))

        others = {spec.name for spec in reader.layout.tensors} - set(names)
        if others and self._has_partial_layer():
            self._model.load_weights(_iterate_tensors(reader, others, self._quantization))
            others = set()
        if not others:  # everything was loaded
            self._full_counts = dict(self._unprocessed_layers())

        self._api.finalize_reload(self._model, self._model_config)
        refresh_tied_head(self._model)
        restore_weight_attributes(self._model)

    def _has_partial_layer(self) -> bool:
        """True if a layer has some but not all of its weights."""
        return any(count != self._full_counts.get(layer) for layer, count in self._unprocessed_layers())

    def _unprocessed_layers(self) -> Iterator[tuple[torch.nn.Module, int]]:
        """Layers that vLLM has loaded elements for but not processed yet, with the number of elements."""
        if self._api.layer_info is None:
            return
        for layer in self._model.modules():
            info = self._api.layer_info(layer)
            if info.can_load() and info.load_numel > 0:
                yield layer, info.load_numel


def tensor_addresses(model: torch.nn.Module) -> dict[str, int]:
    """Memory address of each parameter and buffer of the model."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.data_ptr() for name, tensor in tensors if tensor.numel()}


def check_addresses(before: Mapping[str, int], after: Mapping[str, int]) -> None:
    """Raise EngineError if a tensor is no longer where captured graphs read it."""
    moved = [name for name, address in before.items() if after.get(name) != address]
    if moved:
        first = moved[0]
        raise EngineError(
            f"the update moved {len(moved)} of the model's {len(before)} tensors in memory. The first is {first} "
            f"({before[first]:#x} -> {after.get(first, 0):#x}). Captured graphs keep reading the old memory, so "
            "decoded tokens would come from old weights. Set rollout.vllm.enforce_eager: true"
        )


def expand_to_blocks(names: Collection[str], changed: Collection[str]) -> set[str]:
    """Return the changed tensors and all others of their blocks.

    >>> sorted(expand_to_blocks(["l.0.mlp.up.w", "l.0.mlp.gate.w", "l.0.norm.w", "head.w"], ["l.0.mlp.up.w"]))
    ['l.0.mlp.gate.w', 'l.0.mlp.up.w']
    """
    changed_blocks = {_block(name) for name in changed}
    return {name for name in names if _block(name) in changed_blocks}


def refresh_tied_head(model: torch.nn.Module) -> None:
    """Update the packed weights of a tied output layer on CPU.

    There an output layer multiplies with a packed copy of its weights. A reload does not renew that copy if the weights
    are those of the embedding. It does pack the embedding's weights, so we use that copy.
    """
    head = getattr(model, "lm_head", None)
    if head is None or not hasattr(head, "cpu_linear"):
        return
    for layer in model.modules():
        if layer is not head and getattr(layer, "weight", None) is head.weight and hasattr(layer, "cpu_linear"):
            if getattr(head, "bias", None) is None:
                head.cpu_linear = layer.cpu_linear
            else:  # some packed copies contain the bias
                head.quant_method.process_weights_after_loading(head)


def multiplied_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights that the model multiplies with, one row per output.

    They are named `<module>.<parameter>`. On CPU, `<module>.packed` follows for matrices that vLLM packs. A packed
    matrix cannot be read, so we multiply it with the unit matrix. That gives every element exactly. It gives every
    8-bit number exactly after division by the scale of its row and rounding.
    """
    dtype = next(model.parameters()).dtype
    for name, module in model.named_modules(remove_duplicate=False):
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if parameter.numel():
                stored = parameter.detach()
                # vLLM stores float8 matrices transposed.
                yield f"{name}.{parameter_name}", stored.T if stored.dtype == torch.float8_e4m3fn else stored

        inputs = getattr(module, "input_size_per_partition", None)
        if hasattr(module, "cpu_linear"):
            unit = torch.eye(inputs or module.embedding_dim, dtype=dtype)
            yield f"{name}.packed", module.cpu_linear(unit, module.weight, None).T
        elif hasattr(module, "weight_scale") and module.weight is None:
            products = module.scheme.apply_weights(module, torch.eye(inputs, dtype=dtype), None)
            yield f"{name}.packed", (products.T.float() / module.weight_scale).round().to(torch.int8)


def differing_weights(model: torch.nn.Module, held: HeldWeights, quantization: Quantization = "none") -> list[str]:
    """Names of the held tensors whose bits differ from those that the model multiplies with.

    Held tensors are quantised first if the engine's are. A tied output layer's own copy is compared too. The model must
    not be split across workers.
    """
    multiplied = dict(multiplied_weights(model))
    reader = SourceReader().open(held)
    tensors = dict(_iterate_tensors(reader, [spec.name for spec in reader.layout.tensors], quantization))
    if _HEAD not in tensors:
        tensors[_HEAD] = tensors["model.embed_tokens.weight"]
    fused = getattr(model, "packed_modules_mapping", {})
    return [name for name, tensor in tensors.items() if not _is_multiplied(name, tensor, tensors, multiplied, fused)]


def _is_multiplied(
    name: str,
    tensor: torch.Tensor,
    tensors: Mapping[str, torch.Tensor],
    multiplied: Mapping[str, torch.Tensor],
    fused: Mapping[str, Sequence[str]],
) -> bool:
    """True if all copies of a tensor in the model have its bits. `fused`: part names by the name of a fused module."""
    path, _, parameter_name = name.rpartition(".")
    parent, _, module_name = path.rpartition(".")

    # A part of a fused matrix is a range of its rows.
    first_row = 0
    for fused_name, parts in fused.items():
        if module_name in parts:
            path = f"{parent}.{fused_name}"
            earlier_parts = parts[: parts.index(module_name)]
            first_row = sum(len(tensors[f"{parent}.{part}.{parameter_name}"]) for part in earlier_parts)

    keys = [f"{path}.{parameter_name}"]
    if parameter_name == "weight" and module_name != "embed_tokens":  # an embedding is looked up, not multiplied
        keys.append(f"{path}.packed")
    copies = [multiplied[key][first_row : first_row + len(tensor)].cpu() for key in keys if key in multiplied]
    return bool(copies) and all(_have_same_bits(copy, tensor) for copy in copies)


def _have_same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.shape != right.shape:
        return False
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def _block(name: str) -> str:
    match = _BLOCK.match(name)
    return match[1] if match else name


def _iterate_tensors(
    reader: TensorReader, names: Collection[str], quantization: Quantization, staged: Mapping[str, Tensors] = {}
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what vLLM loads for the named tensors; staged ones are not read from the store."""
    for spec in reader.layout.tensors:
        if spec.name in names:
            yield from staged.get(spec.name) or _read_tensors(reader, spec, quantization)


def _read_tensors(reader: TensorReader, spec: TensorSpec, quantization: Quantization) -> Tensors:
    """Read one tensor of the layout, and return what vLLM loads for it."""
    tensor = _as_tensor(spec, reader.read(spec))
    return list(quantize_tensors([(spec.name, tensor)], quantization))


def _as_tensor(spec: TensorSpec, data: memoryview) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(data, dtype=getattr(torch, spec.dtype)).view(spec.shape)
