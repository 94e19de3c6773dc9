"""What a receiver asks for, and when it gives up."""

from __future__ import annotations

import pytest

from async_grpo.errors import WeightsCorrupt
from async_grpo.weights.zmq.fetch import MAX_ATTEMPTS, ChunkSchedule, FetchInterrupted


def schedule_of(count: int, *, patched: bool = False) -> ChunkSchedule:
    return ChunkSchedule(range(count), patched=patched, credits=2, timeout_s=5.0)


def test_never_more_than_the_credits_are_under_way() -> None:
    schedule = schedule_of(3)
    assert schedule.take(0.0) == [(0, False), (1, False)]
    assert schedule.take(0.0) == []
    schedule.settle(1)
    assert schedule.take(1.0) == [(2, False)]
    schedule.settle(0)
    schedule.settle(2)
    assert schedule.done


def test_nothing_to_fetch_is_done_at_once() -> None:
    assert schedule_of(0).done


def test_a_late_chunk_is_asked_for_again_and_given_up_in_the_end() -> None:
    schedule = schedule_of(1)
    for attempt in range(MAX_ATTEMPTS - 1):
        assert schedule.take(10.0 * attempt) == [(0, False)]
        assert schedule.expire(10.0 * attempt + 4.9, heard_s=0.0) == []
        assert schedule.expire(10.0 * attempt + 5.0, heard_s=0.0) == [0]
        assert not schedule.awaits(0)
    schedule.take(100.0)
    with pytest.raises(FetchInterrupted, match="chunk 0 was asked for 4 times"):
        schedule.expire(105.0, heard_s=0.0)


def test_a_chunk_behind_a_long_queue_is_not_late_while_the_queue_moves() -> None:
    schedule = schedule_of(2)
    schedule.take(0.0)
    schedule.settle(0)
    assert schedule.expire(9.0, heard_s=4.5) == []
    assert schedule.expire(9.5, heard_s=4.5) == [1]


def test_a_chunk_that_others_have_passed_is_late_although_the_other_side_is_heard() -> None:
    schedule = schedule_of(2)
    schedule.take(0.0)
    schedule.settle(1)
    assert schedule.expire(4.9, heard_s=4.9) == []
    assert schedule.expire(5.0, heard_s=4.9) == [0]
    assert schedule.take(5.0) == [(0, False)]
    assert schedule.expire(10.0, heard_s=9.9) == []


def test_a_wrong_patch_is_replaced_by_the_dense_chunk() -> None:
    schedule = schedule_of(2, patched=True)
    assert schedule.take(0.0) == [(0, True), (1, True)]
    schedule.refuse(0, patch=True)
    assert schedule.take(0.0) == [(0, False)]


def test_dense_chunks_that_keep_failing_are_an_error() -> None:
    schedule = schedule_of(1)
    for _ in range(MAX_ATTEMPTS - 1):
        schedule.take(0.0)
        schedule.refuse(0, patch=False)
    schedule.take(0.0)
    with pytest.raises(WeightsCorrupt, match="chunk 0 failed its hash 4 times"):
        schedule.refuse(0, patch=False)


def test_another_parent_is_asked_for_what_was_under_way_and_nothing_twice() -> None:
    schedule = schedule_of(4)
    schedule.take(0.0)
    schedule.settle(0)
    schedule.take(0.0)
    schedule.restart()
    assert [index for index, _ in schedule.take(1.0)] == [1, 2]


def test_a_chunk_can_be_added_while_others_are_under_way() -> None:
    schedule = schedule_of(1)
    schedule.take(0.0)
    schedule.settle(0)
    schedule.add(7)
    assert not schedule.done
    assert schedule.take(0.0) == [(7, False)]
