"""Layouts, chunks and manifests."""

from __future__ import annotations

import msgpack
import msgspec
import pytest

from async_grpo.errors import WeightsCorrupt, WeightsError
from async_grpo.weights.chunks import (
    cut_into_chunks,
    digest_hashes,
    find_changed_tensors,
    hash_chunk,
    pack_bits,
    pack_hashes,
    read_hashes,
    unpack_bits,
)
from async_grpo.weights.manifest import WeightManifest, WeightVersion, make_layout
from async_grpo.wire import decode, encode

LAYOUT = make_layout([("a", "bfloat16", [3]), ("b", "float32", [2, 5]), ("scalar", "float32", [])])


def manifest_of(block: bytes, chunk_bytes: int = 64) -> WeightManifest:
    chunks = cut_into_chunks(LAYOUT, chunk_bytes)
    hashes = pack_hashes([hash_chunk(chunk.view(memoryview(block))) for chunk in chunks])
    return WeightManifest(epoch=2, version=7, layout=LAYOUT, chunk_bytes=chunk_bytes, hashes=hashes, key=b"k" * 16)


def test_tensors_are_aligned_and_do_not_overlap() -> None:
    assert [(spec.offset, spec.nbytes) for spec in LAYOUT.tensors] == [(0, 6), (64, 40), (128, 4)]
    assert LAYOUT.total_bytes == 192


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ([("a", "float32", [1]), ("a", "float32", [1])], "same name"),
        ([("a", "complex64", [1])], "'a' has dtype 'complex64'"),
        ([], "at least one"),
    ],
)
def test_an_invalid_layout_is_refused(tensors: list[tuple[str, str, list[int]]], reason: str) -> None:
    with pytest.raises(WeightsError, match=reason):
        make_layout(tensors)


@pytest.mark.parametrize("chunk_bytes", [64, 128, 192, 1024])
def test_chunks_cover_every_byte_once(chunk_bytes: int) -> None:
    block = memoryview(bytes(range(192)))
    chunks = cut_into_chunks(LAYOUT, chunk_bytes)
    assert b"".join(chunk.view(block) for chunk in chunks) == bytes(block)
    assert all(0 < chunk.nbytes <= chunk_bytes for chunk in chunks)


def test_a_chunk_never_mixes_items_of_different_sizes() -> None:
    assert [chunk.item_bytes for chunk in cut_into_chunks(LAYOUT, 1024)] == [2, 4]
    mixed = make_layout([("w", "float8_e4m3fn", [100]), ("scale", "float32", [1]), ("v", "int8", [30])])
    assert [tuple(chunk) for chunk in cut_into_chunks(mixed, 64)] == [
        (0, 64, 1),
        (64, 128, 1),
        (128, 192, 4),
        (192, 256, 1),
    ]


def test_a_tensor_without_elements_takes_no_room() -> None:
    layout = make_layout([("empty", "float32", [0, 7]), ("a", "int8", [1]), ("none", "float32", [0])])
    assert [tuple(chunk) for chunk in cut_into_chunks(layout, 64)] == [(0, 64, 1)]


def test_a_manifest_survives_its_encoding_and_plain_msgpack_reads_it() -> None:
    manifest = manifest_of(bytes(192))
    payload = encode(manifest)
    assert decode(payload, WeightManifest) == manifest
    assert msgpack.unpackb(payload)["layout"]["tensors"][1]["name"] == "b"


def test_an_invalid_manifest_is_refused() -> None:
    good = manifest_of(bytes(192))
    good.validate()
    with pytest.raises(WeightsCorrupt, match="format 99"):
        msgspec.structs.replace(good, format=99).validate()
    with pytest.raises(WeightsCorrupt, match="multiple of 64"):
        msgspec.structs.replace(good, chunk_bytes=100).validate()
    beyond = msgspec.structs.replace(LAYOUT.tensors[0], offset=1 << 40)
    with pytest.raises(WeightsCorrupt, match="do not follow from their shapes"):
        layout = msgspec.structs.replace(LAYOUT, tensors=[beyond, *LAYOUT.tensors[1:]])
        msgspec.structs.replace(good, layout=layout).validate()
    with pytest.raises(WeightsCorrupt, match=r"1 chunk hashes, but 192 bytes in chunks of 64 need 3"):
        read_hashes(msgspec.structs.replace(good, hashes=good.hashes[:8]), cut_into_chunks(LAYOUT, 64))


def test_the_digest_stands_for_every_byte() -> None:
    block = bytearray(192)
    before = digest_hashes(manifest_of(bytes(block)).hashes)
    assert digest_hashes(manifest_of(bytes(block)).hashes) == before
    block[191] = 1
    assert digest_hashes(manifest_of(bytes(block)).hashes) != before


def test_a_newer_epoch_is_newer_at_any_version() -> None:
    assert WeightVersion(1, 3) > WeightVersion(0, 9) > WeightVersion(0, 8)


@pytest.mark.parametrize("chunk_bytes", [64, 256])
@pytest.mark.parametrize(
    ("at", "names"), [(0, ["a"]), (5, ["a"]), (10, []), (64, ["b"]), (103, ["b"]), (131, ["scalar"]), (150, [])]
)
def test_changed_tensors_are_exact_at_any_chunk_size(at: int, names: list[str], chunk_bytes: int) -> None:
    old, new = bytes(192), bytearray(192)
    new[at] = 1
    chunks = cut_into_chunks(LAYOUT, chunk_bytes)
    hashes = [read_hashes(manifest_of(bytes(block), chunk_bytes), chunks) for block in (old, new)]
    flags = find_changed_tensors(LAYOUT, chunks, *hashes, memoryview(old), memoryview(new))
    assert [spec.name for spec, flag in zip(LAYOUT.tensors, flags, strict=True) if flag] == names
    assert unpack_bits(pack_bits(flags), 3) == flags
