"""Every key of a run, under one hash tag, so that a cluster keeps them on one node.

Bookkeeping, passed to every script in this order (KEYS):

- `meta`        hash    epoch, head version, counters, admission parameters
- `released`    hash    reason -> groups that ended with it
- `open`        zset    INFLIGHT and READY groups, scored by sequence
- `leases`      zset    INFLIGHT groups, scored by deadline in ms (0: given back, nobody holds it)
- `attempts`    hash    sequence -> leases so far, of every active group
- `strikes`     hash    sequence -> leases that expired, of the INFLIGHT groups that have any
- `versions`    hash    sequence -> policy version at admission, of every INFLIGHT group
- `oldest`      hash    sequence -> version of the oldest token, of every READY group
- `taken`       set     TAKEN groups
- `log`         hash    version -> epoch and sequences of the batch of that step, until it is committed
- `endings`     zset    the newest endings, so that a repeated insert or discard is recognised
- `stored`      set     sequences whose group payload exists
- `wake:admit`  list    at most one element: somebody should look whether groups can be admitted
- `wake:take`   list    at most one element: somebody should look whether a batch can be taken
- `stage`       string  a payload on its way in; exists only within one transaction

Payloads, by plain SET and MGET: `task:<seq>`, `partial:<seq>`, `group:<seq>`; and `grant:<request>`,
the answer to an `admit` whose reply may have been lost. The index of a task is the sequence of its
ticket: both count from 0, and tasks are admitted in order.
"""

from __future__ import annotations

from collections.abc import Iterable

_BOOKS = (
    *("meta", "released", "open", "leases", "attempts", "strikes", "versions", "oldest"),
    *("taken", "log", "endings", "stored", "wake:admit", "wake:take", "stage"),
)


class Keys:
    """Names of the keys of `run`."""

    def __init__(self, run: str) -> None:
        self.prefix = f"agrpo:{{{run}}}:"
        self.books = [self.of(name) for name in _BOOKS]

    def of(self, name: str) -> str:
        """The key called `name`."""
        return self.prefix + name

    def payloads(self, kind: str, seqs: Iterable[int]) -> list[str]:
        """The keys of the payloads of one kind (task, partial, group)."""
        return [f"{self.prefix}{kind}:{seq}" for seq in seqs]

    @property
    def pattern(self) -> str:
        """Glob pattern of everything that the run has stored."""
        return self.prefix + "*"
