"""Tensors that an update loads, on a model that counts loaded elements as vLLM's does."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from async_grpo.errors import EngineError, WeightsCorrupt, WeightsError
from async_grpo.weights import chunks
from async_grpo.weights.base import HeldWeights
from async_grpo.weights.manifest import WeightVersion, make_layout
from async_grpo.weights.shared_memory import remove_stores, store_path
from async_grpo.weights.store import VersionNotes, WeightStore
from rollout_server.engines.vllm.compat import VllmCompat
from rollout_server.engines.vllm.reload import LayerwiseReload, differing_weights, expand_to_blocks, refresh_tied_head

RUN = f"unit-layerwise-reload-{os.getpid()}"
NAMES = ["embed.weight", "layers.0.mlp.gate.weight", "layers.0.mlp.up.weight", "layers.0.norm.weight", "head.weight"]
LAYOUT = make_layout([(name, "float32", [4]) for name in NAMES])
LAYERS = {
    "embed": ["embed.weight"],
    "gate_up": ["layers.0.mlp.gate.weight", "layers.0.mlp.up.weight"],
    "norm": ["layers.0.norm.weight"],
    "head": ["head.weight"],
}


class CountingModel(torch.nn.Module):
    """Layers that change only when all of their elements were loaded."""

    def __init__(self, layers: dict[str, list[str]], padded: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.calls: list[list[str]] = []
        self.finalized = 0
        self.after_finalize: Callable[[], object] = lambda: None
        self.values: dict[str, float] = {}
        self._layers = {name: torch.nn.Identity() for name in layers}
        self._names = layers
        self._total = {name: 4 * len(layers[name]) + (name in padded) for name in layers}
        self._loaded: dict[str, dict[str, float]] = {}

    def modules(self) -> Iterator[torch.nn.Module]:
        return iter(self._layers.values())

    def initialize(self, model: torch.nn.Module) -> None:
        self._loaded = {name: {} for name in self._names}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.calls.append([])
        for name, tensor in weights:
            self.calls[-1].append(name)
            layer = next(layer for layer, names in self._names.items() if name in names)
            self._loaded[layer][name] = float(tensor[0])
            if self._count(layer) == self._total[layer]:
                self.values |= self._loaded.pop(layer)

    def finalize(self, model: torch.nn.Module, model_config: object) -> None:
        """Process what is left; the missing part of a layer is garbage."""
        self.finalized += 1
        for layer, loaded in self._loaded.items():
            if loaded:
                self.values |= {name: float("nan") for name in self._names[layer]} | loaded
        self.after_finalize()

    def info(self, layer: torch.nn.Module) -> SimpleNamespace:
        name = next(name for name, module in self._layers.items() if module is layer)
        waiting = name in self._loaded
        return SimpleNamespace(can_load=lambda: waiting, load_numel=self._count(name) if waiting else 0)

    def _count(self, layer: str) -> int:
        return 4 * len(self._loaded[layer])


def held(path: Path, identity: WeightVersion) -> HeldWeights:
    return HeldWeights.in_store(path, epoch=identity.epoch, version=identity.version)


class Bench:
    """A model, its reload, and a store whose version v has v * 10 + position in every tensor."""

    def __init__(self, model: CountingModel, *, counts: bool = True, captured_graphs: bool = False) -> None:
        self.model = model
        api = VllmCompat(object, None, model.initialize, model.finalize, model.info if counts else None)
        self.reload = LayerwiseReload(api, model, None, captured_graphs=captured_graphs)
        self.store = WeightStore.create(store_path(RUN, "store"), LAYOUT)
        self.values = dict.fromkeys(NAMES, -1.0)

    def publish(self, version: int, changed: list[str] | None, base: int | None = None) -> WeightVersion:
        """Publish a version in which `changed` moved since `base` (None: the version before).

        `changed` is None: all moved, and the version has no note of it.
        """
        block = np.frombuffer(self.store.begin_write(), np.float32)
        for position, spec in enumerate(LAYOUT.tensors):
            if changed is None or spec.name in changed:
                self.values[spec.name] = version * 10.0 + position
            block[spec.offset // 4 : spec.offset // 4 + 4] = self.values[spec.name]
        flags = [changed is not None and name in changed for name in NAMES]
        noted_base = None if changed is None else (0, version - 1 if base is None else base)
        self.store.commit_write(
            WeightVersion(0, version), VersionNotes(base=noted_base, changed=chunks.pack_bits(flags))
        )
        return WeightVersion(0, version)

    def update(self, version: int, changed: list[str] | None, base: int | None = None) -> list[list[str]]:
        """Publish and load; returns the names of each call of load_weights."""
        self.model.calls.clear()
        self.reload.load_weights(held(self.store.path, self.publish(version, changed, base)))
        assert self.model.values == self.values
        return self.model.calls


@pytest.fixture(autouse=True)
def _no_shared_memory_is_left() -> Iterator[None]:
    yield
    remove_stores(RUN)


def test_later_updates_load_only_the_blocks_that_changed() -> None:
    bench = Bench(CountingModel(LAYERS))
    assert bench.update(1, NAMES) == [NAMES]
    assert bench.update(2, ["layers.0.mlp.up.weight"]) == [["layers.0.mlp.gate.weight", "layers.0.mlp.up.weight"]]
    assert bench.update(3, ["head.weight", "layers.0.norm.weight"]) == [["layers.0.norm.weight", "head.weight"]]
    assert bench.update(4, []) == []
    assert bench.model.finalized == 3
    bench.store = WeightStore.create(store_path(RUN, "store"), LAYOUT)  # a new file, so the reload maps it again
    assert bench.update(5, None) == [NAMES]


def test_changes_since_another_than_the_loaded_version_load_everything() -> None:
    bench = Bench(CountingModel(LAYERS))
    bench.update(1, None)
    bench.publish(2, ["head.weight"])
    assert bench.update(3, ["embed.weight"], base=2) == [NAMES]


def test_a_layer_across_blocks_is_never_partly_loaded() -> None:
    layers = {"whole": [*LAYERS["embed"], *LAYERS["head"]], "gate_up": LAYERS["gate_up"], "norm": LAYERS["norm"]}
    bench = Bench(CountingModel(layers))
    bench.update(1, None)
    first, rest = bench.update(2, ["head.weight"])
    assert first == ["head.weight"]
    assert sorted(first + rest) == sorted(NAMES)


def test_a_padded_layer_counts_as_complete_after_the_first_update() -> None:
    bench = Bench(CountingModel(LAYERS, padded=("embed",)))
    bench.update(1, None)
    assert bench.update(2, ["embed.weight"]) == [["embed.weight"]]


def test_without_element_counts_everything_is_loaded() -> None:
    bench = Bench(CountingModel(LAYERS), counts=False)
    bench.update(1, None)
    assert bench.update(2, ["head.weight"]) == [NAMES]


def test_a_failed_update_makes_the_next_load_everything() -> None:
    bench = Bench(CountingModel(LAYERS))
    bench.update(1, None)
    identity = bench.publish(2, ["head.weight"])
    bench.model.after_finalize = lambda: bench.store.begin_write(keep=WeightVersion(0, 1))
    with pytest.raises(WeightsCorrupt, match=r"version 2 of epoch 0 .*overwritten"):
        bench.reload.load_weights(held(bench.store.path, identity))
    bench.model.after_finalize = lambda: None
    bench.store.commit_write(WeightVersion(0, 2))
    assert bench.update(3, ["head.weight"]) == [NAMES]


def test_a_missing_version_or_store_leaves_the_model_unchanged() -> None:
    bench = Bench(CountingModel(LAYERS))
    bench.update(1, None)
    with pytest.raises(WeightsError, match="version 9"):
        bench.reload.load_weights(held(bench.store.path, WeightVersion(0, 9)))
    with pytest.raises(WeightsError, match="no weight store"):
        bench.reload.load_weights(held(Path("/dev/shm/nowhere/x.weights"), WeightVersion(0, 1)))
    assert bench.update(2, ["head.weight"]) == [["head.weight"]]


def test_blocks_are_parts_of_a_numbered_layer() -> None:
    names = ["m.layers.10.mlp.experts.3.w1.weight", "m.layers.10.mlp.gate.weight", "m.layers.1.mlp.gate.weight"]
    assert expand_to_blocks(names, names[:1]) == set(names[:2])


@pytest.mark.parametrize("bias", [None, torch.zeros(2)])
def test_a_tied_head_uses_the_packed_copy_of_its_embedding(bias: torch.Tensor | None) -> None:
    renewed: list[torch.nn.Module] = []
    model = torch.nn.Module()
    model.embed, model.lm_head = torch.nn.Embedding(2, 2), torch.nn.Linear(2, 2, bias=False)
    refresh_tied_head(model)
    assert not hasattr(model.lm_head, "cpu_linear")
    model.embed.cpu_linear, model.lm_head.cpu_linear = "new", "old"
    refresh_tied_head(model)
    assert model.lm_head.cpu_linear == "old"
    model.lm_head.weight = model.embed.weight
    model.lm_head.bias = None if bias is None else torch.nn.Parameter(bias)
    model.lm_head.quant_method = SimpleNamespace(process_weights_after_loading=renewed.append)
    refresh_tied_head(model)
    assert (model.lm_head.cpu_linear, renewed) == (("new", []) if bias is None else ("old", [model.lm_head]))


class FusedModel(torch.nn.Module):
    """A tied model as in vLLM on CPU: fused q, k and v, a padded vocabulary, and a packed copy for the output layer."""

    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.model, self.lm_head = torch.nn.Module(), torch.nn.Module()
        self.model.embed_tokens = torch.nn.Module()
        self.model.qkv_proj = torch.nn.Linear(4, 8, bias=False)
        qkv = torch.cat([tensors[f"model.{part}_proj.weight"] for part in "qkv"])
        self.model.qkv_proj.weight = torch.nn.Parameter(qkv)
        padded = torch.cat([tensors["model.embed_tokens.weight"], torch.zeros(2, 4)])
        self.model.embed_tokens.weight = self.lm_head.weight = torch.nn.Parameter(padded)
        packed = tensors["model.embed_tokens.weight"].clone()
        self.lm_head.embedding_dim = 4
        self.lm_head.cpu_linear = lambda inputs, weight, bias: inputs @ packed.T
        self.packed = packed


def test_differing_tensors_are_named() -> None:
    shapes = {
        "model.q_proj.weight": 4,
        "model.k_proj.weight": 2,
        "model.v_proj.weight": 2,
        "model.embed_tokens.weight": 6,
    }
    tensors = {name: torch.randn(rows, 4) for name, rows in shapes.items()}
    layout = make_layout([(name, "float32", tensor.shape) for name, tensor in tensors.items()])
    store = WeightStore.create(store_path(RUN, "fused"), layout)
    block = np.frombuffer(store.begin_write(), np.uint8)
    for spec in layout.tensors:
        block[spec.offset : spec.offset + spec.nbytes] = tensors[spec.name].numpy().reshape(-1).view(np.uint8)
    store.commit_write(WeightVersion(0, 1))
    held = HeldWeights.in_store(store.path, epoch=0, version=1)
    try:
        model = FusedModel(tensors)
        assert differing_weights(model, held) == []
        with torch.no_grad():
            model.model.qkv_proj.weight[5, 3] += 1e-6  # the last row of k
        assert differing_weights(model, held) == ["model.k_proj.weight"]
        model = FusedModel(tensors)
        model.packed[0, 0] += 1e-6
        assert differing_weights(model, held) == ["lm_head.weight"]
    finally:
        remove_stores(RUN)


def allocate_anew(model: CountingModel) -> Callable[[], object]:
    """Imitate some `process_weights_after_loading` of vLLM: a parameter becomes another tensor."""

    def process_weights_after_loading() -> None:
        model.weight = torch.nn.Parameter(model.weight.detach().clone())

    return process_weights_after_loading


def test_a_tensor_that_moves_under_captured_graphs_is_refused_by_its_name() -> None:
    model = CountingModel(LAYERS)
    bench = Bench(model, captured_graphs=True)
    bench.update(1, None)
    model.after_finalize = allocate_anew(model)
    with pytest.raises(EngineError, match=r"1 tensors.* weight \(0x.* -> 0x.*enforce_eager"):
        bench.update(2, None)


def test_an_eager_engine_may_move_its_tensors() -> None:
    model = CountingModel(LAYERS)
    bench = Bench(model)
    model.after_finalize = allocate_anew(model)
    bench.update(1, None)
    bench.update(2, None)
