"""Every key of a run, under one hash tag, so that a cluster keeps them on one node.

Bookkeeping, passed to every script in the order of `_BOOKS`:

- `meta`        hash    epoch, head version, counters, the policy
- `released`    hash    reason -> groups that ended with it
- `lengths`     hash    reason:n -> those whose longest completion had at most n tokens (and more than n / 2)
- `open`        zset    INFLIGHT and READY groups, scored by sequence
- `ready`       zset    READY groups, scored by sequence
- `leases`      zset    INFLIGHT groups, scored by deadline in ms (0: given back, nobody holds it)
- `begun`       zset    INFLIGHT groups, scored by the policy version that no token of theirs is older than
- `oldest`      zset    READY groups, scored by the version of their oldest token
- `newest`      zset    READY groups, scored by the version of their newest token
- `versions`    hash    sequence -> both, of every READY or TAKEN group
- `attempts`    hash    sequence -> leases so far, of every active group
- `strikes`     hash    sequence -> leases that expired, of the INFLIGHT groups that have any
- `longest`     hash    sequence -> tokens of the longest completion, of every active group that has any
- `uses`        hash    sequence -> how often it was taken, of every active group that was
- `taken`       set     TAKEN groups
- `log`         hash    version -> epoch, settled, mask_below, sequences of its batch, until it is committed
- `endings`     zset    the newest endings, so that a repeated insert or discard is recognised
- `pins`        hash    sequence -> reasons to keep the group's payload: it is active; a logged step has it
- `wake:admit`  list    at most one element: somebody should look whether groups can be admitted
- `wake:take`   list    at most one element: somebody should look whether a batch can be taken
- `drained`     string  what `async-grpo buffer drain` will put back; only while the run is drained
- `stage`       string  a payload on its way in; exists only within one transaction

Payloads, by plain SET and MGET: `task:<seq>`, `partial:<seq>`, `group:<seq>`; and `grant:<request>`,
the answer to an `admit` whose reply may have been lost. The index of a task is the sequence of its
ticket: both count from 0, and tasks are admitted in order.
"""

from __future__ import annotations

from collections.abc import Iterable

_BOOKS = (
    *("meta", "released", "lengths", "open", "ready", "leases", "begun", "oldest", "newest", "versions", "attempts"),
    *("strikes", "longest", "uses", "taken", "log", "endings", "pins", "wake:admit", "wake:take", "stage"),
)


class Keys:
    """Names of the keys of `run`."""

    def __init__(self, run: str) -> None:
        self.prefix = f"agrpo:{{{run}}}:"
        self.books = tuple(self.of(name) for name in _BOOKS)

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
