"""A Hugging Face folder as a version of the weights."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from async_grpo.weights.base import CheckpointSource, HeldWeights, TensorReader
from async_grpo.weights.manifest import WeightVersion
from async_grpo.weights.source_reader import SourceReader

TENSORS = {
    "matrix": torch.arange(1.0, 7.0).view(3, 2),
    "norm": torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "scalar": torch.tensor(5.0),
}


def opened(folder: Path, dtype: str, *, flipped: bool) -> TensorReader:
    source = CheckpointSource(folder=str(folder), dtype=dtype, flipped=flipped)
    return SourceReader().open(HeldWeights(epoch=-2, version=-1, source=source))


def read(reader: TensorReader) -> dict[str, torch.Tensor]:
    return {
        spec.name: torch.frombuffer(bytearray(data), dtype=getattr(torch, spec.dtype)).view(spec.shape)
        for spec, data in reader
    }


def test_its_tensors_are_those_of_the_files_in_the_asked_dtype(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    reader = opened(tmp_path, "bfloat16", flipped=False)
    assert reader.changed_since(WeightVersion(-2, -1)) is None
    found = read(reader)
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in TENSORS.items())


def test_flipped_ones_have_the_other_sign_in_every_second_row_and_leave_the_files_alone(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    for _ in range(2):
        found = read(opened(tmp_path, "float32", flipped=True))
        assert found["matrix"].tolist() == [[1, 2], [-3, -4], [5, 6]]
        assert found["norm"].tolist() == [1, -2, 3, -4]
        assert found["scalar"].item() == 5
    reader = opened(tmp_path, "float32", flipped=True)
    assert all(read(reader)["matrix"].equal(found["matrix"]) for _ in range(2))
