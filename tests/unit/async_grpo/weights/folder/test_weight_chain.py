"""A chunk out of a chain of versions: from the dense one, from a held one, and with a link that is not there."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from async_grpo.errors import WeightsCorrupt
from async_grpo.weights import delta
from async_grpo.weights.chunks import cut_into_chunks
from async_grpo.weights.folder.chain import (
    Chain,
    Entry,
    VersionRecord,
    decode_with_digest,
    encode_with_digest,
    object_name,
)
from async_grpo.weights.folder.objects import FolderObjects
from async_grpo.weights.manifest import WeightManifest, WeightVersion, make_layout

FOLDER = "run/epoch-000001"
LAYOUT = make_layout([("a", "uint8", [64]), ("b", "float32", [16]), ("c", "float32", [16])])
CHUNKS = cut_into_chunks(LAYOUT, 64)
BLOCKS = [bytes(192), bytes([1, *[0] * 191]), bytes([2, *[0] * 63, *range(64), *[0] * 64])]
"""Version 0; 1 changes chunk 0; 2 changes chunks 0 (a patch) and 1 (written whole). Chunk 2 never changes."""


def record(version: int, changes: dict[int, Entry], *, dense: bool = False) -> VersionRecord:
    manifest = WeightManifest(epoch=1, version=version, layout=LAYOUT, chunk_bytes=64, hashes=b"", key=b"")
    return VersionRecord(manifest=manifest, before=version - 1 if version else None, changes=changes, dense=dense)


@pytest.fixture
def objects(tmp_path: Path) -> FolderObjects:
    """Three versions, of which the first is dense."""
    objects = FolderObjects(tmp_path)
    first, second = (delta.make_patch(memoryview(old)[:64], memoryview(new)[:64], 1) for old, new in pairwise(BLOCKS))
    whole = BLOCKS[2][64:128]
    entries = [
        {},
        {0: Entry(0, len(first), True)},
        {0: Entry(0, len(second), True), 1: Entry(len(second), len(second) + 64, False)},
    ]
    for version, content in enumerate([b"", first, second + whole]):
        objects.write(object_name(FOLDER, version, "changes"), [content])
        objects.write(
            object_name(FOLDER, version, "version"),
            [encode_with_digest(record(version, entries[version], dense=not version))],
        )
    objects.write(object_name(FOLDER, 0, "dense"), [BLOCKS[0]])
    return objects


def newest(objects: FolderObjects, held: WeightVersion | None) -> Chain:
    return Chain.read_links(objects, FOLDER, WeightVersion(1, 2), held)


def block(chain: Chain, held: bytes | None) -> bytes:
    parts = [
        chain.read_chunk(
            index, place, None if held is None else lambda place=place: bytearray(held[place.start : place.stop])
        )
        for index, place in enumerate(CHUNKS)
    ]
    return b"".join(parts)


def test_a_late_joiner_builds_on_the_dense_version(objects: FolderObjects) -> None:
    assert block(newest(objects, None), None) == BLOCKS[2]


@pytest.mark.parametrize("held", [0, 1])
def test_a_receiver_patches_its_version_and_reads_no_dense_one(objects: FolderObjects, held: int) -> None:
    objects.remove([object_name(FOLDER, 0, "dense")])
    chain = newest(objects, WeightVersion(1, held))
    assert chain.reaches_base
    assert block(chain, BLOCKS[held]) == BLOCKS[2]


def test_a_version_of_another_epoch_is_no_base(objects: FolderObjects) -> None:
    assert not newest(objects, WeightVersion(0, 1)).reaches_base


def test_a_link_that_was_removed_is_missed(objects: FolderObjects) -> None:
    objects.remove([object_name(FOLDER, 1, "version")])
    with pytest.raises(FileNotFoundError):
        newest(objects, None)
    assert newest(objects, WeightVersion(1, 1)).reaches_base


def test_a_chain_that_stops_at_a_held_version_has_no_base(objects: FolderObjects) -> None:
    with pytest.raises(FileNotFoundError, match="ends at version 2 of epoch 1, without a base"):
        newest(objects, WeightVersion(1, 1)).read_chunk(0, CHUNKS[0], None)


@pytest.mark.parametrize("damage", [lambda sealed: sealed[:-1], lambda sealed: sealed[:-1] + b"!", lambda _: b""])
def test_a_record_that_is_damaged_or_cut_short_is_refused(damage: object) -> None:
    sealed = encode_with_digest(record(2, {}))
    assert decode_with_digest(sealed, VersionRecord, "it") == record(2, {})
    assert callable(damage)
    with pytest.raises(WeightsCorrupt, match="it failed its hash"):
        decode_with_digest(damage(sealed), VersionRecord, "it")
