"""The reward pool: verifiers in processes that can be killed.

    dispatcher --judge(group)--> RewardPool --pipe--> worker process 1 .. N   (async_grpo.rewards.worker)

- `judge` waits for a free slot; another `judge` that ends frees it, at the latest after one
  deadline per item.
- a slot waits for one answer at a time, at most `deadline_s`; the worker's next frame unblocks it,
  or its end, or the deadline, at which the worker is killed and replaced.

The event loop is never blocked: verifiers run elsewhere, and a worker that hangs cannot hold it.
Workers are started by fork and exec of a fresh interpreter, so they share nothing with the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from async_grpo.config.schema import RewardConfig
from async_grpo.rewards.frames import Score
from async_grpo.rewards.slot import WorkerSlot
from async_grpo.rewards.verdict import Verdict, unverifiable, weighted_sum


class RewardPool:
    """`async with RewardPool(functions, workers=2, deadline_s=10) as pool: await pool.judge(items)`."""

    def __init__(self, functions: Sequence[RewardConfig], workers: int, deadline_s: float) -> None:
        self._weights = {function.name: function.weight for function in functions}
        self._slots = [WorkerSlot(list(self._weights), deadline_s) for _ in range(workers)]
        self._free: asyncio.LifoQueue[WorkerSlot] = asyncio.LifoQueue()

    async def start(self) -> None:
        """Start every worker. Raises ConfigError if a verifier cannot be imported or called."""
        try:
            await self._slots[0].start()  # finds what is wrong with the verifiers, once
            await asyncio.gather(*(slot.start() for slot in self._slots[1:]))
        except BaseException:
            await self.aclose()
            raise
        for slot in self._slots:
            self._free.put_nowait(slot)

    async def judge(self, items: Sequence[tuple[str, str]]) -> list[Verdict]:
        """A verdict per (completion, reference answer), in order. Never raises for what a verifier does."""
        slot = await self._free.get()
        try:
            return [self._verdict(answer) async for answer in slot.judge(items)]
        except BaseException:
            await asyncio.shield(slot.kill())  # answers may still be in its pipe: never reuse it
            raise
        finally:
            self._free.put_nowait(slot)

    async def aclose(self) -> None:
        """End all workers."""
        await asyncio.gather(*(slot.kill() for slot in self._slots))

    async def __aenter__(self) -> RewardPool:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _verdict(self, answer: Score | Verdict) -> Verdict:
        if isinstance(answer, Verdict):
            return answer
        if answer.error:
            return unverifiable("error", answer.error)
        return Verdict(scores=answer.scores, reward=weighted_sum(answer.scores, self._weights))
