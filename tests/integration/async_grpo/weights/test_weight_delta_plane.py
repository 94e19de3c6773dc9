"""Lossless deltas end to end: bit-identical over many versions, and dense where a delta would be wrong or larger."""

from __future__ import annotations

import asyncio

import pytest

from async_grpo.weights.manifest import WeightVersion
from async_grpo.weights.shared_memory import remove_stores
from async_grpo.weights.store import WeightStore
from async_grpo.weights.zmq.sender import ZmqWeightSender
from tests.support.weight_plane import (
    LAYOUT,
    RUN,
    Arrays,
    Board,
    assert_holds,
    proxy_to,
    random_weights,
    receiving,
    step,
    until,
    with_,
)


def versions(count: int) -> list[Arrays]:
    made = [random_weights(0)]
    for version in range(1, count):
        made.append(step(made[-1], version))
    return made


@pytest.mark.parametrize("encoding", ["auto", "delta", "dense"])
async def test_many_versions_of_mixed_dtypes_are_bit_identical(encoding: str, board: Board) -> None:
    config = with_(encoding=encoding)
    with ZmqWeightSender(LAYOUT, RUN, 0, config) as publisher:
        board.address = publisher.address
        async with receiving(board, config) as receiver:
            seen = None
            for version, weights in enumerate(versions(8)):
                publisher.publish_weights(version, weights.items())
                seen = await receiver.wait_for_newer_version(seen, 30)
                assert_holds(receiver.store_path, WeightVersion(0, version), weights)
            stats, received = publisher.fetch_stats(), receiver.stats
            assert received.fallbacks == {}
            if encoding == "dense":
                assert (stats.delta_versions, received.patched_chunks) == (0, 0)
                assert received.unchanged_chunks > 0  # what did not change is not sent either way
            else:
                assert (stats.delta_versions, stats.fallbacks) == (7, {"no base": 1})
                assert received.patched_chunks > 0
                assert received.received_bytes == stats.encoded_bytes < received.dense_bytes / 3


async def test_a_receiver_that_skipped_a_version_fetches_dense_and_says_why(board: Board) -> None:
    with ZmqWeightSender(LAYOUT, RUN, 0, with_(encoding="delta")) as publisher:
        made = versions(4)
        publisher.publish_weights(0, made[0].items())
        async with proxy_to(publisher, board) as proxy, receiving(board) as receiver:
            seen = await receiver.wait_for_newer_version(None, 30)
            async with receiver.hold_newest():
                publisher.publish_weights(1, made[1].items())
                await receiver.wait_for_newer_version(seen, 30)
                for version in (2, 3):  # neither can come: the slot is held
                    publisher.publish_weights(version, made[version].items())
                    await until(lambda: publisher.fetch_stats().versions == version + 1)  # noqa: B023
            assert await receiver.wait_for_newer_version((0, 1), 30) == (0, 3)
            assert_holds(receiver.store_path, WeightVersion(0, 3), made[3])
            assert receiver.stats.fallbacks == {"another base": 1}
            assert proxy.chunks > 0


async def test_a_late_joiner_has_no_base_and_the_next_version_comes_as_a_delta(board: Board) -> None:
    with ZmqWeightSender(LAYOUT, RUN, 0, with_()) as publisher:
        board.address = publisher.address
        made = versions(3)
        for version in (0, 1):
            publisher.publish_weights(version, made[version].items())
        await until(lambda: publisher.fetch_stats().delta_versions == 1)
        async with receiving(board) as late:
            assert await late.wait_for_newer_version(None, 30) == (0, 1)
            assert (late.stats.fallbacks, late.stats.patched_chunks) == ({"no base": 1}, 0)
            publisher.publish_weights(2, made[2].items())
            assert await late.wait_for_newer_version((0, 1), 30) == (0, 2)
            assert_holds(late.store_path, WeightVersion(0, 2), made[2])
            assert late.stats.patched_chunks > 0


async def test_a_base_that_is_not_the_publishers_is_noticed_by_its_hash(board: Board) -> None:
    """A trainer that begins anew under the same epoch: same names, other bytes."""
    made = versions(2)
    with ZmqWeightSender(LAYOUT, RUN, 0, with_()) as publisher:
        board.address = publisher.address
        async with receiving(board) as receiver:
            publisher.publish_weights(0, random_weights(77).items())
            await receiver.wait_for_newer_version(None, 30)
            with ZmqWeightSender(LAYOUT, f"{RUN}-anew", 0, with_()) as anew:
                anew.publish_weights(0, made[0].items())
                anew.publish_weights(1, made[1].items())
                await until(lambda: anew.fetch_stats().delta_versions == 1)
                board.address = anew.address
                assert await receiver.wait_for_newer_version((0, 0), 30) == (0, 1)
                assert_holds(receiver.store_path, WeightVersion(0, 1), made[1])
                assert receiver.stats.fallbacks == {"base differs": 1}
    remove_stores(f"{RUN}-anew")


async def test_a_base_damaged_in_memory_costs_dense_chunks_and_no_wrong_byte(board: Board) -> None:
    made = versions(2)
    with ZmqWeightSender(LAYOUT, RUN, 0, with_()) as publisher:
        board.address = publisher.address
        async with receiving(board) as receiver:
            publisher.publish_weights(0, made[0].items())
            held = await receiver.wait_for_newer_version(None, 30)
            damaged = WeightStore.adopt(receiver.store_path).snapshot(held)
            for name in ("embed", "frozen"):
                offset = LAYOUT.by_name()[name].offset
                damaged.block[offset] ^= 1
            publisher.publish_weights(1, made[1].items())
            await receiver.wait_for_newer_version(held, 30)
            assert_holds(receiver.store_path, WeightVersion(0, 1), made[1])
            assert receiver.stats.fallbacks == {"wrong result": 1, "base damaged": 1}


async def test_a_spoiled_patch_is_refused_and_the_dense_chunk_fetched(board: Board) -> None:
    made = versions(2)
    with ZmqWeightSender(LAYOUT, RUN, 0, with_()) as publisher:
        publisher.publish_weights(0, made[0].items())
        async with proxy_to(publisher, board) as proxy, receiving(board) as receiver:
            seen = await receiver.wait_for_newer_version(None, 30)
            proxy.spoil = 3
            publisher.publish_weights(1, made[1].items())
            await receiver.wait_for_newer_version(seen, 30)
            assert_holds(receiver.store_path, WeightVersion(0, 1), made[1])
            assert sum(receiver.stats.fallbacks.values()) == 3


@pytest.mark.parametrize("encoding", ["auto", "delta"])
async def test_weights_that_changed_altogether_go_dense(encoding: str, board: Board) -> None:
    with ZmqWeightSender(LAYOUT, RUN, 0, with_(encoding=encoding)) as publisher:
        board.address = publisher.address
        for version in (0, 1):
            publisher.publish_weights(version, random_weights(version).items())
        await until(lambda: publisher.fetch_stats().versions == 2)
        assert publisher.fetch_stats().fallbacks == {"no base": 1, "larger": 1}
        async with receiving(board) as receiver:
            await receiver.wait_for_newer_version(None, 30)
            assert_holds(receiver.store_path, WeightVersion(0, 1))


async def test_the_trainer_waits_for_an_encoder_that_is_at_work_only_so_long(board: Board) -> None:
    """With no patience at all every encoding that is still at work is given up, and what arrives is right."""
    made = versions(12)
    with ZmqWeightSender(LAYOUT, RUN, 0, with_(encoding="delta", encode_wait_s=1e-9)) as publisher:
        board.address = publisher.address
        async with receiving(board) as receiver:
            for version, weights in enumerate(made):
                publisher.publish_weights(version, weights.items())
            await until(lambda: publisher.fetch_stats().versions == len(made))
            stats = publisher.fetch_stats()
            assert stats.delta_versions + sum(stats.fallbacks.values()) == len(made)
            assert stats.fallbacks.get("trainer waited", 0) > 0
            assert stats.waited_s > 0
            seen = None
            while seen != (0, len(made) - 1):
                seen = await receiver.wait_for_newer_version(seen, 30)
                await asyncio.sleep(0)
            assert_holds(receiver.store_path, WeightVersion(*seen), made[-1])
