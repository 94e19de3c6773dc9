"""The check of weight updates, with an engine whose logits are a table for each set of weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from async_grpo.errors import EngineError
from async_grpo.weights.base import CheckpointSource, HeldWeights
from rollout_server.engines.base import Generation, GenerationRequest, UpdateTimes
from rollout_server.engines.vllm.update_check import UpdateCheck, check_updates

VOCABULARY = 50

Table = npt.NDArray[np.float64]


class TableEngine:
    """Logits depend on the last token. `graphs`: the tables used in decoding after 0, 1 and 2 updates."""

    def __init__(self, graphs: str, *, distance: float = 1.0, noise: float = 0.0) -> None:
        self.random = np.random.default_rng(1)
        shape = (VOCABULARY, VOCABULARY)
        self.graphs, self.noise, self.updates = graphs, noise, 0
        checkpoint = self.random.normal(size=shape)
        self.tables = {"checkpoint": checkpoint, "flipped": checkpoint + distance * self.random.normal(size=shape)}
        self.loaded = "checkpoint"
        self.lengths: set[int] = set()

    def row(self, weights: str, last: int) -> Table:
        logits = self.tables[weights][last]
        return np.asarray(logits - np.log(np.exp(logits).sum()))

    async def vocabulary_logprobs(self, prompt: Sequence[int]) -> npt.NDArray[np.float32]:
        self.lengths.add(len(prompt))
        return self.row(self.loaded, prompt[-1]).astype(np.float32)

    async def generate(self, request: GenerationRequest) -> Generation:
        weights = {"c": "checkpoint", "f": "flipped"}[self.graphs[self.updates]]
        last, tokens, logprobs = request.prompt[-1], [], []
        for position in range(request.max_tokens):
            row = self.row(weights if position else self.loaded, last)
            last = int(self.random.choice(VOCABULARY, p=np.exp(row)))
            tokens.append(last)
            logprobs.append(row[last] + self.noise * self.random.normal())
        return Generation(np.array(tokens, np.int32), np.array(logprobs, np.float32), [], "length")

    async def update_weights(self, weights: HeldWeights, *, interruption: str) -> UpdateTimes:
        assert isinstance(weights.source, CheckpointSource)
        self.loaded = "flipped" if weights.source.flipped else "checkpoint"
        self.updates += 1
        return UpdateTimes(1.0, 0.5)


async def check(engine: Any, precision: Any = "float32") -> UpdateCheck:
    return await check_updates(engine, Path("unused"), precision, vocabulary=VOCABULARY, prompt_tokens=20)


async def test_decoding_that_follows_updates_passes_and_ends_with_the_checkpoint() -> None:
    engine = TableEngine("cfc")
    result = await check(engine)
    assert result.gap < 1e-6 < result.allowed < result.distance
    assert result.load_s == 2.0
    assert (engine.loaded, engine.updates) == ("checkpoint", 2)
    assert engine.lengths == {23}  # longer than the prompts, so that no graph reads them


@pytest.mark.parametrize(("graphs", "loaded"), [("ccc", "other weights"), ("cff", "checkpoint's weights")])
async def test_decoding_with_old_weights_after_either_update_is_refused(graphs: str, loaded: str) -> None:
    with pytest.raises(EngineError, match=f"{loaded}.* decoded tokens"):
        await check(TableEngine(graphs))


async def test_rounding_present_before_any_update_is_allowed() -> None:
    assert (await check(TableEngine("cfc", noise=0.02))).gap > 0.005
    assert (await check(TableEngine("cfc", noise=0.005), "bfloat16")).gap > 0.001


async def test_policies_that_are_too_similar_are_refused() -> None:
    with pytest.raises(EngineError, match="told apart"):
        await check(TableEngine("cfc", distance=0.001))
