"""Runs inside vLLM's workers: loads weights from the shared-memory store of the rollout server.

vLLM imports this module in every worker (`worker_extension_cls`) before it loads the model, which
registers the `zmq` weight-transfer backend there. The name says how weights reach the machine; the
last step, from the rollout server to its workers, is a mapped file.

Three hazards of vLLM on CPU are dealt with here: weights are prepacked after loading, so only a
layerwise reload can replace them; a tied `lm_head` keeps its old packed copy through a reload; and
AMX must be requested before the first small matrix product, or the process dies of SIGILL.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from async_grpo.weights.manifest import Identity
from async_grpo.weights.store import Snapshot, WeightStore
from rollout_server.engines.kinship import end_with_owner

BACKEND = "zmq"


@dataclass
class StoreInit(WeightTransferInitInfo):
    """Nothing to set up: every update names its store."""


@dataclass
class StoreUpdate(WeightTransferUpdateInfo):
    """Which weights to load, and the file that holds them."""

    store: str
    epoch: int
    version: int


class StoreWeightTransfer(WeightTransferEngine[StoreInit, StoreUpdate]):
    """Checkpoint-format reload, straight from the mapped store.

    Raises WeightsError if the store does not hold the version, and WeightsCorrupt if it was
    overwritten while it was read: the model must then not be used until another update succeeds.
    """

    init_info_cls = StoreInit
    update_info_cls = StoreUpdate
    _snapshot: Snapshot | None = None

    def init_transfer_engine(self, init_info: StoreInit) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Give the layers their loadable (not packed) shape back."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: StoreUpdate) -> None:
        """Load every tensor of the named version."""
        store = WeightStore.open(Path(update_info.store))
        self._snapshot = store.snapshot(Identity(update_info.epoch, update_info.version))
        self.model.load_weights(_tensors(self._snapshot))

    def finish_weight_update(self) -> None:
        """Pack the layers again; layers hold on to the mapped bytes until here, so verify last."""
        finalize_layerwise_reload(self.model, self.model_config)
        repack_tied_head(self.model)
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            snapshot.verify()

    def shutdown(self) -> None:
        """Nothing to release."""


class WorkerExtension:
    """Mixed into vLLM's worker; importing its module is what registers the backend."""


def repack_tied_head(model: torch.nn.Module) -> None:
    """Renew the packed copy that the output layer makes of tied embeddings on CPU."""
    head = getattr(model, "lm_head", None)
    tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    if tied and head is not None and hasattr(head, "cpu_linear"):
        head.quant_method.process_weights_after_loading(head)


def _tensors(snapshot: Snapshot) -> Iterator[tuple[str, torch.Tensor]]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        for spec, data in snapshot:
            yield spec.name, torch.frombuffer(data, dtype=getattr(torch, spec.dtype)).view(spec.shape)


def _request_amx() -> None:
    """Ask the kernel for the AMX tile registers; without it oneDNN's small products raise SIGILL."""
    request = getattr(torch.cpu, "_init_amx", None)
    if request is not None:
        request()


def _quiet_reload() -> None:
    """Each reload would warn of layers without weights: tied heads and rotary tables have none. That
    no weight is missing is checked against the checkpoint before an update begins."""
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


def _register() -> None:
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, StoreWeightTransfer)


end_with_owner()
_request_amx()
_quiet_reload()
_register()
