"""Tests your own workflow with a scripted policy.

>>> sample = asyncio.run(play(MyWorkflow, ["<tool_call>...</tool_call>", "So it is 4."]))  # doctest: +SKIP
>>> assert sample.text.endswith("So it is 4.")  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from async_grpo.data.tokenizer import Tokenizer
from async_grpo.weights.base import HeldWeights
from async_grpo.wire import Sample, Task, tokens_to_bytes
from rollout_server.engines.base import GenerationRequest
from rollout_server.engines.scripted import ScriptedEngine
from rollout_server.workflows.base import Workflow
from rollout_server.workflows.session import SampleSession

STOP = 0
"""Stop token; ends every turn of the scripted policy."""


class ByteTokenizer:
    """A tokenizer with one token per UTF-8 byte. The stop token is special."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the UTF-8 bytes as token ids."""
        return list(text.encode())

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Return the bytes as text."""
        if skip_special_tokens:
            token_ids = [token for token in token_ids if token != STOP]
        return bytes(token_ids).decode(errors="replace")


async def play(
    make: Callable[[Tokenizer], Workflow],
    turns: Sequence[str],
    *,
    prompt: str = "prompt",
    answer: str = "",
    max_tokens: int = 10_000,
    prior: Sample | None = None,
) -> Sample:
    """Run a workflow with a policy that writes `turns` one after another; returns the validated sample.

    `prior` is an unfinished sample to resume, as after an interruption. Raises AssertionError if the workflow requests
    more turns than there are, ValueError if the sample is invalid.
    """
    tokenizer = ByteTokenizer()
    scripted_turns = [[*tokenizer.encode(turn), STOP] for turn in turns]

    def script(request: GenerationRequest) -> list[int]:
        # Request IDs end in the number of pieces before the turn: turns and observations alternate.
        number = int(request.request_id.rpartition(".")[2]) // 2
        assert number < len(scripted_turns), f"the workflow requests turn {number + 1}, the test has {len(turns)}"
        turn = scripted_turns[number]
        return [*request.prefix, *turn[_resumed_length(request.prefix, turn) :]]

    engine = ScriptedEngine(script, tokens_per_s=1e6)
    await engine.start()
    await engine.update_weights(HeldWeights.in_store(Path(), epoch=1, version=0), interruption="keep")
    prompt_tokens = tokenizer.encode(prompt)
    task = Task(index=0, prompt=prompt, prompt_tokens=tokens_to_bytes(prompt_tokens), answer=answer)
    session = SampleSession(engine, "test", prompt_tokens, seed=0, temperature=1.0, max_tokens=max_tokens, prior=prior)
    sample = await make(tokenizer).run(task, session)
    sample.validate()
    return sample


def _resumed_length(written: Sequence[int], turn: Sequence[int]) -> int:
    """Number of tokens of `turn` at the end of `written`: an interrupted sample resumes in the middle of a turn."""
    for size in range(len(turn), 0, -1):
        if list(written[len(written) - size :]) == list(turn[:size]):
            return size
    return 0
