"""The store in shared memory: atomic swaps, refused reads."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from async_grpo.errors import WeightsCorrupt, WeightsError
from async_grpo.weights.manifest import Identity, layout_of
from async_grpo.weights.store import WeightStore, remove_stores, store_path

LAYOUT = layout_of([("a", "uint8", [100]), ("b", "float32", [16])])
RUN = "unit-weight-store"


@pytest.fixture
def path() -> Iterator[Path]:
    yield store_path(RUN, "test")
    remove_stores(RUN)


def write(store: WeightStore, identity: Identity, value: int) -> None:
    np.frombuffer(store.begin(), np.uint8)[:] = value
    store.commit(identity)


def test_a_reader_sees_exactly_what_was_committed(path: Path) -> None:
    writer = WeightStore.create(path, LAYOUT)
    reader = WeightStore.open(path)
    assert reader.identity is None
    write(writer, Identity(0, 5), 7)
    snapshot = reader.snapshot(Identity(0, 5))
    assert reader.identity == (0, 5)
    assert reader.layout == LAYOUT
    assert snapshot.view("a").tolist() == [7] * 100
    assert [spec.name for spec, _ in snapshot] == ["a", "b"]
    snapshot.verify()


def test_both_slots_can_be_read_until_one_is_overwritten(path: Path) -> None:
    store = WeightStore.create(path, LAYOUT)
    write(store, Identity(0, 1), 1)
    older = store.snapshot(Identity(0, 1))
    write(store, Identity(0, 2), 2)
    assert older.view("a")[0] == 1
    older.verify()
    store.begin()
    with pytest.raises(WeightsCorrupt, match="overwritten"):
        older.verify()


def test_weights_that_the_store_does_not_hold_are_refused_by_name(path: Path) -> None:
    store = WeightStore.create(path, LAYOUT)
    with pytest.raises(WeightsError, match="does not hold version 1 of epoch 0"):
        store.snapshot(Identity(0, 1))
    for version in (1, 2, 3):
        write(store, Identity(0, version), version)
    with pytest.raises(WeightsError, match="version 1 of epoch 0"):
        store.snapshot(Identity(0, 1))


def test_a_half_written_slot_is_not_readable(path: Path) -> None:
    store = WeightStore.create(path, LAYOUT)
    write(store, Identity(0, 1), 1)
    store.begin()
    assert store.identity == (0, 1)
    store.begin()
    store.commit(Identity(0, 2))
    assert store.identity == (0, 2)
    with pytest.raises(WeightsError, match="without begin"):
        store.commit(Identity(0, 3))


def test_the_file_is_private_and_can_be_removed_while_it_is_mapped(path: Path) -> None:
    store = WeightStore.create(path, LAYOUT)
    assert path.stat().st_mode & 0o777 == 0o600
    write(store, Identity(0, 1), 9)
    reader = WeightStore.open(path)
    store.unlink()
    assert not path.exists()
    assert reader.snapshot(Identity(0, 1)).view("a")[0] == 9


def test_too_little_shared_memory_is_refused_with_the_arithmetic(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(WeightsError, match=r"of 16384 bytes .* 1000 bytes are free, 15384 too few"):
        WeightStore.create(path, LAYOUT)


def test_something_that_is_no_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"hello" * 100)
    with pytest.raises(WeightsError, match="not a weight store"):
        WeightStore.open(tmp_path / "x")
    with pytest.raises(WeightsError, match="no weight store"):
        WeightStore.open(tmp_path / "missing")
