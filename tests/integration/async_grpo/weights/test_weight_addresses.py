"""Weights are served at the addresses that the publisher and relays announce."""

from __future__ import annotations

from async_grpo.weights.manifest import WeightVersion
from async_grpo.weights.zmq.sender import ZmqWeightSender
from tests.support.weight_plane import LAYOUT, RUN, Board, assert_holds, random_weights, receiving, until, with_

ALL = "tcp://0.0.0.0:0"


async def test_weights_are_fetched_where_publisher_and_relay_say_they_are_reached(board: Board) -> None:
    advertised = {"bind": ALL, "advertise": "127.0.0.2", "relay_bind": ALL, "relay_advertise": "127.0.0.3"}
    config = with_(fanout=1, **advertised)
    with ZmqWeightSender(LAYOUT, RUN, 0, config) as publisher:
        assert publisher.address.announce.startswith("tcp://127.0.0.2:")
        assert publisher.address.requests.startswith("tcp://127.0.0.2:")
        board.address = publisher.address
        async with receiving(board, config, store="one") as one, receiving(board, config, store="other") as other:
            await until(lambda: publisher.fetch_stats().receivers == 2)
            weights = random_weights(0)
            publisher.publish_weights(0, weights.items())
            for receiver in (one, other):
                await receiver.wait_for_newer_version(None, 30)
                assert_holds(receiver.store_path, WeightVersion(0, 0), weights)
            await until(lambda: one.stats.relayed_bytes + other.stats.relayed_bytes > 0)
