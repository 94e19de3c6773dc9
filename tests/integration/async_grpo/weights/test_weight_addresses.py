"""Where publisher and relays tell others to come, and that what they are told there is served."""

from __future__ import annotations

import socket

import pytest
from pydantic import ValidationError

from async_grpo.config.weights import WeightsConfig
from async_grpo.weights.manifest import WeightVersion
from async_grpo.weights.zmq.sender import ZmqWeightSender
from async_grpo.weights.zmq.sockets import as_seen_from
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
            await until(lambda: publisher.stats().receivers == 2)
            weights = random_weights(0)
            publisher.publish(0, weights.items())
            for receiver in (one, other):
                await receiver.next_version(None, 30)
                assert_holds(receiver.store_path, WeightVersion(0, 0), weights)
            await until(lambda: one.stats.relayed_bytes + other.stats.relayed_bytes > 0)


def test_a_relay_on_all_addresses_is_announced_under_the_one_that_reaches_the_publisher() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no route to anywhere")
        own = probe.getsockname()[0]
    assert as_seen_from("tcp://192.0.2.1:5601", "tcp://a-name:5610", ALL) == f"tcp://{own}:5610"


def test_an_address_that_tells_others_nothing_leaves_the_name() -> None:
    assert as_seen_from("tcp://127.0.0.1:5601", "tcp://a-name:5610", ALL) == "tcp://a-name:5610"
    assert as_seen_from("tcp://no.such.host.invalid:5601", "tcp://a-name:5610", ALL) == "tcp://a-name:5610"


def test_an_address_that_was_chosen_is_announced_as_it_is() -> None:
    assert as_seen_from("tcp://192.0.2.1:5601", "tcp://10.0.0.5:5610", "tcp://10.0.0.5:5610") == "tcp://10.0.0.5:5610"


@pytest.mark.parametrize("keys", [{"advertise": "10.0.0.5"}, {"relay_advertise": "10.0.0.5"}])
def test_others_are_not_sent_to_an_address_where_nobody_listens(keys: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="listens on the loopback only"):
        WeightsConfig(**keys)
