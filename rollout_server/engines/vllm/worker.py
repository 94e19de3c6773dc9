"""Runs inside vLLM's workers: loads weights from the shared-memory store of the rollout server.

    update_weights --> WeightLoader.receive_weights --> layerwise reload of what changed --> verify

vLLM imports this module in every worker (`worker_extension_cls`) before it loads the model, which
registers the `zmq` weight-transfer backend there, and loaders that quantise. The backend's name says
how weights reach the machine; the last step, from the rollout server to its workers, is a mapped
file. Every worker maps the same file and takes its own shards; the mapping is kept, so that a later
update finds its pages present.

Three hazards of vLLM on CPU are dealt with here: weights are prepacked after loading, so only a
layerwise reload can replace them; a tied `lm_head` keeps its old packed copy through a reload; and
AMX must be requested before the first small matrix product, or the process dies of SIGILL.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec
import torch

from async_grpo.config.rollout import Quantization
from async_grpo.utils.network import keep_stores_at_their_address
from async_grpo.utils.processes import exit_with_owner
from async_grpo.weights.base import HeldWeights
from rollout_server.engines.vllm.compat import VllmCompat, find_vllm_api, report_sampled_logprobs
from rollout_server.engines.vllm.quantization import register_loaders
from rollout_server.engines.vllm.reload import LayerwiseReload, differing_weights
from rollout_server.engines.vllm.staging import StagingRoom

BACKEND = "zmq"


@dataclass
class StoreInit:
    """What workers are told before the first update, which names its source itself."""

    staging_bytes: int = 0
    """Memory of the device in which versions are staged; 0: none is."""


@dataclass
class StoreUpdate:
    """Which weights to load, the dtype that the model computes in, and what its matrices become."""

    held: str
    """`HeldWeights` as JSON: vLLM sends nothing but plain values to its workers."""
    dtype: str
    quantization: Quantization = "none"
    captured_graphs: bool = False
    """Whether graphs read the weights at the addresses that they have."""
    update_kind: str = "dense"
    """vLLM 0.23 and 0.24 ask for it."""


class WeightLoader:
    """What this project adds to vLLM's WeightTransferEngine, of whichever release.

    Raises WeightsError if the store does not hold the version, and WeightsCorrupt if it was
    overwritten while it was read: the model must then not be used until another update succeeds.
    """

    init_info_cls = StoreInit
    update_info_cls = StoreUpdate
    api: VllmCompat
    model: torch.nn.Module
    """Set by vLLM's constructor."""
    _reload: LayerwiseReload | None = None
    _room: StagingRoom | None = None

    def init_transfer_engine(self, init_info: StoreInit) -> None:
        """Take the memory in which versions are staged."""
        if init_info.staging_bytes:
            self._room = StagingRoom(init_info.staging_bytes, self._device)

    def start_weight_update(self) -> None:
        """Nothing to do: `receive_weights` is the whole update in every release."""

    def receive_weights(self, update_info: StoreUpdate, load_weights: object = None) -> None:
        """Reload what changed from the named version. `load_weights` is how older releases would have it done."""
        with self._vllm_context(), torch.device(self._device):
            self._reload_of(update_info).load(msgspec.json.decode(update_info.held, type=HeldWeights))

    def stage(self, update_info: StoreUpdate) -> None:
        """Begin to stage what `receive_weights` will load for this update."""
        self._reload_of(update_info).stage(msgspec.json.decode(update_info.held, type=HeldWeights))

    @property
    def staged_bytes(self) -> int | None:
        """Bytes that are staged; None while they are copied."""
        return 0 if self._room is None else self._room.staged_bytes

    def finish_weight_update(self) -> None:
        """Nothing left to do."""

    def shutdown(self) -> None:
        """Nothing to release."""

    @staticmethod
    def trainer_send_weights(iterator: object, trainer_args: object) -> None:
        """Older releases want this method to exist; the trainer publishes through the weight plane."""
        raise NotImplementedError("the trainer publishes its weights with async_grpo.weights.zmq.")

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _reload_of(self, update: StoreUpdate) -> LayerwiseReload:
        if self._reload is None:
            config = self._model_config(update.dtype)
            self._reload = LayerwiseReload(
                self.api, self.model, config, update.quantization, self._room, update.captured_graphs
            )
        return self._reload

    def _model_config(self, dtype: str) -> Any:
        """vLLM's; releases that do not hand it to transfer engines use nothing but its dtype for a reload."""
        return getattr(self, "model_config", None) or SimpleNamespace(dtype=getattr(torch, dtype))

    def _vllm_context(self) -> AbstractContextManager[Any]:
        """Layers that are processed after loading may ask for vLLM's current configuration."""
        config = getattr(self, "vllm_config", None)
        if config is None:
            return nullcontext()
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(config)


class WorkerExtension:
    """Mixed into vLLM's worker; importing its module is what registers the backend."""

    model_runner: Any
    weight_transfer_engine: Any
    """Both set by vLLM's worker."""

    def stage_weights(self, update: dict[str, Any]) -> None:
        """Begin to stage the weights of a `StoreUpdate`."""
        self.weight_transfer_engine.stage(StoreUpdate(**update))

    def staged_bytes(self) -> int | None:
        """Bytes that are staged; None while they are copied."""
        staged: int | None = self.weight_transfer_engine.staged_bytes
        return staged

    def report_sampled_logprobs(self) -> None:
        """Have the sampler of this worker report log-probabilities of the distribution that it samples from."""
        report_sampled_logprobs(self.model_runner.sampler)

    def differing_weights(self, held: str, quantization: Quantization = "none") -> list[str]:
        """Names of the held tensors (`HeldWeights` as JSON) that are not those with which this worker multiplies."""
        return differing_weights(self.model_runner.model, msgspec.json.decode(held, type=HeldWeights), quantization)


def register(api: VllmCompat) -> None:
    """Make `WeightLoader` known to this process's vLLM as the `zmq` backend. Idempotent."""
    engine = type("StoreWeightTransfer", (WeightLoader, api.transfer_engine), {"api": api})
    if BACKEND not in api.factory._registry:
        api.factory.register_engine(BACKEND, engine)


def _request_amx() -> None:
    """Ask the kernel for the AMX tile registers; without it oneDNN's small products raise SIGILL."""
    request = getattr(torch.cpu, "_init_amx", None)
    if request is not None:
        request()


def _quiet_reload() -> None:
    """Each reload would warn of layers without weights: tied heads, rotary tables and what did not change
    have none. That no weight is missing is checked against the checkpoint before an update begins."""
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


exit_with_owner()
keep_stores_at_their_address()  # releases before 0.32 have workers meet by tcp://
_request_amx()
_quiet_reload()
register(find_vllm_api())
register_loaders()
