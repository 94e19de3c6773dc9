"""Completions of prescribed lengths, in a run like any other: its workflow and its reward.

    rollout.workflow   async_grpo.lab.bench.pipeline.fixed_lengths:PrescribedLengths
    rewards.functions  async_grpo.lab.bench.pipeline.fixed_lengths:reward

The reference answer of a task is the list of its lengths, "24 7 190": sample i of the group gets the i-th, and a
fourth one would get the first again (the probe of a held-out prompt has more samples than its evaluation). The model
has no stop token, so a completion ends there and nowhere else, whatever the weights have become. Imports are few,
because verifier processes import this too.
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
        """The completion of the task's prompt, as long as the task says."""
        lengths = lengths_in(task.answer)
        session.limit(lengths[session.index % len(lengths)])
        generation = await session.turn()
        return session.sample(self._tokenizer.decode(generation.tokens.tolist(), skip_special_tokens=True))


def reward(completion: str, answer: str) -> float:
    """A number in [0, 1] that depends on the text alone and costs nothing: groups differ, so there is a gradient.

    >>> reward("1 2 3", "") != reward("1 2 4", "")
    True
    """
    return zlib.crc32(completion.encode()) % _LEVELS / (_LEVELS - 1)


def answer_for(lengths: Sequence[int]) -> str:
    """The reference answer that prescribes these lengths."""
    return " ".join(map(str, lengths))


def lengths_in(answer: str) -> list[int]:
    """The lengths that a reference answer prescribes.

    >>> lengths_in(answer_for([24, 7, 190]))
    [24, 7, 190]
    """
    return [int(length) for length in answer.split()]
