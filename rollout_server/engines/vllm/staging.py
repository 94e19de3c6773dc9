"""Stages the next version on the engine's device, so that the pause of an update only copies within the device.

    store of the machine --a thread, while the engine generates--> StagingBuffer --in the pause--> the model's tensors

    start_staging --> copying --> done --collect_staged--> tensors for the load, valid until the next start_staging
                         '------collect_staged: stop------'

The thread also merges adapters into their base and quantises matrices. Tensors that do not fit into the buffer are read
from the store during the pause, as all are without a buffer. The buffer holds whole tensors even if workers split the
model (`tensor_parallel`), because only vLLM determines each worker's part.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from async_grpo.weights.manifest import WeightVersion

ALIGNMENT = 256
"""Alignment of staged tensors in bytes, the same as in the allocators of CUDA and CANN."""

Tensors = list[tuple[str, torch.Tensor]]
"""Named tensors that vLLM loads for one tensor of the layout: itself, or 8-bit numbers and their scales."""

log = logging.getLogger(__name__)


class StagingBuffer:
    """Device memory for one version at a time. Call all methods from one thread; another thread makes the copies."""

    def __init__(self, buffer_bytes: int, device: torch.device) -> None:
        """Allocate the memory now, so that a device without enough of it fails before the first request."""
        self._device = device
        self._device_module: Any = torch.get_device_module(device)
        # Outside of vLLM's inference mode: a tensor created in it could not be written by our thread.
        with torch.inference_mode(False):
            self._memory = torch.empty(buffer_bytes, dtype=torch.uint8, device=device)
        self._identity: WeightVersion | None = None
        self._staged: dict[str, Tensors] = {}
        self._used_bytes = 0
        self._stop_requested = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def staged_bytes(self) -> int | None:
        """Bytes staged of the latest version; None while it is being copied."""
        if self._thread is not None and self._thread.is_alive():
            return None
        return self._used_bytes

    def start_staging(self, identity: WeightVersion, tensors: Iterable[tuple[str, Callable[[], Tensors]]]) -> None:
        """Start to copy a version in a thread, dropping the version before.

        tensors: for each tensor of the layout its name and a function that returns what vLLM loads for it.
        """
        self._stop_copying()
        # Copies out of the buffer may still be queued on the device. Wait before the memory is overwritten.
        self._device_module.synchronize()
        self._staged = {}
        self._used_bytes = 0
        self._identity = identity

        self._stop_requested.clear()
        self._thread = threading.Thread(target=self._copy_tensors, args=(tensors,), name="staging", daemon=True)
        self._thread.start()

    def collect_staged(self, identity: WeightVersion) -> Mapping[str, Tensors]:
        """Stop copying and return what is staged of this version, by name in the layout; empty for another version.

        The tensors are valid until the next `start_staging`.
        """
        self._stop_copying()
        return self._staged if identity == self._identity else {}

    def _stop_copying(self) -> None:
        self._stop_requested.set()
        if self._thread is not None:
            self._thread.join()

    def _copy_tensors(self, tensors: Iterable[tuple[str, Callable[[], Tensors]]]) -> None:
        try:
            self._device_module.set_device(self._device)
            copy_stream = self._device_module.Stream()
            with torch.inference_mode(False), torch.no_grad(), self._device_module.stream(copy_stream):
                for name, make_tensors in tensors:
                    if self._stop_requested.is_set():
                        return
                    self._copy(name, make_tensors())
        except Exception as error:  # the load reads the rest from the store, and raises what is wrong there
            log.warning("a version was staged only in part: %s: %s", type(error).__name__, error)

    def _copy(self, name: str, tensors: Tensors) -> None:
        """Copy all of the tensors, or none if they do not fit. Returns after the copies have finished."""
        sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for _, tensor in tensors]
        if self._used_bytes + sum(sizes) > self._memory.nbytes:
            return
        copies = []
        for (loaded_name, tensor), size in zip(tensors, sizes, strict=True):
            target_bytes = self._memory[self._used_bytes :][: tensor.nbytes]
            target = target_bytes.view(tensor.dtype).view(tensor.shape)
            target.copy_(tensor)
            copies.append((loaded_name, target))
            self._used_bytes += size
        self._staged[name] = copies
