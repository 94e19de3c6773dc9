"""The keys of a run, and the Lua scripts that change them.

All keys are under one hash tag, so that a cluster keeps them on one node. The state keys are passed to every script in
the order of `_STATE_KEYS`:

- `meta`        hash    epoch, head version, counters, the policy
- `released`    hash    reason -> groups that ended with it
- `lengths`     hash    reason:n -> those whose longest completion had at most n tokens (and more than n / 2)
- `open`        zset    INFLIGHT and READY groups, scored by sequence
- `ready`       zset    READY groups, scored by sequence
- `leases`      zset    INFLIGHT groups, scored by deadline in ms (0: given back, nobody holds it)
- `begun`       zset    INFLIGHT groups, scored by the policy version that no token of theirs is older than
- `ages`        zset    READY groups, scored by the version of their newest token where the policy masks what is too
                        old, else of their oldest
- `groups`      hash    sequence -> attempt, strikes, longest, oldest, newest, uses, pins (RECORD in
                        lua/parts/records.lua), of every active group and of every released one that a logged step has
- `taken`       set     TAKEN groups
- `log`         hash    version -> epoch, settled, mask_below, size, sequences of its batch, until it is committed
- `endings`     zset    the newest endings, so that a repeated insert or discard is recognised
- `wake:admit`  list    at most one element: somebody should look whether groups can be admitted
- `wake:take`   list    at most one element: somebody should look whether a batch can be taken
- `drained`     string  what `async-grpo buffer drain` will put back; only while the run is drained
- `stage`       string  a partial on its way in; exists only within one transaction

Payloads, by plain SET and MGET: `task:<seq>`, `partial:<seq>`, `group:<seq>:<attempt>`; and
`grant:<request>`, the answer to an `admit` whose reply may have been lost. The index of a task is the
sequence of its ticket: both count from 0, and tasks are admitted in order. A group's key names the
attempt that made it, so that it can be written where it will stay before anybody knows whether its
lease still holds: what a lost attempt writes is nobody else's.

The Lua scripts in lua/, one for each transition, are called by digest and loaded where the server does not know them.
The second line of a script may name the parts, in lua/parts/, that are put before it, in this order: a server creates
all functions of a script again at every call, so each script gets only those that it needs.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

_STATE_KEYS = (
    *("meta", "released", "lengths", "open", "ready", "leases", "begun", "ages", "groups", "taken", "log"),
    *("endings", "wake:admit", "wake:take", "stage"),
)


class RunKeys:
    """Names of the keys of `run`."""

    def __init__(self, run: str) -> None:
        self.prefix = f"agrpo:{{{run}}}:"
        self.state_keys = tuple(self.of(name) for name in _STATE_KEYS)

    def of(self, name: str) -> str:
        """The key called `name`."""
        return self.prefix + name

    def group(self, seq: int, attempt: int) -> str:
        """The key of a finished group."""
        return f"{self.prefix}group:{seq}:{attempt}"

    @property
    def pattern(self) -> str:
        """Glob pattern of everything that the run has stored."""
        return self.prefix + "*"


AFTER = "-- After: "


@dataclass(frozen=True, slots=True)
class Script:
    """A script and the SHA-1 under which a server knows it once it is loaded."""

    name: str
    source: str
    digest: str

    @property
    def only_reads(self) -> bool:
        """Whether there is nothing that a replica could miss."""
        return "no-writes" in self.source.split("\n", 1)[0]


@cache
def script(name: str) -> Script:
    """`lua/<name>.lua`, its parts put between its flags (the first line) and its body."""
    flags, body = _read(name).split("\n", 1)
    first = body.split("\n", 1)[0]
    parts = first.removeprefix(AFTER).split() if first.startswith(AFTER) else []
    source = "\n".join([flags, *(_read(f"parts/{part}") for part in parts), body])
    return Script(name, source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


def _read(name: str) -> str:
    return (files("buffer.redis") / "lua" / f"{name}.lua").read_text()
