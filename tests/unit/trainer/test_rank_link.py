"""Who shares the memory of rank 0, and how the threads that copy on its machine reach each other."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from async_grpo.errors import NodeLost, WaitTimeout
from trainer.ranks.link import RankLink, RankListener, try_connect

RANKS = 16


def connect(folder: Path, count: int, timeout_s: float = 5.0) -> list[RankLink]:
    """The links of ranks 0 to `count` - 1."""
    listener = RankListener(folder, count)
    sockets = [try_connect(listener.path, rank) for rank in range(1, count)]
    leader = RankLink(listener.accept_ranks(range(1, count)), timeout_s)
    return [leader, *(RankLink({0: found}, timeout_s) for found in sockets if found is not None)]


def test_a_number_goes_to_every_rank_and_one_comes_back(tmp_path: Path) -> None:
    leader, *others = connect(tmp_path, 4)
    for rank in leader.ranks:
        leader.send(rank, 7, rank % 2)
    for rank, other in enumerate(others, 1):
        assert other.receive([0], 7, "a slot") == {0: rank % 2}
        other.send(0, 7, rank)
    assert leader.receive(leader.ranks, 7, "the shards") == {1: 1, 2: 2, 3: 3}
    assert list(tmp_path.iterdir()) == []  # nothing is left if all of them are killed now


def test_ranks_that_are_done_early_do_not_wait_for_rank_0(tmp_path: Path) -> None:
    leader, *others = connect(tmp_path, RANKS)
    started_s = time.process_time()
    for rank, other in enumerate(others, 1):
        other.send(0, 7, rank)
    assert time.process_time() - started_s < 0.1
    assert len(leader.receive(leader.ranks, 7, "the shards")) == RANKS - 1


def test_a_rank_does_not_take_what_a_killed_trainer_left_for_the_memory_of_rank_0(tmp_path: Path) -> None:
    assert try_connect(tmp_path / "r-none", 1) is None
    (tmp_path / "r-file").touch()
    assert try_connect(tmp_path / "r-file", 1) is None
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as killed:
        killed.bind(str(tmp_path / "r-socket"))
        killed.listen()
    assert try_connect(tmp_path / "r-socket", 1) is None
    assert RankListener(tmp_path, 2).path != RankListener(tmp_path, 2).path


def test_a_rank_that_gave_up_connecting_is_not_counted(tmp_path: Path) -> None:
    listener = RankListener(tmp_path, 3)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as gave_up:
        gave_up.connect(str(listener.path))
    assert try_connect(listener.path, 2) is not None
    assert list(listener.accept_ranks([2])) == [2]


def test_what_failed_at_a_rank_is_raised_at_rank_0(tmp_path: Path) -> None:
    leader, *others = connect(tmp_path, 3)
    others[0].send(0, 7, 1)
    others[1].send_failure(0, 7, RuntimeError("no memory"))
    with pytest.raises(NodeLost, match=r"rank 2 .*version 7: RuntimeError: no memory"):
        leader.receive(leader.ranks, 7, "the shards")


def test_a_rank_that_ends_or_says_nothing_is_named(tmp_path: Path) -> None:
    leader, silent, killed = connect(tmp_path, 3, timeout_s=0.05)
    killed.close()
    with pytest.raises(NodeLost, match=r"rank 2 .*version 7: .*ended"):
        leader.receive(leader.ranks, 7, "the shards")
    with pytest.raises(WaitTimeout, match=r"version 7 .*\[1\]"):
        leader.receive([1], 7, "the shards")
    silent.close()
