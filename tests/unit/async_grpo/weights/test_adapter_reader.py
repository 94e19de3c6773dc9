"""Adapters in a store read as whole weights of the base's folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from async_grpo.errors import WeightsCorrupt
from async_grpo.weights import chunks
from async_grpo.weights.base import HeldWeights, MergeBase
from async_grpo.weights.lora import DIGEST, AdapterReader, adapter_names, add_adapter, base_digest, raw_bytes
from async_grpo.weights.manifest import WeightVersion, make_layout
from async_grpo.weights.sender import copy_tensors
from async_grpo.weights.shared_memory import remove_stores, store_path
from async_grpo.weights.source_reader import SourceReader
from async_grpo.weights.store import VersionNotes, WeightStore

RUN = "test-adapter-reader"
UP, DOWN, NORM = (f"model.layers.0.{part}.weight" for part in ("mlp.up_proj", "mlp.down_proj", "norm"))
RANK, SCALE = 2, 1.5


@pytest.fixture(autouse=True)
def _no_shared_memory_is_left() -> Iterator[None]:
    yield
    remove_stores(RUN)


class Published:
    """A base folder, and a store with adapters of UP and DOWN."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        drawn = torch.Generator().manual_seed(1)
        self.base = {UP: torch.randn(6, 4, generator=drawn), DOWN: torch.randn(4, 6, generator=drawn)}
        self.base = {name: tensor.to(dtype) for name, tensor in {**self.base, NORM: torch.ones(4)}.items()}
        save_file(self.base, folder / "model.safetensors")
        self.folder, self.dtype = folder, str(dtype).removeprefix("torch.")
        shapes = {UP: [(RANK, 4), (6, RANK)], DOWN: [(RANK, 6), (4, RANK)]}
        self.adapters = {
            name: torch.randn(shape, generator=drawn).to(dtype)
            for target, both in shapes.items()
            for name, shape in zip(adapter_names(target), both, strict=True)
        }
        kinds = [(name, self.dtype, tensor.shape) for name, tensor in self.adapters.items()]
        self.store = WeightStore.create(store_path(RUN, "store"), make_layout([(DIGEST, "uint8", [8]), *kinds]))

    def publish(self, version: int, changed: set[str] | None = None, digest: bytes | None = None) -> HeldWeights:
        """`changed` since the version before; None: not known."""
        arrays = {name: np.frombuffer(raw_bytes(tensor), np.uint8) for name, tensor in self.adapters.items()}
        arrays[DIGEST] = np.frombuffer(digest or base_digest(self.folder), np.uint8)
        copy_tensors(self.store.begin_write(), self.store.layout, arrays.items())
        flags = [changed is not None and spec.name in changed for spec in self.store.layout.tensors]
        told = None if changed is None else (0, version - 1)
        self.store.commit_write(WeightVersion(0, version), VersionNotes(base=told, changed=chunks.pack_bits(flags)))
        base = MergeBase(folder=str(self.folder), dtype=self.dtype, scale=SCALE)
        held = HeldWeights.in_store(self.store.path, epoch=0, version=version)
        return HeldWeights(epoch=0, version=version, source=held.source, base=base)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_target_is_read_with_its_adapters_added_and_the_rest_as_it_is(tmp_path: Path, dtype: torch.dtype) -> None:
    published = Published(tmp_path, dtype)
    read = {spec.name: bytes(data) for spec, data in SourceReader().open(published.publish(0))}
    for name in (UP, DOWN):
        a, b = (published.adapters[each].double() for each in adapter_names(name))
        expected = published.base[name].double() + SCALE * b @ a
        found = torch.frombuffer(bytearray(read[name]), dtype=dtype).view(expected.shape)
        assert (found.double() - expected).abs().max() <= torch.finfo(dtype).eps * expected.abs().max()
        a, b = (published.adapters[each] for each in adapter_names(name))
        assert torch.equal(
            found, add_adapter(published.base[name], a, b, SCALE)
        )  # bit for bit what the trainer exports
    assert read.keys() == {UP, DOWN, NORM}
    assert read[NORM] == bytes(raw_bytes(published.base[NORM]))


def test_only_targets_whose_adapters_changed_are_loaded_again(tmp_path: Path) -> None:
    published = Published(tmp_path)
    reader = SourceReader().open(published.publish(1, changed={adapter_names(UP)[1]}))
    assert [spec.name for spec in reader.changed_since(WeightVersion(0, 0)) or []] == [UP]


def test_all_targets_are_loaded_again_if_it_is_not_known_which_changed(tmp_path: Path) -> None:
    reader = SourceReader().open(Published(tmp_path).publish(5))
    assert {spec.name for spec in reader.changed_since(WeightVersion(0, 0)) or []} == {UP, DOWN}


def test_adapters_of_another_base_are_refused(tmp_path: Path) -> None:
    held = Published(tmp_path).publish(0, digest=b"otherone")
    with pytest.raises(WeightsCorrupt, match="Give trainer and servers the same files"):
        SourceReader().open(held)


def test_whole_weights_are_refused_where_adapters_are_expected(tmp_path: Path) -> None:
    published = Published(tmp_path)
    held = published.publish(0)
    store = WeightStore.create(store_path(RUN, "whole"), make_layout([(UP, "float32", [6, 4])]))
    store.begin_write()
    store.commit_write(WeightVersion(0, 0))
    assert held.base is not None
    with pytest.raises(WeightsCorrupt, match="publishes whole weights"):
        AdapterReader(store.snapshot(WeightVersion(0, 0)), held.base)
