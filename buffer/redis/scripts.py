"""The keys of a run and the Lua scripts that change them.

All keys have one hash tag, so that a cluster stores them on one node. Every script gets the state keys in the order of
`_STATE_KEYS`:

- `meta`        hash    epoch, newest version, counters, the policy, the quota
- `released`    hash    reason -> number of groups that ended for it
- `lengths`     hash    reason:n -> number of those whose longest completion had at most n and more than n / 2 tokens
- `open`        zset    INFLIGHT and READY groups, scored by sequence
- `ready`       zset    READY groups, scored by sequence
- `leases`      zset    INFLIGHT groups, scored by deadline in ms (0: given back, without a holder)
- `begun`       zset    INFLIGHT groups, scored by a policy version that none of their tokens is older than
- `ages`        zset    READY groups, scored by the version of their newest token under on_stale mask, else of their
                        oldest
- `groups`      hash    sequence -> record (RECORD in lua/parts/records.lua), of every active group and of every
                        released one that a logged step has
- `taken`       set     TAKEN groups
- `log`         hash    version -> batch taken for the step (lua/parts/steps.lua), until it is committed
- `endings`     zset    the newest endings, so that a repeated insert or discard is recognised
- `holders`     hash    sequence -> attempt and holder of every lease, also after it has expired
- `held`        hash    holder -> number of its leases
- `waiting`     hash    holder -> wanted, slots, number of its last request: servers whose last request got no group
- `wake:admit`  list    at most one element: a waiter should check whether groups can be admitted
- `wake:take`   list    at most one element: a waiter should check whether a batch can be taken
- `drained`     string  settings that `async-grpo buffer drain --resume` restores; only while the run is drained
- `stage`       string  a partial on its way in; exists only within one transaction

Payloads, by plain SET and MGET: `task:<seq>`, `partial:<seq>`, `group:<seq>:<attempt>`. Replies to calls that may be
repeated: `grant:<request>` of `admit_groups`, `rollback:<request>` of `rollback`. The index of a task is the sequence
of its ticket: both count from 0, and tasks are admitted in order. The key of a group contains its attempt, so a group
can be written to its final place before the lease is checked: a lost attempt overwrites no other.

The Lua scripts in lua/, one per transition, are called by digest and loaded if the server does not have them. The
second line of a script may name parts in lua/parts/ that are put before it, in this order. A server creates all
functions of a script again at every call, so each script gets only those that it needs.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

_STATE_KEYS = (
    "meta",
    "released",
    "lengths",
    "open",
    "ready",
    "leases",
    "begun",
    "ages",
    "groups",
    "taken",
    "log",
    "endings",
    "wake:admit",
    "wake:take",
    "stage",
    "holders",
    "held",
    "waiting",
)
"""In the order of lua/parts/state.lua."""


class RunKeys:
    """Full names of the keys of `run`."""

    def __init__(self, run: str) -> None:
        self.prefix = f"agrpo:{{{run}}}:"
        self.state_keys = tuple(self.key(name) for name in _STATE_KEYS)

    def key(self, name: str) -> str:
        """Return the full name of a key of the run."""
        return self.prefix + name

    def group(self, seq: int, attempt: int) -> str:
        """Return the key of a finished group."""
        return f"{self.prefix}group:{seq}:{attempt}"

    @staticmethod
    def run_of_key(key: str) -> str:
        """Return the run that a key belongs to."""
        return key.removeprefix("agrpo:{").rpartition("}:")[0]

    @property
    def pattern(self) -> str:
        """Glob pattern that matches every key of the run."""
        return self.prefix + "*"


PARTS_PREFIX = "-- Requires: "


@dataclass(frozen=True, slots=True)
class Script:
    """A script and its SHA-1, by which EVALSHA calls it."""

    name: str
    source: str
    digest: str

    @property
    def only_reads(self) -> bool:
        """True if it writes nothing, so that replicas need not confirm it."""
        return "no-writes" in self.source.split("\n", 1)[0]


@cache
def load_script(name: str) -> Script:
    """Return `lua/<name>.lua`, with its parts between its flags (the first line) and its body."""
    flags, body = _read_file(name).split("\n", 1)
    second_line = body.split("\n", 1)[0]
    parts = []
    if second_line.startswith(PARTS_PREFIX):
        parts = [_read_file(f"parts/{part}") for part in second_line.removeprefix(PARTS_PREFIX).split()]
    source = "\n".join([flags, *parts, body])
    return Script(name, source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


def _read_file(name: str) -> str:
    return (files("buffer.redis") / "lua" / f"{name}.lua").read_text()
