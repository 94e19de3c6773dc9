"""Workflow and reward for completions of prescribed lengths, in an otherwise ordinary run.

    rollout.workflow   async_grpo.lab.bench.pipeline.fixed_lengths:PrescribedLengths
    rewards.functions  async_grpo.lab.bench.pipeline.fixed_lengths:reward

The reference answer of a task is the list of its lengths, "24 7 190": sample i of the group gets the i-th one, and a
fourth sample the first one again (the probe of a held-out prompt has more samples than its evaluation). The model has
no stop token, so a completion always ends at its prescribed length, regardless of the weights. Imports are few because
verifier processes import this module too.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from async_grpo.data.tokenizer import Tokenizer
    from async_grpo.wire import Sample, Task
    from rollout_server.workflows.session import SampleSession

_LEVELS = 101


class PrescribedLengths:
    """The workflow `single_turn` with a prescribed length for every sample."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def run(self, task: Task, session: SampleSession) -> Sample:
        """Complete the task's prompt with the prescribed number of tokens."""
        lengths = lengths_in(task.answer)
        session.limit(lengths[session.index % len(lengths)])
        generation = await session.turn()
        return session.sample(self._tokenizer.decode(generation.tokens.tolist(), skip_special_tokens=True))


def reward(completion: str, answer: str) -> float:
    """Return a cheap number in [0, 1] that depends only on the text. Rewards of a group differ, so there is a gradient.

    >>> reward("1 2 3", "") != reward("1 2 4", "")
    True
    """
    return zlib.crc32(completion.encode()) % _LEVELS / (_LEVELS - 1)


def answer_for(lengths: Sequence[int]) -> str:
    """Return the reference answer that prescribes these lengths."""
    return " ".join(map(str, lengths))


def lengths_in(answer: str) -> list[int]:
    """Return the lengths that a reference answer prescribes.

    >>> lengths_in(answer_for([24, 7, 190]))
    [24, 7, 190]
    """
    return [int(length) for length in answer.split()]
