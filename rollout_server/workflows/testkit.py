"""Tests a workflow of your own with a policy whose turns you write.

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
"""The stop token: ends every turn of the scripted policy."""


class ByteTokenizer:
    """A tokenizer with one token per UTF-8 byte. The stop token is special."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Bytes as token ids."""
        return list(text.encode())

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Bytes as text."""
        kept = [token for token in token_ids if not (skip_special_tokens and token == STOP)]
        return bytes(kept).decode(errors="replace")


async def play(
    make: Callable[[Tokenizer], Workflow],
    turns: Sequence[str],
    *,
    prompt: str = "prompt",
    answer: str = "",
    max_tokens: int = 10_000,
    prior: Sample | None = None,
) -> Sample:
    """Run a workflow with a policy that says `turns` one after another; returns the sample, checked.

    `prior` is an unfinished sample to go on from, as after an interruption. Raises AssertionError if the workflow
    asks for more turns than there are, ValueError if the sample breaks its guarantees.
    """
    tokenizer = ByteTokenizer()
    said = [[*tokenizer.encode(turn), STOP] for turn in turns]

    def script(request: GenerationRequest) -> list[int]:
        number = int(request.request_id.rpartition(".")[2]) // 2
        assert number < len(said), f"the workflow asks for turn {number + 1}, the test has {len(said)}"
        return [*request.prefix, *said[number][_begun(request.prefix, said[number]) :]]

    engine = ScriptedEngine(script, tokens_per_s=1e6)
    await engine.start()
    await engine.update_weights(HeldWeights.in_store(Path(), epoch=1, version=0), interruption="keep")
    prompt_tokens = tokenizer.encode(prompt)
    task = Task(index=0, prompt=prompt, prompt_tokens=tokens_to_bytes(prompt_tokens), answer=answer)
    session = SampleSession(engine, "test", prompt_tokens, seed=0, temperature=1.0, max_tokens=max_tokens, prior=prior)
    sample = await make(tokenizer).run(task, session)
    sample.validate()
    return sample


def _begun(written: Sequence[int], turn: Sequence[int]) -> int:
    """How much of the turn is written already: an interrupted sample goes on in the middle of it."""
    return next(size for size in range(len(turn), -1, -1) if list(written[len(written) - size :]) == list(turn[:size]))
