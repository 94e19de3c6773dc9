"""The store in shared memory: atomic swaps, refused reads."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from async_grpo.errors import WaitTimeout, WeightsCorrupt, WeightsError, WeightsReplaced
from async_grpo.weights import shared_memory
from async_grpo.weights import store as store_module
from async_grpo.weights.chunks import pack_bits
from async_grpo.weights.manifest import WeightVersion, make_layout
from async_grpo.weights.shared_memory import remove_stores, round_up_to_pages, store_path
from async_grpo.weights.store import VersionNotes, WeightStore

LAYOUT = make_layout([("a", "uint8", [100]), ("b", "float32", [16])])
RUN = f"unit-weight-store-{os.getpid()}"


@pytest.fixture
def path() -> Iterator[Path]:
    yield store_path(RUN, "test")
    remove_stores(RUN)


def write(store: WeightStore, identity: WeightVersion, value: int) -> None:
    np.frombuffer(store.begin_write(), np.uint8)[:] = value
    store.commit_write(identity)


def test_a_reader_sees_exactly_what_was_committed(path: Path) -> None:
    writer = WeightStore.create(path, LAYOUT)
    reader = WeightStore.open(path)
    assert reader.newest_version is None
    write(writer, WeightVersion(0, 5), 7)
    snapshot = reader.snapshot(WeightVersion(0, 5))
    assert reader.newest_version == (0, 5)
    assert reader.layout == LAYOUT
    assert {spec.name: bytes(data) for spec, data in snapshot} == {"a": b"\7" * 100, "b": b"\7" * 64}
    snapshot.verify()


def test_both_slots_can_be_read_until_one_is_overwritten(path: Path) -> None:
    store = WeightStore.create(path, LAYOUT)
    write(store, WeightVersion(0, 1), 1)
    older = store.snapshot(WeightVersion(0, 1))
    write(store, WeightVersion(0, 2), 2)
    assert older.block[0] == 1
    older.verify()
    store.begin_write()
    with pytest.raises(WeightsCorrupt, match="overwritten"):
        older.verify()


def test_weights_that_the_store_does_not_hold_are_refused_by_name(path: Path) -> None:
    store = WeightStore.create(path, LAYOUT)
    with pytest.raises(WeightsReplaced, match="does not hold version 1 of epoch 0"):
        store.snapshot(WeightVersion(0, 1))
    for version in (1, 2, 3):
        write(store, WeightVersion(0, version), version)
    with pytest.raises(WeightsError, match="version 1 of epoch 0"):
        store.snapshot(WeightVersion(0, 1))


def test_a_half_written_slot_is_not_readable(path: Path) -> None:
    store = WeightStore.create(path, LAYOUT)
    write(store, WeightVersion(0, 1), 1)
    store.begin_write()
    assert store.newest_version == (0, 1)
    store.begin_write()
    store.commit_write(WeightVersion(0, 2))
    assert store.newest_version == (0, 2)
    with pytest.raises(WeightsError, match=r"no slot .* is being written"):
        store.commit_write(WeightVersion(0, 3))


def test_the_file_is_private_and_can_be_removed_while_it_is_mapped(path: Path) -> None:
    store = WeightStore.create(path, LAYOUT)
    assert path.stat().st_mode & 0o777 == 0o600
    write(store, WeightVersion(0, 1), 9)
    reader = WeightStore.open(path)
    store.unlink()
    assert not path.exists()
    assert reader.snapshot(WeightVersion(0, 1)).block[0] == 9


@pytest.mark.parametrize(
    ("free", "available", "reason"),
    [
        (1000, 10**9, r"1000 bytes are free, 31768 too few"),
        (10**12, 10, r"10240 bytes are available, 22528 too few"),
    ],
)
def test_too_little_room_is_refused_with_the_arithmetic(
    free: int, available: int, reason: str, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:    {available} kB\n")
    monkeypatch.setattr(shared_memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    with pytest.raises(WeightsError, match=f"of 32768 bytes .* {reason}"):
        WeightStore.create(path, LAYOUT)


def test_something_that_is_no_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"hello" * 100)
    with pytest.raises(WeightsError, match="not a weight store"):
        WeightStore.open(tmp_path / "x")
    with pytest.raises(WeightsError, match="no weight store"):
        WeightStore.open(tmp_path / "missing")


def test_begin_write_overwrites_the_next_victim_unless_it_is_protected(path: Path) -> None:
    store = WeightStore.create(path, LAYOUT)
    for version in (1, 2):
        assert store.version_to_overwrite() is None
        write(store, WeightVersion(0, version), version)
    assert store.version_to_overwrite() == (0, 1)
    spared = store.snapshot(WeightVersion(0, 1))
    np.frombuffer(store.begin_write(WeightVersion(0, 1)), np.uint8)[:] = 3
    assert (store.newest_version, store.version_to_overwrite()) == ((0, 1), None)
    store.commit_write(WeightVersion(0, 3))
    assert store.newest_version == (0, 3)
    assert spared.block[0] == 1
    spared.verify()


def test_a_version_lists_exactly_the_tensors_that_differ_from_its_base(path: Path) -> None:
    store = WeightStore.create(path, LAYOUT)
    store.begin_write()
    store.commit_write(WeightVersion(0, 2), VersionNotes(base=(0, 1), changed=pack_bits([False, True])))
    snapshot = WeightStore.open(path).snapshot(WeightVersion(0, 2))
    changed = snapshot.changed_since(WeightVersion(0, 1))
    assert changed is not None
    assert [spec.name for spec in changed] == ["b"]
    assert snapshot.changed_since(WeightVersion(0, 0)) is None
    write(store, WeightVersion(0, 3), 3)
    assert store.snapshot(WeightVersion(0, 3)).changed_since(WeightVersion(0, 2)) is None


def test_notes_too_long_for_the_store_are_left_out(path: Path) -> None:
    store = WeightStore.create(path, LAYOUT, chunks=2)
    store.begin_write()
    store.commit_write(WeightVersion(0, 1), VersionNotes(hashes=bytes(100_000)))
    assert store.snapshot(WeightVersion(0, 1)).notes == VersionNotes()


def test_a_store_whose_writer_died_amid_a_version_is_taken_over(path: Path) -> None:
    writer = WeightStore.create(path, LAYOUT)
    for version in (1, 2):
        write(writer, WeightVersion(0, version), version)
    reader = WeightStore.open(path)
    snapshot = reader.snapshot(WeightVersion(0, 2))
    writer.begin_write()
    heir = WeightStore.adopt(path)
    assert heir.newest_version == (0, 2)
    with pytest.raises(WeightsReplaced):
        heir.snapshot(WeightVersion(0, 1))
    write(heir, WeightVersion(0, 3), 3)
    snapshot.verify()
    assert reader.snapshot(WeightVersion(0, 3)).block[0] == 3


def test_a_process_that_stops_with_the_lock_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, other = WeightStore.create(path, LAYOUT), WeightStore.open(path)
    monkeypatch.setattr(store_module, "LOCK_TIMEOUT_S", 0.05)
    with other._lock_header(fcntl.LOCK_SH), pytest.raises(WaitTimeout, match=r"the lock of .*test\.weights"):
        store.begin_write()
    store.begin_write()


def test_a_store_of_one_slot_replaces_its_only_version(path: Path) -> None:
    WeightStore.create(path, LAYOUT)
    two_slots = path.stat().st_size
    store = WeightStore.create(path, LAYOUT, slots=1)
    assert path.stat().st_size == two_slots - round_up_to_pages(LAYOUT.total_bytes)
    store.begin_write()
    store.commit_write(WeightVersion(0, 1))
    reader = WeightStore.open(path)
    snapshot = reader.snapshot(WeightVersion(0, 1))
    assert (reader.slot_count, store.version_to_overwrite()) == (1, WeightVersion(0, 1))
    store.begin_write()
    assert reader.newest_version is None
    with pytest.raises(WeightsCorrupt, match="overwritten"):
        snapshot.verify()
    store.commit_write(WeightVersion(0, 2))
    assert reader.newest_version == WeightVersion(0, 2)
