"""Rollout servers die, join and leave in the middle of a real run, and the run goes on."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest

from async_grpo.config import RunConfig
from async_grpo.wire import Group, Partial, decode
from async_grpo.wire.board import ServerBeat
from buffer import connect_board, make_client
from buffer.redis.scripts import RunKeys
from tests.support.waiting import wait_until
from tests.support.whole_run import WholeRun, check_books

STEPS = 60
LONG_RUN = 200
"""A server takes half a minute to start, or more beside others; a step takes a second or so."""
LONG = 200
PROGRESS = ("rollout.progress_interval_s=0.3",)

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]


@asynccontextmanager
async def server_of(config: RunConfig) -> AsyncIterator[Any]:
    client = make_client(config.redis, config.name)
    yield client
    await client.aclose()


async def stored_partials(config: RunConfig) -> dict[int, Partial]:
    async with server_of(config) as client:
        names = [name async for name in client.scan_iter(match=RunKeys(config.name).key("partial:*"), count=1000)]
        payloads = {int(name.rpartition(b":")[2]): await client.get(name) for name in names}
        return {seq: decode(payload, Partial) for seq, payload in payloads.items() if payload}


async def finished_groups(config: RunConfig, seqs: set[int]) -> dict[int, Group]:
    """Each of them, caught before the next checkpoint forgets it."""
    groups: dict[int, Group] = {}
    async with server_of(config) as client, asyncio.timeout(120):
        while seqs - groups.keys():
            async for name in client.scan_iter(match=RunKeys(config.name).key("group:*"), count=1000):
                if (seq := int(name.split(b":")[-2])) in seqs and (payload := await client.get(name)):
                    groups[seq] = decode(payload, Group)
            await asyncio.sleep(0.02)
    return groups


async def beats(config: RunConfig) -> list[ServerBeat]:
    board = await connect_board(config.redis, config.name)
    try:
        return await board.live_servers()
    finally:
        await board.aclose()


def servers_of(run: WholeRun) -> list[psutil.Process]:
    return [process for process in run.list_processes() if "rollout_server.main" in " ".join(process.cmdline())]


def kill_one_amid_its_groups(run: WholeRun, config: RunConfig) -> dict[int, Partial]:
    """Kill a server that has stored prefixes, and return all stored ones.

    Leases do not name their holder. So the other server is suspended: what grows meanwhile is the victim's.
    """
    survivor, victim = servers_of(run)
    survivor.suspend()
    time.sleep(0.5)  # until what it had sent is stored
    lengths: dict[int, int] = {}

    def has_grown() -> bool:
        for seq, partial in asyncio.run(stored_partials(config)).items():
            if partial.longest > lengths.setdefault(seq, partial.longest):
                return True
        return False

    wait_until(has_grown, "a prefix grows")
    victim.kill()
    survivor.resume()
    return asyncio.run(stored_partials(config))


def begins_with(group: Group, partial: Partial) -> bool:
    """Whether every stored token, with its log-probability, is where it was."""
    pairs = zip(group.samples, partial.samples, strict=True)
    return all(
        stored is None or (whole.tokens.startswith(stored.tokens) and whole.logprobs.startswith(stored.logprobs))
        for whole, stored in pairs
    )


def test_half_finished_groups_of_a_killed_server_are_finished_from_their_stored_prefixes(
    start: Callable[..., WholeRun],
) -> None:
    run = start("rollout.servers=2", *PROGRESS, steps=STEPS, max_tokens=LONG)
    run.wait_for_step(2)
    config = run.roles_config()
    wait_until(lambda: sum(beat.running > 0 for beat in asyncio.run(beats(config))) == 2, "both servers work", 120.0)
    wait_until(lambda: len(asyncio.run(stored_partials(config))) >= 4, "partials are stored", 120.0)
    partials = kill_one_amid_its_groups(run, config)
    groups = asyncio.run(finished_groups(config, set(partials)))
    assert all(begins_with(groups[seq], partial) for seq, partial in partials.items())
    resumed = {seq: partials[seq] for seq in partials if groups[seq].attempt > partials[seq].attempt}
    assert resumed
    kept = sum(sample.length for partial in resumed.values() for sample in partial.samples if sample)
    whole = sum(sample.length for seq in resumed for sample in groups[seq].samples)
    print(f"{len(resumed)} groups resumed from {kept} stored tokens of {whole}: {kept / whole:.0%} were not made again")
    assert run.wait(400) == 0, run.printed[-3000:]
    check_books(run.summary(), steps=STEPS)


def test_a_server_joins_and_another_leaves_and_the_run_never_stops(start: Callable[..., WholeRun]) -> None:
    run = start(*PROGRESS, steps=LONG_RUN, max_tokens=LONG)
    run.wait_for_step(1)
    config = run.roles_config()
    joined = run.start_server("extra")
    try:
        wait_until(lambda: "extra" in [beat.name for beat in asyncio.run(beats(config))], "a second server runs", 120.0)
        newest = max(row["step"] for row in run.steps())
        assert next(beat for beat in asyncio.run(beats(config)) if beat.name == "extra").version >= newest - 2
        run.wait_for_step(newest + 2)
        joined.send_signal(signal.SIGTERM)
        assert joined.wait(60) == 0, (run.folder / "extra.log").read_text()[-3000:]
    finally:
        joined.kill()
    assert run.wait(400) == 0, run.printed[-3000:]
    assert "restart" not in run.printed
    check_books(run.summary(), steps=LONG_RUN)
    samples = "".join(path.read_text() for path in (run.run_dir / "samples").glob("*.jsonl"))
    assert '"extra"' in samples or (run.run_dir / "samples" / "extra.jsonl").exists()
