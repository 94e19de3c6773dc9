"""A workflow that misbehaves in two of a hundred samples, to test that none of them harms a run."""

from __future__ import annotations

import asyncio
import random

from async_grpo.data.tokenizer import Tokenizer
from async_grpo.wire import Sample, Task
from rollout_server.workflows.base import SingleTurn
from rollout_server.workflows.session import SampleSession

SHARE = 0.02
DEEDS = ("cancel", "unfinished", "poison", "raise")
BEYOND_VOCABULARY = 10**6


class WildWorkflow:
    """`SingleTurn`, except in a `SHARE` of the samples, drawn by task and sample so that a retry misbehaves again."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._single_turn = SingleTurn(tokenizer)

    async def run(self, task: Task, session: SampleSession) -> Sample:
        """Generate one sample or do one of the DEEDS."""
        chance = random.Random(f"{task.index}.{session.index}")
        if chance.random() >= SHARE:
            return await self._single_turn.run(task, session)

        deed = chance.choice(DEEDS)
        if deed == "cancel":
            raise asyncio.CancelledError
        if deed == "unfinished":
            return session.sample("")  # no turn was taken
        if deed == "raise":
            raise ValueError("broken on purpose")

        await session.turn()
        await session.observe(_impossible_token)
        return await self._single_turn.run(task, session)


async def _impossible_token() -> list[int]:
    return [BEYOND_VOCABULARY]
