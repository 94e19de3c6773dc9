"""Reading a Hugging Face folder as a version of the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from async_grpo.errors import WeightsError
from async_grpo.weights.base import CheckpointSource, HeldWeights, TensorReader
from async_grpo.weights.manifest import WeightVersion
from async_grpo.weights.source_reader import SourceReader

TENSORS = {
    "matrix": torch.arange(1.0, 7.0).view(3, 2),
    "norm": torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "scalar": torch.tensor(5.0),
}


def open_checkpoint(folder: Path, dtype: str, *, flipped: bool) -> TensorReader:
    source = CheckpointSource(folder=str(folder), dtype=dtype, flipped=flipped)
    return SourceReader().open(HeldWeights(epoch=-2, version=-1, source=source))


def read_tensors(reader: TensorReader) -> dict[str, torch.Tensor]:
    return {
        spec.name: torch.frombuffer(bytearray(data), dtype=getattr(torch, spec.dtype)).view(spec.shape)
        for spec, data in reader
    }


def test_tensors_are_read_in_the_requested_dtype(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    reader = open_checkpoint(tmp_path, "bfloat16", flipped=False)
    assert reader.changed_since(WeightVersion(-2, -1)) is None
    tensors = read_tensors(reader)
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], tensor.bfloat16()) for name, tensor in TENSORS.items())


def test_flipped_negates_every_second_row_and_not_the_files(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    for _ in range(2):
        tensors = read_tensors(open_checkpoint(tmp_path, "float32", flipped=True))
        assert tensors["matrix"].tolist() == [[1, 2], [-3, -4], [5, 6]]
        assert tensors["norm"].tolist() == [1, -2, 3, -4]
        assert tensors["scalar"].item() == 5
    reader = open_checkpoint(tmp_path, "float32", flipped=True)
    assert all(read_tensors(reader)["matrix"].equal(tensors["matrix"]) for _ in range(2))


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    damaged = tmp_path / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-4])
    with pytest.raises(WeightsError, match=r"model\.safetensors \(\d+ bytes\) cannot be read"):
        open_checkpoint(tmp_path, "bfloat16", flipped=False)
