"""The lossless difference between two versions of a chunk: exact, and safe against any bytes."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.errors import WeightsCorrupt, WeightsError
from async_grpo.weights.delta import ITEM_BYTES, apply_patch, make_patch

GUARD = b"\xa5" * 63  # so that no block is aligned
HEADER = struct.Struct("<BBxxxxxxQQQQ")

item_sizes = st.sampled_from(ITEM_BYTES)
seeds = st.integers(0, 2**32 - 1)


def applied(base: bytes, patch: bytes | memoryview) -> bytes:
    """The block after the patch; the bytes around it must stay as they are, also when it is refused."""
    memory = bytearray(GUARD + base + GUARD)
    block = memoryview(memory)[len(GUARD) : len(GUARD) + len(base)]
    try:
        apply_patch(block, patch)
    except WeightsCorrupt:
        assert block == base
        raise
    finally:
        assert memory.startswith(GUARD) and memory.endswith(GUARD)
    return bytes(block)


def build_patch(
    item_bytes: int, block_bytes: int, gaps: bytes, planes: bytes, *, changed: int, tail: bytes = b""
) -> bytes:
    packed = zstandard.compress(gaps)
    header = HEADER.pack(1, item_bytes, block_bytes, changed, len(gaps), len(packed))
    return header + packed + zstandard.compress(planes) + tail


def random_pair(items: int, changed: float, seed: int) -> tuple[bytes, bytes]:
    """Bfloat16-like items, of which a fraction moves by one or two."""
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 1 << 16, items, np.uint16)
    steps = rng.choice(np.array([1, 2, 65534, 65535], np.uint16), items)
    return base.tobytes(), (base + steps * (rng.random(items) < changed)).tobytes()


@given(base=st.binary(max_size=200), seed=seeds, item_bytes=item_sizes, changed=st.sampled_from([0.0, 0.1, 1.0]))
def test_any_bytes_come_out_exactly(base: bytes, seed: int, item_bytes: int, changed: float) -> None:
    rng = np.random.default_rng(seed)
    other = rng.integers(0, 256, len(base), np.uint8)
    new = np.where(rng.random(len(base)) < changed, other, np.frombuffer(base, np.uint8)).tobytes()
    assert applied(base, make_patch(memoryview(base), memoryview(new), item_bytes)) == new


@pytest.mark.parametrize("distance", [1, 2, 254, 255, 256, 509, 510, 511, 5000])
def test_changes_may_be_any_distance_apart(distance: int) -> None:
    base, new = bytes(4 * distance + 7), bytearray(4 * distance + 7)
    for position in (distance - 1, 2 * distance - 1, 4 * distance - 1):
        new[position] = 9
    assert applied(base, make_patch(memoryview(base), memoryview(new), 1)) == new


def test_a_chunk_that_did_not_change_costs_almost_nothing() -> None:
    block = memoryview(bytes(1 << 20))
    assert len(make_patch(block, block, 2)) < 100


def test_a_small_step_of_bfloat16_weights_is_thirty_times_smaller() -> None:
    base, new = random_pair(1 << 20, 0.013, seed=2)
    patch = make_patch(memoryview(base), memoryview(new), 2)
    assert len(patch) * 30 < len(base)
    assert applied(base, patch) == new


def test_the_format_matches_its_description() -> None:
    base = struct.pack("<300H", *range(300)) + b"t"
    new = bytearray(base)
    struct.pack_into("<H", new, 2 * 1, 1 + 1)  # +1 is 2 in zigzag
    struct.pack_into("<H", new, 2 * 299, 299 - 200)  # -200 is 399
    new[-1:] = b"T"
    by_hand = build_patch(2, 601, bytes([2, 255, 43]), bytes([2, 143, 0, 1]), changed=2, tail=b"T")
    assert applied(base, by_hand) == new
    ours = make_patch(memoryview(base), memoryview(new), 2)
    assert HEADER.unpack_from(ours)[:5] == HEADER.unpack_from(by_hand)[:5]


def test_chunks_of_two_lengths_or_items_of_three_bytes_are_refused() -> None:
    with pytest.raises(WeightsError, match="4 to 5 bytes"):
        make_patch(memoryview(bytes(4)), memoryview(bytes(5)), 1)
    with pytest.raises(WeightsError, match="items of 3 bytes"):
        make_patch(memoryview(bytes(6)), memoryview(bytes(6)), 3)


@given(seed=seeds, cut=st.integers(0, 200))
def test_a_patch_that_was_cut_short_is_refused(seed: int, cut: int) -> None:
    base, new = random_pair(100, 0.2, seed)
    patch = make_patch(memoryview(base), memoryview(new), 2)
    with pytest.raises(WeightsCorrupt):
        applied(base, patch[: min(cut, len(patch) - 1)])


@given(seed=seeds, flips=st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 255)), min_size=1, max_size=4))
def test_damaged_bytes_never_write_outside_the_block(seed: int, flips: list[tuple[int, int]]) -> None:
    base, new = random_pair(150, 0.2, seed)
    patch = bytearray(make_patch(memoryview(base), memoryview(new), 2))
    for position, bits in flips:
        patch[position % len(patch)] ^= bits
    try:
        assert len(applied(base, patch)) == len(base)
    except WeightsCorrupt as error:
        assert "Nothing was written" in str(error)


HOSTILE = {
    "has 3 bytes, a header": b"abc",
    "has format 9": HEADER.pack(9, 2, 1000, 0, 0, 0),
    "items of 3 bytes": HEADER.pack(1, 3, 1000, 0, 0, 0),
    "for a block of 2000 bytes": HEADER.pack(1, 2, 2000, 0, 0, 0),
    "501 changes in 501 gaps cannot be": build_patch(2, 1000, b"\1" * 501, bytes(1002), changed=501),
    "1 changes in 4 gaps cannot be": build_patch(2, 1000, b"\xff\xff\xff\1", bytes(2), changed=1),
    "2 changes in 1 gaps cannot be": build_patch(2, 1000, b"\1", bytes(4), changed=2),
    "would reach beyond its end": HEADER.pack(1, 2, 1000, 1, 1, 2**63),
    "gaps claim": HEADER.pack(1, 2, 1000, 1, 1, 9) + zstandard.compress(b"")[:9] + zstandard.compress(bytes(2)),
    "differences claim 3 bytes": build_patch(2, 1000, b"\1", bytes(3), changed=1),
    "differences cannot be decompressed": build_patch(2, 1000, b"\1", bytes(2), changed=1) + b"trailing",
    "gaps name 1 items, its header 0": build_patch(1, 1000, b"\1", b"", changed=0),
    "gaps name 0 items, its header 1": build_patch(2, 1000, b"\xff", bytes(2), changed=1),
    "do not ascend": build_patch(2, 1000, b"\1\0", bytes(4), changed=2),
    r"within \[0, 500\)": build_patch(2, 1000, b"\xff\xf6", bytes(2), changed=1),
    r"ascend within": build_patch(2, 1000, b"\0", bytes(2), changed=1),
}


@pytest.mark.parametrize("reason", HOSTILE)
def test_an_inconsistent_patch_is_refused_with_the_reason(reason: str) -> None:
    with pytest.raises(WeightsCorrupt, match=reason):
        applied(bytes(1000), HOSTILE[reason])


def test_the_last_item_can_be_named_and_the_one_after_it_cannot() -> None:
    last = build_patch(2, 1000, b"\xff\xf5", b"\2\0", changed=1)
    assert applied(bytes(1000), last) == bytes(998) + b"\1\0"


def test_a_stream_that_would_unpack_to_gigabytes_is_refused_without_unpacking_it() -> None:
    blow_up = zstandard.ZstdCompressor(level=1).compress(bytes(64 << 20))
    unstated = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64 << 20))
    for packed in (blow_up, unstated):
        header = HEADER.pack(1, 2, 100_000, 50_000, 50_000, len(packed))
        tracemalloc.start()
        try:
            with pytest.raises(WeightsCorrupt, match="gaps claim"):
                applied(bytes(100_000), header + packed + zstandard.compress(bytes(100_000)))
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


def test_applying_needs_no_more_memory_than_thirty_times_the_block() -> None:
    base, new = bytes(100_000), bytes([1]) * 100_000
    patch = make_patch(memoryview(base), memoryview(new), 1)
    block = bytearray(base)
    tracemalloc.start()
    try:
        apply_patch(memoryview(block), patch)
        assert tracemalloc.get_traced_memory()[1] < 30 * len(base)
    finally:
        tracemalloc.stop()
    assert block == new
