"""Runs inside vLLM's workers: loads weights from the rollout server's shared-memory store.

    update_weights --> WeightLoader.receive_weights --> layerwise reload of what changed --> verify

vLLM imports this module in every worker (`worker_extension_cls`) before it loads the model. The import registers the
`zmq` weight-transfer backend and the quantising loaders in that worker. The backend's name is that of the transport to
the machine; from the rollout server to its workers, weights take a mapped file. Every worker maps the same file and
takes its own shards. It keeps the mapping, so that later updates find the pages present.

Three hazards of vLLM on CPU are handled here and in `reload`: weights are prepacked after loading, so only a layerwise
reload can replace them; a tied `lm_head` keeps its old packed copy through a reload; and AMX must be requested before
the first small matrix product, or the process dies of SIGILL.
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
from rollout_server.engines.vllm.staging import StagingBuffer

BACKEND = "zmq"


@dataclass
class StoreInit:
    """Settings of a worker, sent before the first update."""

    staging_bytes: int = 0
    """Device memory for staging versions; 0: no staging."""


@dataclass
class StoreUpdate:
    """One weight update."""

    held: str
    """`HeldWeights` as JSON: vLLM sends only plain values to its workers."""
    dtype: str
    """Precision in which the model computes."""
    quantization: Quantization = "none"
    captured_graphs: bool = False
    """True if captured graphs read the weights at fixed addresses."""
    update_kind: str = "dense"
    """Read by vLLM 0.23 and 0.24."""


class WeightLoader:
    """Our part of vLLM's WeightTransferEngine, for all supported releases.

    `receive_weights` raises WeightsError if the store does not have the version, and WeightsCorrupt if it was
    overwritten while it was read. The model must then not be used until another update succeeds.
    """

    init_info_cls = StoreInit
    update_info_cls = StoreUpdate
    api: VllmCompat
    model: torch.nn.Module
    """Set by vLLM's constructor."""
    _reload: LayerwiseReload | None = None
    _staging: StagingBuffer | None = None

    def init_transfer_engine(self, init_info: StoreInit) -> None:
        """Allocate the memory for staging."""
        if init_info.staging_bytes:
            self._staging = StagingBuffer(init_info.staging_bytes, self._device)

    def start_weight_update(self) -> None:
        """Do nothing: `receive_weights` does the whole update in every release."""

    def receive_weights(self, update_info: StoreUpdate, load_weights: object = None) -> None:
        """Reload what changed. `load_weights`: the loader that older releases pass, not used."""
        with self._vllm_context(), torch.device(self._device):
            self._create_reload(update_info).load_weights(msgspec.json.decode(update_info.held, type=HeldWeights))

    def start_staging(self, update_info: StoreUpdate) -> None:
        """Start to stage what `receive_weights` will load for this update."""
        self._create_reload(update_info).start_staging(msgspec.json.decode(update_info.held, type=HeldWeights))

    @property
    def staged_bytes(self) -> int | None:
        """Bytes staged; None while they are being copied."""
        return 0 if self._staging is None else self._staging.staged_bytes

    def finish_weight_update(self) -> None:
        """Do nothing: `receive_weights` does the whole update in every release."""

    def shutdown(self) -> None:
        """Do nothing: nothing has to be released."""

    @staticmethod
    def trainer_send_weights(iterator: object, trainer_args: object) -> None:
        """Raise NotImplementedError. Older releases require the method; the trainer publishes on its own transport."""
        raise NotImplementedError("the trainer publishes its weights with async_grpo.weights.zmq.")

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _create_reload(self, update: StoreUpdate) -> LayerwiseReload:
        """Return the reload of this worker. The first update creates it, because only updates carry its settings."""
        if self._reload is None:
            # Releases that give transfer engines no model_config use only its dtype for a reload.
            config = getattr(self, "model_config", None) or SimpleNamespace(dtype=getattr(torch, update.dtype))
            self._reload = LayerwiseReload(
                self.api, self.model, config, update.quantization, self._staging, update.captured_graphs
            )
        return self._reload

    def _vllm_context(self) -> AbstractContextManager[Any]:
        """Make vLLM's configuration current: layers may read it while they are processed after loading."""
        config = getattr(self, "vllm_config", None)
        if config is None:
            return nullcontext()
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(config)


class WorkerExtension:
    """Mixed into vLLM's worker: the methods that `collective_rpc` calls."""

    model_runner: Any
    """Set by vLLM's worker."""
    weight_transfer_engine: Any
    """Set by vLLM's worker."""

    def stage_weights(self, update: dict[str, Any]) -> None:
        """Start to stage the weights of a `StoreUpdate`."""
        self.weight_transfer_engine.start_staging(StoreUpdate(**update))

    def staged_bytes(self) -> int | None:
        """Bytes staged; None while they are being copied."""
        staged: int | None = self.weight_transfer_engine.staged_bytes
        return staged

    def report_sampled_logprobs(self) -> None:
        """Make this worker's sampler report log-probabilities of the distribution that it samples from."""
        report_sampled_logprobs(self.model_runner.sampler)

    def differing_weights(self, held: str, quantization: Quantization = "none") -> list[str]:
        """Names of the held tensors (`HeldWeights` as JSON) that this worker does not multiply with."""
        return differing_weights(self.model_runner.model, msgspec.json.decode(held, type=HeldWeights), quantization)


def register_backend(api: VllmCompat) -> None:
    """Register `WeightLoader` with this process's vLLM as the `zmq` backend. Idempotent."""
    engine = type("StoreWeightTransfer", (WeightLoader, api.transfer_engine), {"api": api})
    if BACKEND not in api.factory._registry:
        api.factory.register_engine(BACKEND, engine)


def _request_amx() -> None:
    """Request the AMX tile registers from the kernel. Without it oneDNN's small products raise SIGILL."""
    init_amx = getattr(torch.cpu, "_init_amx", None)
    if init_amx is not None:
        init_amx()


def _silence_reload_warnings() -> None:
    """Silence a warning of each reload about layers without weights.

    Tied heads, rotary tables and unchanged layers get none. Missing weights are detected before an update starts, by a
    comparison with the checkpoint.
    """
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


exit_with_owner()
keep_stores_at_their_address()  # before vLLM 0.32 workers meet over tcp://
_request_amx()
_silence_reload_warnings()
register_backend(find_vllm_api())
register_loaders()
