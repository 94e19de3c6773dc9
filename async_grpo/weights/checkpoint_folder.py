"""A Hugging Face folder as a version of the weights: an engine can load its checkpoint on the path of an update."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from async_grpo.weights.base import CheckpointSource
from async_grpo.weights.lora import SafetensorsFolder, raw_bytes
from async_grpo.weights.manifest import TensorSpec, WeightVersion, make_layout


class CheckpointReader:
    """The folder's tensors as a `TensorReader`; each is read from its file when it is asked for."""

    def __init__(self, source: CheckpointSource) -> None:
        """Raises WeightsError if the folder has no safetensors."""
        self._source = source
        self._folder = SafetensorsFolder(Path(source.folder))
        self.layout = make_layout((name, source.dtype, self._folder.shape(name)) for name in self._folder)

    def changed_since(self, base: WeightVersion) -> list[TensorSpec] | None:
        """None: everything must be loaded."""
        return None

    def read(self, spec: TensorSpec) -> memoryview:
        """The bytes of one tensor."""
        tensor = self._folder[spec.name].to(getattr(torch, self._source.dtype))
        return raw_bytes(flip_signs(tensor) if self._source.flipped else tensor)

    def __iter__(self) -> Iterator[tuple[TensorSpec, memoryview]]:
        for spec in self.layout.tensors:
            yield spec, self.read(spec)

    def verify(self) -> None:
        """Nothing is overwritten."""


def flip_signs(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in which every second row has the other sign; a scalar stays as it is.

    >>> flip_signs(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist()
    [[1.0, 2.0], [-3.0, -4.0]]
    """
    changed = tensor.clone()  # safetensors gives the same memory to whoever reads the tensor next
    if changed.dim():
        changed[1::2].neg_()
    return changed
