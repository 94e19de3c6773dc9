"""What a receiver asks for, and when it gives up."""

from __future__ import annotations

import numpy as np
import pytest

from async_grpo.config.weights import WeightsConfig
from async_grpo.errors import WeightsCorrupt
from async_grpo.weights import delta
from async_grpo.weights.chunks import ServedVersion, cut_into_chunks, digest_hashes, hash_chunk, pack_hashes
from async_grpo.weights.manifest import BaseVersion, WeightManifest, make_layout
from async_grpo.weights.node.fetch import MAX_ATTEMPTS, ChunkSchedule, Fetch, FetchInterrupted
from async_grpo.weights.node.stats import ReceiverStats


def schedule_of(count: int, *, patched: bool = False) -> ChunkSchedule:
    return ChunkSchedule(range(count), patched=patched, credits=2, timeout_s=5.0)


def test_never_more_than_the_credits_are_under_way() -> None:
    schedule = schedule_of(3)
    assert schedule.take_requests(0.0) == [(0, False), (1, False)]
    assert schedule.take_requests(0.0) == []
    schedule.mark_arrived(1)
    assert schedule.take_requests(1.0) == [(2, False)]
    schedule.mark_arrived(0)
    schedule.mark_arrived(2)
    assert schedule.is_done


def test_nothing_to_fetch_is_done_at_once() -> None:
    assert schedule_of(0).is_done


def test_a_late_chunk_is_asked_for_again_and_given_up_in_the_end() -> None:
    schedule = schedule_of(1)
    for attempt in range(MAX_ATTEMPTS - 1):
        assert schedule.take_requests(10.0 * attempt) == [(0, False)]
        assert schedule.put_back_late(10.0 * attempt + 4.9, heard_s=0.0) == []
        assert schedule.put_back_late(10.0 * attempt + 5.0, heard_s=0.0) == [0]
        assert not schedule.is_requested(0)
    schedule.take_requests(100.0)
    with pytest.raises(FetchInterrupted, match="chunk 0 was requested 4 times"):
        schedule.put_back_late(105.0, heard_s=0.0)


def test_a_chunk_behind_a_long_queue_is_not_late_while_the_queue_moves() -> None:
    schedule = schedule_of(2)
    schedule.take_requests(0.0)
    schedule.mark_arrived(0)
    assert schedule.put_back_late(9.0, heard_s=4.5) == []
    assert schedule.put_back_late(9.5, heard_s=4.5) == [1]


def test_chunks_of_another_connection_pass_nothing() -> None:
    schedule = ChunkSchedule(range(3), patched=False, credits=3, timeout_s=5.0, connections=2)
    schedule.take_requests(0.0)
    schedule.mark_arrived(1)
    assert schedule.put_back_late(6.0, heard_s=6.0) == []
    schedule.mark_arrived(2)
    assert schedule.put_back_late(6.0, heard_s=6.0) == [0]


def test_a_chunk_that_others_have_passed_is_late_although_the_other_side_is_heard() -> None:
    schedule = schedule_of(2)
    schedule.take_requests(0.0)
    schedule.mark_arrived(1)
    assert schedule.put_back_late(4.9, heard_s=4.9) == []
    assert schedule.put_back_late(5.0, heard_s=4.9) == [0]
    assert schedule.take_requests(5.0) == [(0, False)]
    assert schedule.put_back_late(10.0, heard_s=9.9) == []


def test_late_chunks_are_asked_for_again_in_their_order() -> None:
    schedule = schedule_of(3)
    assert schedule.take_requests(0.0) == [(0, False), (1, False)]
    assert schedule.put_back_late(5.0, heard_s=0.0) == [0, 1]
    assert schedule.take_requests(5.0) == [(0, False), (1, False)]


def test_a_wrong_patch_is_replaced_by_the_dense_chunk() -> None:
    schedule = schedule_of(2, patched=True)
    assert schedule.take_requests(0.0) == [(0, True), (1, True)]
    schedule.put_back_corrupt(0, patch=True)
    assert schedule.take_requests(0.0) == [(0, False)]


def test_dense_chunks_that_keep_failing_are_an_error() -> None:
    schedule = schedule_of(1)
    for _ in range(MAX_ATTEMPTS - 1):
        schedule.take_requests(0.0)
        schedule.put_back_corrupt(0, patch=False)
    schedule.take_requests(0.0)
    with pytest.raises(WeightsCorrupt, match="chunk 0 failed its hash 4 times"):
        schedule.put_back_corrupt(0, patch=False)


def test_another_parent_sends_the_missing_chunks_and_none_twice() -> None:
    schedule = schedule_of(4)
    schedule.take_requests(0.0)
    schedule.mark_arrived(0)
    schedule.take_requests(0.0)
    schedule.put_back_all()
    assert [index for index, _ in schedule.take_requests(1.0)] == [1, 2]


def test_a_chunk_can_be_added_while_others_are_under_way() -> None:
    schedule = schedule_of(1)
    schedule.take_requests(0.0)
    schedule.mark_arrived(0)
    schedule.add_chunk(7)
    assert not schedule.is_done
    assert schedule.take_requests(0.0) == [(7, False)]


LAYOUT = make_layout([("a", "bfloat16", [64]), ("b", "bfloat16", [64])])
CHUNK_BYTES = 64


class Block:
    """The only slot of a store: four chunks of 64 bytes, of two tensors."""

    def __init__(self, content: bytes) -> None:
        self.memory = memoryview(bytearray(content))
        self.stats = ReceiverStats()

    def fetch(self, content: bytes, version: int, *, before: ServedVersion | None, torn: bool = False) -> Fetch:
        chunks = cut_into_chunks(LAYOUT, CHUNK_BYTES)
        base = None
        if before is not None:
            base = BaseVersion(epoch=before.identity.epoch, version=before.identity.version, digest=before.digest)
        manifest = WeightManifest(
            epoch=1,
            version=version,
            layout=LAYOUT,
            chunk_bytes=CHUNK_BYTES,
            hashes=pack_hashes([hash_chunk(chunk.view(memoryview(content))) for chunk in chunks]),
            key=b"k" * 16,
            base=base,
        )
        return Fetch(manifest, self.memory, before, WeightsConfig(), self.stats, torn=torn)


def test_a_version_replaces_the_one_before_it_in_place() -> None:
    old = np.arange(256, dtype=np.uint8).tobytes()
    new = bytearray(old)
    new[70] ^= 1
    new[200] ^= 1
    block = Block(old)
    first = block.fetch(old, 1, before=None, torn=True)
    first.copy_unchanged()
    assert first.is_done
    assert first.make_notes().digest == digest_hashes(first.manifest.hashes)
    fetch = block.fetch(bytes(new), 2, before=first.served)
    assert sorted(fetch.copy_unchanged()) == [0, 2]
    assert sorted(index for index, _ in fetch.schedule.take_requests(0.0)) == [1, 3]
    patch = delta.make_patch(memoryview(old)[64:128], memoryview(new)[64:128], 2)
    assert fetch.accept_chunk(1, memoryview(patch), patch=True)
    assert fetch.accept_chunk(3, memoryview(new)[192:256], patch=False)
    assert fetch.is_done
    assert bytes(block.memory) == bytes(new)
    assert fetch.make_notes().base == (1, 1)
    assert block.stats.fallbacks == {}


def test_a_patch_whose_result_is_wrong_is_made_good_by_the_dense_chunk_in_place() -> None:
    old, new = bytes(256), bytes([7]) * 256
    block = Block(old)
    first = block.fetch(old, 1, before=None, torn=True)
    first.copy_unchanged()
    fetch = block.fetch(new, 2, before=first.served)
    assert fetch.schedule.take_requests(0.0) == [(index, True) for index in range(4)]
    wrong = delta.make_patch(memoryview(old)[:64], memoryview(bytes([9]) * 64), 2)
    assert not fetch.accept_chunk(0, memoryview(wrong), patch=True)
    assert fetch.schedule.take_requests(0.0) == [(0, False)]
    assert fetch.accept_chunk(0, memoryview(new)[:64], patch=False)
    assert bytes(block.memory[:64]) == new[:64]


def test_chunks_of_an_incomplete_version_are_reused_if_they_fit() -> None:
    wanted = np.arange(256, dtype=np.uint8).tobytes()
    block = Block(bytes(64) + wanted[64:192] + bytes(64))
    fetch = block.fetch(wanted, 3, before=None, torn=True)
    assert sorted(fetch.copy_unchanged()) == [1, 2]
    assert fetch.schedule.take_requests(0.0) == [(0, False), (3, False)]
    assert fetch.make_notes().base is None
