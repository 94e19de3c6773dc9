"""The sequence of events: kill and restart, then kill everything and look, then let the run finish and look.

Every wait is bounded: those of the workers by the buffer's timeouts, the others here.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import uvloop

from async_grpo.config.buffer import RedisConfig
from async_grpo.staleness import ReplayPolicy
from async_grpo.wire import Group, decode
from buffer import BufferStats, EmbeddedServer
from buffer.redis.scripts import RunKeys
from tests.support.buffer_crashes.books import Books, connect_reader, find_inconsistencies, read_books
from tests.support.buffer_crashes.crew import Crew
from tests.support.buffer_crashes.journal import Entry, digest_group, read_entries
from tests.support.buffer_crashes.plan import PRODUCERS, RUN, SERVER_TIMEOUT_S, TRAINERS, Plan, join_run

DEATH_TIMEOUT_S = 10.0
FINISH_TIMEOUT_S = 90.0
WAIT_FOR_A_CALL_S = 0.2
RETUNE_EVERY = 10
STEPS_TO_THE_HORIZON = 3


@dataclass(frozen=True, slots=True)
class Look:
    """The journals and the server's content at a moment when no worker runs."""

    entries: list[Entry]
    stats: BufferStats
    books: Books
    digests: dict[int, str]
    """Digests of the READY and TAKEN groups."""
    inconsistencies: list[str]


@dataclass(slots=True)
class Course:
    """The events of a run."""

    killed: int = 0
    killed_in_a_call: int = 0
    server_killed_s: list[float] = field(default_factory=list)
    """Times on the machine's monotonic clock."""
    looks: list[Look] = field(default_factory=list)
    """After everything was killed in the middle of its work, and at the horizon."""


def crash_run(plan: Plan, report_progress: Callable[[str], None]) -> Course:
    """Execute the plan in its folder."""
    for folder in (plan.folder, plan.journals, plan.checkpoints):
        folder.mkdir(parents=True, exist_ok=True)
    server = EmbeddedServer(plan.server, RedisConfig(fsync=plan.fsync, timeout_s=SERVER_TIMEOUT_S))
    crew = Crew(plan, server.start())
    course = Course()
    try:
        crew.start_all()
        _kill_at_random(plan, crew, server, course, report_progress)
        crew.kill_all()
        _kill_server(plan, server, course)
        course.looks.append(uvloop.run(_look(plan, server.url)))
        uvloop.run(_set_horizon(plan, server.url))
        crew.start_all()
        crew.wait_for_all(FINISH_TIMEOUT_S)
        crew.kill_all()
        course.looks.append(uvloop.run(_look(plan, server.url)))
    finally:
        crew.kill_all()
        server.stop()
    return course


def _kill_at_random(
    plan: Plan, crew: Crew, server: EmbeddedServer, course: Course, report_progress: Callable[[str], None]
) -> None:
    rng = random.Random(plan.seed)
    order = ["worker"] * plan.kills + ["server"] * (plan.server_kills - 1)
    rng.shuffle(order)
    for number, target in enumerate(order):
        time.sleep(rng.uniform(*plan.pause_s))
        crew.look_after()
        if target == "server":
            _kill_server(plan, server, course)
        else:
            _kill_worker(rng, crew, course)
        if number % RETUNE_EVERY == RETUNE_EVERY - 1:
            report_progress(f"{number + 1} of {len(order)} kills")
            if plan.retune:
                policy = plan.retune[number // RETUNE_EVERY % len(plan.retune)]
                uvloop.run(_update_policy(plan, server.url, policy))


def _kill_worker(rng: random.Random, crew: Crew, course: Course) -> None:
    """Kill a worker: half of the times at any moment, half while it waits for a reply."""
    name = rng.choice([*PRODUCERS, *TRAINERS])
    course.killed_in_a_call += crew.wait_for_request(name, WAIT_FOR_A_CALL_S if rng.random() < 0.5 else 0.0)
    crew.kill(name)
    course.killed += 1
    crew.start(name)


def _kill_server(plan: Plan, server: EmbeddedServer, course: Course) -> None:
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    course.server_killed_s.append(time.monotonic())
    deadline_s = time.monotonic() + DEATH_TIMEOUT_S
    while server.alive():
        assert time.monotonic() < deadline_s, "the server has survived SIGKILL"
        time.sleep(0.001)
    if plan.cut_bytes:
        _truncate(newest_file(plan.server), plan.cut_bytes)
    server.start()


def newest_file(server: Path) -> Path:
    """Return the part of the append-only file that the server writes."""
    return max((server / "appendonlydir").glob("*.incr.aof"), key=lambda path: path.stat().st_mtime)


def _truncate(file: Path, count: int) -> None:
    os.truncate(file, max(0, file.stat().st_size - count))


async def _look(plan: Plan, url: str) -> Look:
    buffer = await join_run(plan, url)
    link = connect_reader(url)
    stats = await buffer.stats()
    books = await read_books(link)
    seqs = sorted(books.kept)
    payloads = await link.fetch_values([RunKeys(RUN).group(seq, books.records[seq].attempt) for seq in seqs])
    digests = {
        seq: digest_group(decode(payload, Group)) for seq, payload in zip(seqs, payloads, strict=True) if payload
    }
    await buffer.aclose()
    await link.aclose()
    return Look(read_entries(plan.journals), stats, books, digests, find_inconsistencies(books))


async def _update_policy(plan: Plan, url: str, policy: ReplayPolicy) -> None:
    buffer = await join_run(plan, url)
    await buffer.update_policy(policy)
    await buffer.aclose()


async def _set_horizon(plan: Plan, url: str) -> None:
    """Set the horizon: enough for all groups that were not taken yet, and for some more steps."""
    buffer = await join_run(plan, url)
    stats = await buffer.stats()
    size = plan.policy.window.groups_per_step
    steps = -(-stats.active // size) + STEPS_TO_THE_HORIZON
    window = replace(plan.policy.window, horizon=stats.used + steps * size)
    await buffer.update_policy(replace(plan.policy, window=window))
    await buffer.aclose()
