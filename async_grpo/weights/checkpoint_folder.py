"""Reads a Hugging Face folder like a published version, so that an engine can load a checkpoint as a weight update."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from async_grpo.weights.base import CheckpointSource
from async_grpo.weights.lora import WeightFiles, raw_bytes
from async_grpo.weights.manifest import TensorSpec, WeightVersion, make_layout


class CheckpointReader:
    """`TensorReader` of a folder's tensors. Each tensor is read from its file on demand."""

    def __init__(self, source: CheckpointSource) -> None:
        """Raises WeightsError if the folder has no readable safetensors."""
        self._source = source
        self._folder = WeightFiles(Path(source.folder))
        self.layout = make_layout((name, source.dtype, self._folder.shape(name)) for name in self._folder)

    def changed_since(self, base: WeightVersion) -> list[TensorSpec] | None:
        """None: all tensors must be loaded."""
        return None

    def read(self, spec: TensorSpec) -> memoryview:
        """Return the bytes of one tensor."""
        tensor = self._folder[spec.name].to(getattr(torch, self._source.dtype))
        if self._source.flipped:
            tensor = flip_signs(tensor)
        return raw_bytes(tensor)

    def __iter__(self) -> Iterator[tuple[TensorSpec, memoryview]]:
        for spec in self.layout.tensors:
            yield spec, self.read(spec)

    def verify(self) -> None:
        """Do nothing: checkpoint files are not overwritten."""


def flip_signs(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with every second row negated. Scalars are unchanged.

    >>> flip_signs(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist()
    [[1.0, 2.0], [-3.0, -4.0]]
    """
    copy = tensor.clone()  # safetensors returns the same memory for the next read of this tensor
    if copy.dim():
        copy[1::2].neg_()
    return copy
