"""The server's content of a run, key by key, read in one transaction; and checks of its consistency."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from async_grpo.config.buffer import RedisConfig
from buffer import make_client
from buffer.inspector import GroupRecord
from buffer.redis.retrying import RetryingClient
from buffer.redis.scripts import RunKeys
from tests.support.buffer_crashes.plan import RUN, SERVER_TIMEOUT_S

_SETS = ("open", "ready", "leases", "begun", "ages")
_PAYLOADS = ("task", "partial", "group")


@dataclass(frozen=True, slots=True)
class Books:
    """Sequences by book and by kind of payload."""

    seqs: Mapping[str, set[int]]
    logged: Mapping[int, list[int]]
    """Version -> sequences of its batch."""
    records: Mapping[int, GroupRecord]
    tasks_put: int
    admitted: int
    released: int

    @property
    def kept(self) -> set[int]:
        """READY and TAKEN groups."""
        return self.seqs["ready"] | self.seqs["taken"]


def connect_reader(url: str) -> RetryingClient:
    """Return a client for reading books, which survives restarts of the server."""
    return RetryingClient(make_client(RedisConfig(url=url)), SERVER_TIMEOUT_S)


async def read_books(link: RetryingClient) -> Books:
    """Read everything in one transaction."""
    keys = RunKeys(RUN)

    async def read() -> list[object]:
        async with link.client.pipeline(transaction=True) as pipe:
            for name in _SETS:
                pipe.zrange(keys.key(name), 0, -1)
            pipe.smembers(keys.key("taken")).hgetall(keys.key("log")).hgetall(keys.key("groups"))
            pipe.hmget(keys.key("meta"), "tasks_put", "admitted").hvals(keys.key("released"))
            pipe.keys(keys.pattern)
            replies: list[object] = await pipe.execute()
            return replies

    *sets, taken, log, records, counters, released, names = await link.call(read)
    seqs = {name: _parse_numbers(reply) for name, reply in zip(_SETS, sets, strict=True)}
    payloads = [name.decode().removeprefix(keys.prefix).split(":") for name in names]
    stored = {kind: {int(rest[0]) for name, *rest in payloads if name == kind} for kind in _PAYLOADS}
    tasks_put, admitted = (int(value or 0) for value in counters)
    return Books(
        seqs={**seqs, **stored, "taken": _parse_numbers(taken)},
        logged={int(version): _parse_logged(entry) for version, entry in log.items()},
        records={int(seq): GroupRecord(*map(int, text.split())) for seq, text in records.items()},
        tasks_put=tasks_put,
        admitted=admitted,
        released=sum(map(int, released)),
    )


def find_inconsistencies(books: Books) -> list[str]:
    """Return the inconsistencies; [] if there are none."""
    of = books.seqs
    kept = books.kept
    in_flight = of["leases"]
    active = of["open"] | of["taken"]
    references = Counter({seq: record.references for seq, record in books.records.items() if record.references})
    expected_references = Counter(kept) + Counter(seq for seqs in books.logged.values() for seq in seqs)
    waiting = set(range(books.admitted, books.tasks_put))
    # A server that was just restarted stores payloads before it rejects the unknown script (`run_script`). So
    # there may be tasks ahead of the stream until they are put again, and groups with a lease until it ends.
    tasks = {seq for seq in of["task"] if seq < books.tasks_put}
    finished = of["group"] - in_flight
    same = {
        "open groups are in flight or ready": (of["open"], in_flight | of["ready"]),
        "those in flight have a begun version": (of["begun"], in_flight),
        "ready groups have an age": (of["ages"], of["ready"]),
        "active and referenced groups have a record": (set(books.records), active | set(references)),
        "referenced groups have their payload": (finished, set(references)),
        "waiting and unfinished groups have their task": (tasks, in_flight | waiting),
    }
    within = {
        "expired leases are of groups in flight": (
            {seq for seq, record in books.records.items() if record.expired_leases},
            in_flight,
        ),
        "uses are of finished groups": ({seq for seq, record in books.records.items() if record.uses}, kept),
        "partials are of groups in flight": (of["partial"], in_flight),
        "taken groups are in the log": (of["taken"], {seq for seqs in books.logged.values() for seq in seqs}),
    }
    problems = [f"{rule}: {_describe_difference(*both)}" for rule, both in same.items() if both[0] != both[1]]
    problems += [f"{rule}: {_describe_difference(*both)}" for rule, both in within.items() if not both[0] <= both[1]]
    if in_flight & of["ready"] or of["open"] & of["taken"]:
        problems.append(f"in two states at once: {in_flight & of['ready'] | of['open'] & of['taken']}")
    if expected_references != references:
        problems.append(f"references are {dict(references)}, not {dict(expected_references)}")
    if books.admitted != books.released + len(active):
        problems.append(f"{books.admitted} admitted, {books.released} released, {len(active)} active")
    return problems


def _parse_numbers(reply: list[bytes]) -> set[int]:
    return {int(value) for value in reply}


def _parse_logged(entry: bytes) -> list[int]:
    return [int(seq) for seq in entry.rpartition(b"|")[2].split(b",")]


def _describe_difference(actual: set[int], expected: set[int]) -> str:
    return f"too many {sorted(actual - expected)}, missing {sorted(expected - actual)}"
