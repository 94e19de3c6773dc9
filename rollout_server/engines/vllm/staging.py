"""The next version beside the model, on the same device, so that the pause of an update only moves it there.

    store of the machine --a thread, while the engine generates--> StagingRoom --in the pause--> the model's tensors

The thread also adds adapters to their base and quantises matrices. Tensors that find no room are taken from the store
in the pause, as all are without a room. A room has the bytes of whole tensors, also in workers that share a model
(`tensor_parallel`), because only vLLM knows which part each of them takes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from async_grpo.weights.manifest import WeightVersion

ALIGNMENT = 256
"""Bytes; what CUDA's and CANN's allocators give every tensor."""

Tensors = list[tuple[str, torch.Tensor]]
"""What vLLM loads for one tensor of the layout: itself, or 8-bit numbers and their scales."""

log = logging.getLogger(__name__)


class StagingRoom:
    """Memory for one version at a time. All methods are for one thread; the copies are made by another."""

    def __init__(self, room_bytes: int, device: torch.device) -> None:
        """Takes the memory at once, so that a device without it is found before the first request."""
        self._device = device
        self._module: Any = torch.get_device_module(device)
        with torch.inference_mode(False):  # a thread of its own writes into it, outside of vLLM's inference mode
            self._room = torch.empty(room_bytes, dtype=torch.uint8, device=device)
        self._identity: WeightVersion | None = None
        self._staged: dict[str, Tensors] = {}
        self._used = 0
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def staged_bytes(self) -> int | None:
        """Bytes of the version that was begun last; None while it is copied."""
        return None if self._thread is not None and self._thread.is_alive() else self._used

    def begin(self, identity: WeightVersion, tensors: Iterable[tuple[str, Callable[[], Tensors]]]) -> None:
        """Copy a version, in a thread: the name of each tensor and what makes it. An earlier version is dropped."""
        self._drop()
        self._module.synchronize()  # what was moved out of the room has arrived
        self._identity = identity
        self._stopped.clear()
        self._thread = threading.Thread(target=self._copy, args=(tensors,), name="staging", daemon=True)
        self._thread.start()

    def of(self, identity: WeightVersion) -> Mapping[str, Tensors]:
        """What is here of this version, by name in its layout; nothing more is copied. Valid until `begin`."""
        self._stop()
        return self._staged if identity == self._identity else {}

    def _stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _drop(self) -> None:
        self._stop()
        self._identity, self._staged, self._used = None, {}, 0

    def _copy(self, tensors: Iterable[tuple[str, Callable[[], Tensors]]]) -> None:
        try:
            self._module.set_device(self._device)
            with torch.inference_mode(False), torch.no_grad(), self._module.stream(self._module.Stream()):
                for name, made in tensors:
                    if self._stopped.is_set():
                        return
                    self._place(name, made())
        except Exception as error:  # the load takes the rest from the store, and raises what is wrong there
            log.warning("a version was staged only in part: %s: %s", type(error).__name__, error)

    def _place(self, name: str, made: Tensors) -> None:
        """Copy the tensors if there is room for all; a copy has ended when this returns."""
        sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for _, tensor in made]
        if self._used + sum(sizes) > self._room.nbytes:
            return
        placed = []
        for (key, tensor), size in zip(made, sizes, strict=True):
            target = self._room[self._used :][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            target.copy_(tensor)
            placed.append((key, target))
            self._used += size
        self._staged[name] = placed
