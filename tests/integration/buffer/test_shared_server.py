"""Several runs on one server: none takes the memory that another needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from async_grpo.config import RunConfig
from async_grpo.errors import ConfigError, WaitTimeout
from async_grpo.wire import Group, Sample, Ticket, VersionSpan, logprobs_to_bytes, tokens_to_bytes
from buffer import RedisBuffer, open_run, plan_buffer_memory, run_exists
from tests.support.buffer_cases import admit, finish, publish, released, take, tasks, train
from tests.support.redis_topologies import Server, running

STEPS, MAX_TOKENS = 6, 2000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    with running(server):
        yield server


@pytest.fixture(autouse=True)
def empty(server: Server) -> None:
    server.admin.flushall()
    server.admin.config_set("maxmemory", 0)


def config(server: Server, name: str, **redis: Any) -> RunConfig:
    """S = 3, P = 2, two samples a group; a checkpoint every other step, within it."""
    values = {
        "name": name,
        "steps": STEPS,
        "max_staleness": 3,
        "groups_per_step": 2,
        "group_size": 2,
        "model": {"path": "model"},
        "sampling": {"max_tokens": MAX_TOKENS},
        "rollout": {"vllm": {"max_model_len": 2 * MAX_TOKENS}},
        "trainer": {"checkpoint": {"every_steps": 2, "background": False}},
        "redis": {"url": server.url, "timeout_s": 1.0, **redis},
    }
    return RunConfig.model_validate(values)


def least_quota(run: RunConfig) -> int:
    """The least that is not refused; the error names it."""
    small = run.model_copy(update={"redis": run.redis.model_copy(update={"quota_bytes": 1})})
    with pytest.raises(ConfigError, match=r"redis\.quota_bytes.* 0\.0 MiB.*2 active \+ 4 logged") as error:
        plan_buffer_memory(small).check(0, "the server")
    return int(str(error.value).partition("Raise redis.quota_bytes to ")[2].partition(",")[0])


async def opened(run: RunConfig) -> RedisBuffer:
    buffer = await open_run(run)
    await buffer.put_tasks(tasks(0, 40))
    await buffer.rollback(0)
    return buffer


def longest(ticket: Ticket) -> Group:
    """A group as large as the plan expects at worst."""
    sample = Sample(
        tokens=tokens_to_bytes(range(MAX_TOKENS)),
        logprobs=logprobs_to_bytes([-0.5] * MAX_TOKENS),
        spans=[VersionSpan(ticket.version, 0, MAX_TOKENS)],
        text="word! " * MAX_TOKENS,
        reward=1.0,
    )
    return Group(seq=ticket.seq, attempt=ticket.attempt, task=ticket.task, samples=[sample, sample])


async def test_a_run_at_its_quota_waits_and_the_other_continues(server: Server) -> None:
    quota = least_quota(config(server, "long"))
    long = await opened(config(server, "long", quota_bytes=quota))
    short = await opened(config(server, "short"))
    most, before = 0, server.admin.info("memory")["used_memory"]
    for version in range(STEPS):
        tickets = []
        with pytest.raises(WaitTimeout):  # all that its quota admits
            while True:
                tickets += await long.admit_groups(100, holder="server-0", timeout_s=0.0)
        for ticket in tickets:
            await long.insert_group(ticket, longest(ticket))
        stats = await long.stats()
        assert stats.is_limited_by_quota or stats.used + stats.active == stats.horizon
        assert 2 <= stats.active < stats.capacity
        most = max(most, stats.stored_bytes)
        batch = await take(long, version)
        await finish(short, *await admit(short, 2))
        await train(short, version)
        await publish(long, version + 1)
        await long.release_batch(batch)
        if version % 2:
            await long.commit_checkpoint(epoch=1, version=version + 1)
    for buffer in (long, short):
        stats = await buffer.stats()
        assert (released(stats), stats.balanced, stats.active) == ({"trained": 2 * STEPS}, True, 0)
        await buffer.aclose()
    assert most <= quota and server.admin.info("memory")["used_memory"] - before < quota


async def test_a_run_that_does_not_fit_next_to_the_others_is_refused_before_any_write(server: Server) -> None:
    needs = plan_buffer_memory(config(server, "one")).needed_bytes
    server.admin.config_set("maxmemory", 3 * needs - 1)
    for name in ("one", "two"):
        await (await opened(config(server, name))).aclose()
    third = config(server, "three")
    with pytest.raises(ConfigError, match=r"other runs .*\((one|two) .*MiB, (one|two) .*runs clean") as error:
        await open_run(third)
    assert not await run_exists(third.redis, "three")
    least = int(str(error.value).partition("at least ")[2].partition(")")[0])
    await (await open_run(config(server, "three", quota_bytes=least))).aclose()
    await (await open_run(config(server, "one"))).aclose(), "it has its share already"


async def test_a_run_that_has_ended_reserves_no_more_than_it_stores(server: Server) -> None:
    needs = plan_buffer_memory(config(server, "one")).needed_bytes
    server.admin.config_set("maxmemory", 2 * needs - 1)
    first = await opened(config(server, "one"))
    with pytest.raises(ConfigError, match="other runs"):
        await open_run(config(server, "two"))
    await first.end_run()
    await first.aclose()
    await (await open_run(config(server, "two"))).aclose()


def test_a_quota_on_a_server_of_its_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"quota_bytes.*redis\.url.*redis\.max_memory_bytes"):
        RunConfig.model_validate({"name": "a", "model": {"path": str(tmp_path)}, "redis": {"quota_bytes": 1}})
