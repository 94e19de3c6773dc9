"""Compatibility with several vLLM releases, imitated by fake modules."""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from async_grpo.config.rollout import VllmConfig
from async_grpo.errors import DependencyError
from async_grpo.weights.base import HeldWeights
from rollout_server.engines.vllm.adapters import EngineAdapters
from rollout_server.engines.vllm.compat import accepted_arguments, find_vllm_api
from rollout_server.engines.vllm.staging import StagingBuffer
from rollout_server.engines.vllm.transfer import WeightTransfer

TRANSFER = "vllm.distributed.weight_transfer"
LOADER = "vllm.model_executor.model_loader"
RELOAD = f"{LOADER}.reload"


class OldTransferEngine(ABC):
    """The interface in 0.23: no lifecycle, and a method for the trainer's side."""

    def __init__(self, config: object, parallel_config: object, model: torch.nn.Module) -> None:
        self.model = model

    @abstractmethod
    def init_transfer_engine(self, init_info: object) -> None: ...

    @abstractmethod
    def receive_weights(self, update_info: object, load_weights: Callable[..., None]) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...

    @staticmethod
    @abstractmethod
    def trainer_send_weights(iterator: object, trainer_args: object) -> None: ...


class NewTransferEngine(ABC):
    """The interface since 0.25."""

    def __init__(self, config: object, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        self.model = model
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config

    @abstractmethod
    def init_transfer_engine(self, init_info: object) -> None: ...

    @abstractmethod
    def start_weight_update(self) -> None: ...

    @abstractmethod
    def finish_weight_update(self) -> None: ...

    @abstractmethod
    def receive_weights(self, update_info: object) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...


class DefaultModelLoader:
    def __init__(self, load_config: Any) -> None:
        self.load_format = load_config.load_format

    def get_all_weights(self, model_config: object, model: object) -> Iterator[tuple[str, torch.Tensor]]:
        yield "model.layers.0.mlp.up_proj.weight", torch.tensor([[1.0, -2.0]])
        yield "model.norm.weight", torch.tensor([3.0])


class FakeVllm:
    """Modules of a release, which record calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, transfer_engine: type) -> None:
        self.registered: dict[str, type] = {}
        self.loaders: dict[str, type] = {}
        factory = SimpleNamespace(_registry=self.registered, register_engine=self.registered.__setitem__)
        self.modules = {
            "vllm": {},
            "vllm.config": {"set_current_vllm_config": self._entered},
            f"{TRANSFER}.base": {"WeightTransferEngine": transfer_engine},
            f"{TRANSFER}.factory": {"WeightTransferEngineFactory": factory},
            LOADER: {"register_model_loader": lambda name: lambda loader: self.loaders.setdefault(name, loader)},
            f"{LOADER}.default_loader": {"DefaultModelLoader": DefaultModelLoader},
            RELOAD: {"initialize_layerwise_reload": print, "finalize_layerwise_reload": print},
            f"{RELOAD}.layerwise": {"get_layerwise_info": id},
        }
        self.contexts: list[object] = []
        self._monkeypatch = monkeypatch
        for name, content in self.modules.items():
            module = ModuleType(name)
            vars(module).update(content)
            monkeypatch.setitem(sys.modules, name, module)

    def lacks(self, module: str, name: str | None = None) -> None:
        """Remove a module, or one name from it."""
        if name is None:
            self._monkeypatch.setitem(sys.modules, module, None)
        else:
            self._monkeypatch.delattr(sys.modules[module], name)

    def import_worker(self) -> ModuleType:
        """Import our worker module as a worker of this release would."""
        name = "rollout_server.engines.vllm.worker"
        self._monkeypatch.setitem(sys.modules, name, ModuleType(name))  # so that the present module is restored
        self._monkeypatch.delitem(sys.modules, name)
        return importlib.import_module(name)

    def _entered(self, config: object) -> Any:
        self.contexts.append(config)
        return torch.no_grad()


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    return FakeVllm(monkeypatch, OldTransferEngine)


@pytest.fixture
def new(monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    return FakeVllm(monkeypatch, NewTransferEngine)


@pytest.mark.parametrize(
    ("module", "name", "missing"),
    [
        (f"{TRANSFER}.base", "WeightTransferEngine", "base:WeightTransferEngine"),
        (f"{TRANSFER}.factory", None, "factory:WeightTransferEngineFactory"),
        (RELOAD, "initialize_layerwise_reload", "reload:initialize_layerwise_reload"),
        (RELOAD, "finalize_layerwise_reload", "reload:finalize_layerwise_reload"),
    ],
)
def test_a_release_with_a_missing_part_is_refused_by_name(
    new: FakeVllm, module: str, name: str | None, missing: str
) -> None:
    new.lacks(module, name)
    with pytest.raises(DependencyError, match=rf"vllm\S*{missing}.*>=0\.23,<0\.33"):
        find_vllm_api()
    with pytest.raises(DependencyError, match=missing):
        new.import_worker()


@pytest.mark.parametrize("name", [None, "get_layerwise_info"])
def test_a_release_without_element_counts_has_no_layer_info(new: FakeVllm, name: str | None) -> None:
    new.lacks(f"{RELOAD}.layerwise", name)
    assert find_vllm_api().layer_info is None


def test_only_arguments_that_a_release_accepts_are_passed() -> None:
    def old_start(is_checkpoint_format: bool = True) -> None: ...

    def new_finish(weight_version: str | None = None) -> None: ...

    def plain() -> None: ...

    arguments: dict[str, Any] = {"is_checkpoint_format": False, "weight_version": "7"}
    assert accepted_arguments(old_start, **arguments) == {"is_checkpoint_format": False}
    assert accepted_arguments(new_finish, **arguments) == {"weight_version": "7"}
    assert accepted_arguments(plain, **arguments) == {}


def test_receive_weights_does_the_whole_update_in_an_old_release(
    old: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = old.import_worker()
    loads = record_loads(worker, monkeypatch)
    model = torch.nn.Linear(2, 2)
    engine = old.registered["zmq"](None, None, model)
    update = engine.update_info_cls(held=HELD.format(2), dtype="bfloat16")
    assert update.update_kind == "dense"
    engine.receive_weights(update, load_weights=print)
    assert loads == [(model, torch.bfloat16, "none", "/x", (1, 2))]
    assert old.contexts == []


def test_an_update_in_a_new_release_runs_with_its_current_configuration(
    new: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = new.import_worker()
    loads = record_loads(worker, monkeypatch)
    model, config = torch.nn.Linear(2, 2), SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float16))
    engine = new.registered["zmq"](None, config, torch.device("cpu"), model)
    engine.start_weight_update()
    for version in (2, 3):
        update = engine.update_info_cls(held=HELD.format(version), dtype="bfloat16", quantization="int8")
        engine.receive_weights(update)
    engine.finish_weight_update()
    assert loads == [(model, torch.float16, "int8", "/x", (1, 2)), (model, torch.float16, "int8", "/x", (1, 3))]
    assert new.contexts == [config, config]


def test_a_worker_registers_quantising_loaders(old: FakeVllm) -> None:
    old.import_worker()
    loader = old.loaders["async_grpo_int8"](SimpleNamespace(load_format="async_grpo_int8"))
    assert loader.load_format == "auto"
    numbers, scales, norm = [tensor.tolist() for _, tensor in loader.get_all_weights(None, None)]
    assert (numbers, norm) == ([[64, -127]], [3.0])
    assert scales == [[pytest.approx(2 / 127)]]


def test_registering_twice_keeps_the_first(new: FakeVllm) -> None:
    worker = new.import_worker()
    first = new.registered["zmq"]
    worker.register_backend(find_vllm_api())
    assert new.registered["zmq"] is first


@pytest.mark.parametrize(
    ("platform", "enforce_eager", "captured"),
    [("cuda", None, True), ("cuda", True, False), ("ascend", False, True), ("cpu", None, False)],
)
def test_updates_carry_whether_graphs_are_captured(platform: str, enforce_eager: bool | None, captured: bool) -> None:
    config = VllmConfig.model_validate({"platform": platform, "enforce_eager": enforce_eager})
    transfer = WeightTransfer(config, "bfloat16", EngineAdapters(None, Path("unused"), "bfloat16"))
    update = transfer._update_info(HeldWeights.in_store(Path("/x"), epoch=1, version=2))
    assert update["captured_graphs"] is captured


HELD = '{{"kind":"held_weights","epoch":1,"version":{},"source":{{"kind":"store_source","path":"/x"}}}}'
"""JSON of HeldWeights, as sent to vLLM's workers."""


def record_loads(worker: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Record calls of `LayerwiseReload.load_weights`: model, dtype, quantization, store, identity."""
    recorded: list[tuple[Any, ...]] = []

    class Recorder:
        def __init__(
            self,
            api: object,
            model: object,
            model_config: Any,
            quantization: str,
            staging: StagingBuffer | None,
            captured_graphs: bool,
        ) -> None:
            assert staging is None  # staging_bytes is 0
            self._facts = (model, model_config.dtype, quantization)

        def load_weights(self, weights: HeldWeights) -> None:
            recorded.append((*self._facts, weights.source.path, weights.identity))

    monkeypatch.setattr(worker, "LayerwiseReload", Recorder)
    return recorded
