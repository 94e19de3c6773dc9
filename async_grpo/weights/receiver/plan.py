"""Which chunks to ask for: never more than `credits` under way, late ones once more. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from async_grpo.errors import WeightsCorrupt
from async_grpo.weights.errors import FetchInterrupted

MAX_ATTEMPTS = 4
"""A chunk that failed its hash, or went unanswered, this many times is given up."""


class Plan:
    """The chunks of one version that have to come over the network.

    >>> plan = Plan([7, 8, 9], patched=True, credits=2, timeout_s=5.0)
    >>> plan.take(now_s=0.0)
    [(7, True), (8, True)]
    >>> plan.settle(7); plan.take(now_s=1.0)
    [(9, True)]
    """

    def __init__(self, chunks: Iterable[int], *, patched: bool, credits: int, timeout_s: float) -> None:
        self._todo = deque(chunks)
        self._deadlines: dict[int, float] = {}
        self._passed_over: set[int] = set()
        self._late: dict[int, int] = {}
        self._corrupt: dict[int, int] = {}
        self._dense: set[int] = set()
        self._patched = patched
        self._credits = credits
        self._timeout_s = timeout_s

    @property
    def done(self) -> bool:
        """Every chunk has come."""
        return not self._todo and not self._deadlines

    def awaits(self, index: int) -> bool:
        """The chunk was asked for and has not come."""
        return index in self._deadlines

    def take(self, now_s: float) -> list[tuple[int, bool]]:
        """Chunks to ask for now, and whether as a patch."""
        free = self._credits - len(self._deadlines)
        asked = [self._todo.popleft() for _ in range(min(free, len(self._todo)))]
        for index in asked:
            self._deadlines[index] = now_s + self._timeout_s
        return [(index, self._patched and index not in self._dense) for index in asked]

    def settle(self, index: int) -> None:
        """The chunk has come; those that were asked for before it and have not are passed over."""
        for earlier in self._deadlines:  # in the order in which they were asked for
            if earlier == index:
                break
            self._passed_over.add(earlier)
        self._forget(index)

    def add(self, index: int) -> None:
        """One chunk more."""
        self._todo.append(index)

    def expire(self, now_s: float, heard_s: float) -> list[int]:
        """Put late chunks back; `heard_s` is when the other side was last heard. Raises FetchInterrupted if one was
        late too often.

        Answers come in the order of the requests. So on a slow link, where whole queues of chunks lie before one,
        that one is not late as long as those before it come in: asked for again, it would come twice, and make
        the link slower still.
        """
        silent = now_s - heard_s >= self._timeout_s
        overdue = [index for index, deadline in self._deadlines.items() if deadline <= now_s]
        late = [index for index in overdue if silent or index in self._passed_over]
        for index in late:
            self._late[index] = self._late.get(index, 0) + 1
            if self._late[index] >= MAX_ATTEMPTS:
                raise FetchInterrupted(f"chunk {index} was asked for {MAX_ATTEMPTS} times and never came.")
            self._put_back(index)
        return late

    def refuse(self, index: int, *, patch: bool) -> None:
        """What came fails its hash: ask again, and for the dense chunk if it was a patch.

        Raises WeightsCorrupt if dense chunks keep failing.
        """
        if patch:
            self._dense.add(index)
        else:
            self._corrupt[index] = self._corrupt.get(index, 0) + 1
            if self._corrupt[index] >= MAX_ATTEMPTS:
                raise WeightsCorrupt(
                    f"chunk {index} failed its hash {MAX_ATTEMPTS} times; nothing of this version was applied. "
                    "Check the network and the publisher's memory."
                )
        self._put_back(index)

    def restart(self) -> None:
        """Ask somebody else for everything that is under way."""
        for index in sorted(self._deadlines, reverse=True):
            self._put_back(index)
        self._late.clear()
        self._corrupt.clear()

    def _put_back(self, index: int) -> None:
        self._forget(index)
        self._todo.appendleft(index)

    def _forget(self, index: int) -> None:
        del self._deadlines[index]
        self._passed_over.discard(index)
