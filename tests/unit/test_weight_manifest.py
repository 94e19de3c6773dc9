"""Layouts, chunks and manifests."""

from __future__ import annotations

import msgpack
import pytest

from async_grpo.errors import WeightsCorrupt, WeightsError
from async_grpo.weights.manifest import Identity, Manifest, count_chunks, hash_chunk, layout_of, manifest_of
from async_grpo.wire import decode, encode

LAYOUT = layout_of([("a", "bfloat16", [3]), ("b", "float32", [2, 5]), ("scalar", "float32", [])])


def test_tensors_are_aligned_and_do_not_overlap() -> None:
    assert [(spec.offset, spec.nbytes) for spec in LAYOUT.tensors] == [(0, 6), (64, 40), (128, 4)]
    assert LAYOUT.total_bytes == 192


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(WeightsError, match="same name"):
        layout_of([("a", "float32", [1]), ("a", "float32", [1])])


def test_an_unknown_dtype_names_the_tensor() -> None:
    with pytest.raises(WeightsError, match=r"'a' has dtype 'complex64'"):
        layout_of([("a", "complex64", [1])])


@pytest.mark.parametrize("chunk_bytes", [1, 64, 100, 192, 1000])
def test_chunks_cover_every_byte_once(chunk_bytes: int) -> None:
    block = memoryview(bytes(range(192)))
    manifest = manifest_of(Identity(0, 1), LAYOUT, block, chunk_bytes)
    parts = [block[manifest.chunk(index)] for index in range(count_chunks(192, chunk_bytes))]
    assert b"".join(parts) == bytes(block)
    assert manifest.chunk_hashes == [hash_chunk(part) for part in parts]


def test_a_manifest_survives_its_encoding_and_plain_msgpack_reads_it() -> None:
    manifest = manifest_of(Identity(2, 7), LAYOUT, memoryview(bytes(192)), 64)
    payload = encode(manifest)
    assert decode(payload, Manifest) == manifest
    assert msgpack.unpackb(payload)["layout"]["tensors"][1]["name"] == "b"


def test_a_manifest_of_another_encoding_or_with_missing_hashes_is_refused() -> None:
    good = manifest_of(Identity(0, 0), LAYOUT, memoryview(bytes(192)), 64)
    fields = {"epoch": 0, "version": 0, "layout": LAYOUT, "chunk_bytes": 64}
    with pytest.raises(WeightsCorrupt, match="encoding 'other'"):
        Manifest(**fields, chunk_hashes=good.chunk_hashes, encoding="other").validate()
    with pytest.raises(WeightsCorrupt, match="2 chunk hashes"):
        Manifest(**fields, chunk_hashes=good.chunk_hashes[:2]).validate()


def test_a_newer_epoch_is_newer_whatever_its_version() -> None:
    assert Identity(1, 3) > Identity(0, 9) > Identity(0, 8)
