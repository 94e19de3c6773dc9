"""The facts that the processes of a run tell each other."""

from __future__ import annotations

import asyncio

import pytest

from async_grpo.errors import WaitTimeout
from async_grpo.wire import Group, Task
from async_grpo.wire.board import Evaluation, Probe, PublisherAddress, ReplayProgress, ServerBeat
from buffer import RunBoard
from tests.support.buffer_cases import sample


def address(epoch: int) -> PublisherAddress:
    return PublisherAddress(epoch=epoch, announce=f"tcp://a:{epoch}", requests=f"tcp://r:{epoch}")


def evaluation(version: int, accuracy: float = 0.5) -> Evaluation:
    return Evaluation(version=version, prompts=8, samples=4, sampled_accuracy=accuracy)


def probe(version: int) -> Probe:
    task = Task(index=0, prompt="", prompt_tokens=b"", answer="")
    return Probe(version=version, groups=[Group(seq=0, attempt=1, task=task, samples=[sample(version)])])


async def test_the_newest_publisher_is_known(board: RunBoard) -> None:
    assert await board.publisher_address() is None
    for epoch in (1, 3, 2):
        await board.set_publisher(address(epoch))
    assert await board.publisher_address() == address(3)


async def test_a_publisher_may_move_within_its_epoch(board: RunBoard) -> None:
    await board.set_publisher(address(1))
    moved = PublisherAddress(epoch=1, announce="tcp://b:1", requests="tcp://b:2")
    await board.set_publisher(moved)
    assert await board.publisher_address() == moved


async def test_how_far_the_newest_trainer_repeats_its_steps_is_known(board: RunBoard) -> None:
    assert await board.replay_progress() is None
    for epoch, version in ((2, 5), (3, 4), (2, 6), (3, 5)):
        await board.report_replay(ReplayProgress(epoch=epoch, version=version, target=9))
    assert await board.replay_progress() == ReplayProgress(epoch=3, version=5, target=9)


async def test_servers_are_listed_by_name_until_they_fall_silent(board: RunBoard) -> None:
    await board.announce_server(ServerBeat(name="b", pid=2, version=0), ttl_s=30)
    await board.announce_server(ServerBeat(name="a", pid=1, version=0), ttl_s=30)
    await board.announce_server(ServerBeat(name="a", pid=1, version=4, waiting_for="weights"), ttl_s=30)
    await board.announce_server(ServerBeat(name="c", pid=3, version=0), ttl_s=0.05)
    await asyncio.sleep(0.1)
    assert [(beat.name, beat.version) for beat in await board.live_servers()] == [("a", 4), ("b", 0)]


async def test_counters_add_up(board: RunBoard) -> None:
    assert await board.counters() == {}
    await asyncio.gather(*(board.add_to_counter("tokens", 10) for _ in range(5)), board.add_to_counter("resumed", 1))
    assert await board.counters() == {"tokens": 50, "resumed": 1}


async def test_a_job_is_claimed_by_one_holder_until_it_lets_go(board: RunBoard) -> None:
    assert await board.claim_job("evaluation-3", "server-0", ttl_s=30)
    assert await board.claim_job("evaluation-3", "server-0", ttl_s=0.05)
    assert not await board.claim_job("evaluation-3", "server-1", ttl_s=30)
    assert await board.claim_job("evaluation-4", "server-1", ttl_s=30)
    await asyncio.sleep(0.1)
    assert await board.claim_job("evaluation-3", "server-1", ttl_s=30)


async def test_evaluations_are_kept_by_version_and_the_first_stays(board: RunBoard) -> None:
    for one in (evaluation(10), evaluation(2), evaluation(10, accuracy=0.9)):
        await board.put_evaluation(one)
    assert await board.evaluations() == [evaluation(2), evaluation(10)]


async def test_a_probe_is_waited_for(board: RunBoard) -> None:
    await board.put_probe(probe(1))
    waiting = asyncio.create_task(board.wait_for_probe(2, timeout_s=5))
    await asyncio.sleep(0.05)
    await board.put_probe(probe(2))
    async with asyncio.timeout(1):
        assert await waiting == probe(2)
    assert await board.wait_for_probe(2, timeout_s=0) == probe(2)


async def test_an_older_probe_does_not_replace_a_newer_one(board: RunBoard) -> None:
    await board.put_probe(probe(2))
    await board.put_probe(probe(1))
    assert await board.wait_for_probe(2, timeout_s=0) == probe(2)
    async with asyncio.timeout(1):
        with pytest.raises(WaitTimeout, match="version 2"):
            await board.wait_for_probe(1, timeout_s=30)


async def test_a_probe_that_never_comes_is_named(board: RunBoard) -> None:
    with pytest.raises(WaitTimeout, match="version 5"):
        await board.wait_for_probe(5, timeout_s=0.05)
