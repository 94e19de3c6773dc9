"""The weight plane's tests share a board, a publisher that is announced on it, and one run's stores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from async_grpo.weights.shared_memory import remove_stores
from async_grpo.weights.zmq.sender import ZmqWeightSender
from tests.support.weight_plane import CONFIG, LAYOUT, RUN, Board


@pytest.fixture(autouse=True)
def _no_stores_are_left() -> Iterator[None]:
    yield
    remove_stores(RUN)


@pytest.fixture
def board() -> Board:
    return Board()


@pytest.fixture
def publisher(board: Board) -> Iterator[ZmqWeightSender]:
    with ZmqWeightSender(LAYOUT, RUN, 0, CONFIG) as publisher:
        board.address = publisher.address
        yield publisher
