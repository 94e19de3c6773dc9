"""Replaces the weights of a running vLLM model, layer by layer, and only of layers that changed.

    what differs from the version before --> its blocks --> load_weights --> finalize --> verify
                                                                 |
                            a layer that is neither untouched nor whole: load all the rest

vLLM restores the loadable form of every layer, gathers its weights, processes the layer once it has
all of them (packing, fusing), and puts layers that got none back as they were. A layer that got a
part of its weights would be processed with garbage for the rest. Two things prevent that:

- a tensor is loaded together with its block, `model.layers.3.mlp` or `model.layers.3.self_attn`:
  vLLM fuses within blocks (q, k, v; gate, up; experts);
- before vLLM finalizes, its own count of loaded elements is asked for; if any layer is neither
  untouched nor whole, all tensors that were left out are loaded too, which is a full reload.

So a model whose blocks are cut differently costs time and never correctness.

A captured graph reads weights at the address that they had when it was captured. Where processing allocates anew, the
graph would go on with the old weights, in decoding only: such a reload is refused (`check_addresses`).
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
from rollout_server.engines.vllm.quantization import keep_scales, quantized_tensors, renew_packed
from rollout_server.engines.vllm.staging import StagingRoom, Tensors

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
        room: StagingRoom | None = None,
        captured_graphs: bool = False,
    ) -> None:
        """`room`: where versions may be staged. `captured_graphs`: no tensor of the model may move."""
        self._api = api
        self._model = model
        self._model_config = model_config
        self._quantization = quantization
        keep_scales(model)
        self._room = room
        self._captured_graphs = captured_graphs
        self._source = SourceReader()
        self._loaded: WeightVersion | None = None
        self._whole: dict[torch.nn.Module, int] = {}

    def stage(self, weights: HeldWeights) -> None:
        """Begin to copy into the room what `load` will load. Raises WeightsError if the version is not there."""
        if self._room is not None:
            reader = self._source.open(weights)
            wanted = self._wanted(reader)
            made = {
                spec.name: partial(_made, reader, spec, self._quantization)
                for spec in reader.layout.tensors
                if spec.name in wanted
            }
            self._room.begin(weights.identity, made.items())

    def load(self, weights: HeldWeights) -> None:
        """Load the held version: only what differs from the loaded version, if that is known, else everything.

        Raises WeightsError if the version is not there, WeightsCorrupt if it was overwritten meanwhile; the next update
        then loads everything. Raises EngineError if a tensor moved that captured graphs read.
        """
        reader = self._source.open(weights)
        wanted = self._wanted(reader)
        self._loaded = None
        staged = {} if self._room is None else self._room.of(weights.identity)
        addresses = tensor_addresses(self._model) if self._captured_graphs else {}
        if wanted:
            self._reload(reader, wanted, staged)
        if self._captured_graphs:
            check_addresses(addresses, tensor_addresses(self._model))
        reader.verify()  # after finalizing: until then layers hold on to the mapped bytes
        self._loaded = weights.identity

    def _wanted(self, reader: TensorReader) -> set[str]:
        names = [spec.name for spec in reader.layout.tensors]
        changed = None if self._loaded is None else reader.changed_since(self._loaded)
        if changed is None or self._api.layer_info is None:
            return set(names)
        return with_blocks(names, [spec.name for spec in changed])

    def _reload(self, reader: TensorReader, wanted: Collection[str], staged: Mapping[str, Tensors]) -> None:
        self._api.initialize_reload(self._model)
        self._model.load_weights(_tensors(reader, wanted, self._quantization, staged))
        rest = {spec.name for spec in reader.layout.tensors} - set(wanted)
        if rest and self._has_partial_layer():
            self._model.load_weights(_tensors(reader, rest, self._quantization))
            rest = set()
        if not rest:
            self._remember_whole_layers()
        self._api.finalize_reload(self._model, self._model_config)
        renew_tied_head(self._model)
        renew_packed(self._model)

    def _has_partial_layer(self) -> bool:
        """Whether vLLM has some but not all weights of a layer."""
        return any(loaded != self._whole.get(layer) for layer, loaded in self._pending())

    def _remember_whole_layers(self) -> None:
        """After a full load: layers that never count as complete (a padded vocabulary) have all there is."""
        self._whole = dict(self._pending())

    def _pending(self) -> Iterator[tuple[torch.nn.Module, int]]:
        """Layers with weights that vLLM has not processed yet, and how many elements those are."""
        if self._api.layer_info is None:
            return
        for layer in self._model.modules():
            info = self._api.layer_info(layer)
            if info.can_load() and info.load_numel > 0:
                yield layer, info.load_numel


def tensor_addresses(model: torch.nn.Module) -> dict[str, int]:
    """Where each parameter and buffer of the model lies in memory."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.data_ptr() for name, tensor in tensors if tensor.numel()}


def check_addresses(before: Mapping[str, int], after: Mapping[str, int]) -> None:
    """Raise EngineError if a tensor is no longer where captured graphs read it."""
    moved = [name for name, address in before.items() if after.get(name) != address]
    if moved:
        first = moved[0]
        raise EngineError(
            f"the update moved {len(moved)} of the model's {len(before)} tensors in memory, the first is {first} "
            f"({before[first]:#x} -> {after.get(first, 0):#x}). Captured graphs go on reading the old ones, so decoded "
            "tokens would come from old weights. Set rollout.vllm.enforce_eager: true"
        )


def with_blocks(names: Collection[str], changed: Collection[str]) -> set[str]:
    """The changed tensors and all others of their blocks.

    >>> sorted(with_blocks(["l.0.mlp.up.w", "l.0.mlp.gate.w", "l.0.norm.w", "head.w"], ["l.0.mlp.up.w"]))
    ['l.0.mlp.gate.w', 'l.0.mlp.up.w']
    """
    touched = {_block(name) for name in changed}
    return {name for name in names if _block(name) in touched}


def renew_tied_head(model: torch.nn.Module) -> None:
    """On CPU an output layer multiplies with a packed copy of its weights, which a reload leaves old where
    the weights are those of the embedding. The reload has packed those anyway: use that copy."""
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
    """What the model really multiplies with: `<module>.<parameter>`, one row for every output; on a CPU
    `<module>.packed` as well.

    There vLLM packs matrices in a form that cannot be read. They are multiplied with the unit matrix, which gives every
    element exactly, and every 8-bit number once the scale of its row is divided out and the quotient rounded.
    """
    dtype = next(model.parameters()).dtype
    for name, module in model.named_modules(remove_duplicate=False):
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.numel():
                stored = parameter.detach()
                yield f"{name}.{key}", stored.T if stored.dtype == torch.float8_e4m3fn else stored
        inputs = getattr(module, "input_size_per_partition", None)
        if hasattr(module, "cpu_linear"):
            unit = torch.eye(inputs or module.embedding_dim, dtype=dtype)
            yield f"{name}.packed", module.cpu_linear(unit, module.weight, None).T
        elif hasattr(module, "weight_scale") and module.weight is None:
            products = module.scheme.apply_weights(module, torch.eye(inputs, dtype=dtype), None)
            yield f"{name}.packed", (products.T.float() / module.weight_scale).round().to(torch.int8)


def differing_weights(model: torch.nn.Module, held: HeldWeights, quantization: Quantization = "none") -> list[str]:
    """Names of the held tensors, quantised anew if the engine's are, whose bits are not those that the model multiplies
    with, its own copy of a tied output layer included. The model must not be cut over several workers."""
    found = dict(multiplied_weights(model))
    reader = SourceReader().open(held)
    tensors = dict(_tensors(reader, [spec.name for spec in reader.layout.tensors], quantization))
    if _HEAD not in tensors:
        tensors[_HEAD] = tensors["model.embed_tokens.weight"]
    fused = getattr(model, "packed_modules_mapping", {})
    return [name for name, tensor in tensors.items() if not _is_multiplied(name, tensor, tensors, found, fused)]


def _is_multiplied(
    name: str,
    tensor: torch.Tensor,
    tensors: Mapping[str, torch.Tensor],
    found: Mapping[str, torch.Tensor],
    fused: Mapping[str, Sequence[str]],
) -> bool:
    """Whether all of the model's copies of a tensor have its bits: rows of a fused matrix, if it is part of one."""
    path, _, kind = name.rpartition(".")
    parent, _, part = path.rpartition(".")
    start = 0
    for whole, parts in fused.items():
        if part in parts:
            path = f"{parent}.{whole}"
            start = sum(len(tensors[f"{parent}.{each}.{kind}"]) for each in parts[: parts.index(part)])
    keys = [f"{path}.{kind}"]
    if kind == "weight" and part != "embed_tokens":  # which is looked up, and never multiplied with
        keys.append(f"{path}.packed")
    copies = [found[key][start : start + len(tensor)].cpu() for key in keys if key in found]
    return bool(copies) and all(_same_bits(copy, tensor) for copy in copies)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )


def _block(name: str) -> str:
    match = _BLOCK.match(name)
    return match[1] if match else name


def _tensors(
    reader: TensorReader, names: Collection[str], quantization: Quantization, staged: Mapping[str, Tensors] = {}
) -> Iterator[tuple[str, torch.Tensor]]:
    """What vLLM is to load for the named tensors; those that are staged are not read."""
    for spec in reader.layout.tensors:
        if spec.name in names:
            yield from staged.get(spec.name) or _made(reader, spec, quantization)


def _made(reader: TensorReader, spec: TensorSpec, quantization: Quantization) -> Tensors:
    """What vLLM is to load for one tensor."""
    return [*quantized_tensors([(spec.name, _tensor(spec, reader.read(spec)))], quantization)]


def _tensor(spec: TensorSpec, data: memoryview) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(data, dtype=getattr(torch, spec.dtype)).view(spec.shape)
