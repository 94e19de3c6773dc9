"""Groups of `collective`: all versions come by broadcast, members die and join, and nothing is lost by it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
import pytest

from async_grpo.errors import WaitTimeout, WeightsError
from async_grpo.weights.chunks import cut
from async_grpo.weights.collective.worker import RelayedStore
from async_grpo.weights.manifest import WeightVersion, layout_of
from async_grpo.weights.node.receiver import SharedWeightReceiver
from async_grpo.weights.zmq.messages import GroupEntry
from async_grpo.weights.zmq.sender import ZmqWeightSender
from tests.support.weight_plane import RUN, Board, assert_holds, random_weights, receiving, until, with_

LARGE = layout_of([("a", "bfloat16", [4000, 5000]), ("b", "float32", [2000, 5001])])
"""80 MB: two buckets."""
CONFIG = with_(transport="collective", chunk_bytes=1 << 20)


@asynccontextmanager
async def machines(board: Board, publisher: ZmqWeightSender, count: int) -> AsyncIterator[list[SharedWeightReceiver]]:
    """Receivers of as many machines."""
    async with AsyncExitStack() as stack:
        receivers = [
            await stack.enter_async_context(receiving(board, CONFIG, store=f"node-{number}")) for number in range(count)
        ]
        await until(lambda: publisher.stats().receivers == count)
        yield receivers


async def have(receivers: list[SharedWeightReceiver], version: int) -> None:
    """All of them have exactly this version, which may be later than the next."""
    for receiver in receivers:
        seen = WeightVersion(0, -1)
        while seen.version < version:
            seen = await receiver.next_version(seen, 60.0)
        assert_holds(receiver.store_path, seen, random_weights(version, LARGE))


async def test_every_version_after_the_first_is_broadcast_and_all_chunks_of_it(board: Board) -> None:
    with ZmqWeightSender(LARGE, RUN, 0, CONFIG) as publisher:
        board.address = publisher.address
        async with machines(board, publisher, 2) as receivers:
            for version in range(3):
                publisher.publish(version, random_weights(version, LARGE).items())
                await have(receivers, version)
            chunks = len(cut(LARGE, CONFIG.chunk_bytes))
            assert [receiver.stats.dense_chunks for receiver in receivers] == [chunks, chunks]
            assert [receiver.stats.broadcast_chunks for receiver in receivers] == [2 * chunks, 2 * chunks]
            assert (publisher.stats().broadcasts, publisher.stats().failed_broadcasts) == (2, 0)


@pytest.mark.slow
async def test_members_die_in_the_middle_of_a_broadcast_and_others_join(board: Board) -> None:
    random = np.random.default_rng(0)
    with ZmqWeightSender(LARGE, RUN, 0, CONFIG) as publisher:
        board.address = publisher.address
        async with machines(board, publisher, 3) as receivers:
            for version in range(8):
                publisher.publish(version, random_weights(version, LARGE).items())
                await asyncio.sleep(random.uniform(0, 0.15))
                victim = receivers[version % 3]
                assert victim.process_id is not None
                os.kill(victim.process_id, signal.SIGKILL)
                await have(receivers, version)  # the killed one's server starts another process
            assert all(receiver.restarts >= 2 for receiver in receivers)
            publisher.publish(8, random_weights(8, LARGE).items())
            await have(receivers, 8)


def entry_of(key: str, value: bytes = b"") -> GroupEntry:
    return GroupEntry(group=7, key=key, value=value)


def test_what_a_member_sets_goes_to_the_others_and_what_they_set_ends_a_wait() -> None:
    sent: list[GroupEntry] = []
    store = RelayedStore(7, sent.append, timeout_s=5.0)
    store.set("mine", "1")
    assert sent == [entry_of("mine", b"1")]
    threading.Timer(0.05, lambda: store.put(entry_of("theirs", b"2"))).start()
    assert store.get("theirs") == b"2"
    assert store.check(["mine", "theirs"])
    assert not store.check(["nobody's"])


def test_a_member_that_never_comes_and_one_that_declines_are_named() -> None:
    store = RelayedStore(7, lambda _: None, timeout_s=0.05)
    with pytest.raises(WaitTimeout, match=r"the members of group 7 to say \['0/1'\]"):
        store.get("0/1")
    store.put(entry_of("", b"a receiver is not ready any more"))
    with pytest.raises(WeightsError, match="group 7 will not come about: a receiver is not ready"):
        store.get("0/1")
