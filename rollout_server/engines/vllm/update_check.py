"""A check at the start of an engine that captures graphs: does decoding follow an update of the weights?

    checkpoint --> flipped weights --> checkpoint again       each loaded as an update is
        |               |                    |
     decode, read    decode, read         decode, read        the last token of some completions

A captured graph reads memory where it was at its capture. If a layer allocates anew when its weights are replaced, the
graph goes on with the old ones, and only tokens that are decoded by graphs are wrong. vLLM itself does not notice. An
address that changes is found by the load (`reload.check_addresses`), but a layer may also multiply with tensors that
are no parameters, so that tokens are compared as well: the log-probability that decoding reported with the one that
reading the same tokens as a prompt gives. vLLM reads a prompt without graphs if it is longer than the largest batch
that it has captured, so the prompts here are.

Every second row of each tensor has the other sign in the flipped weights. They have the checkpoint's magnitudes, so
that rounding errors are like its own, and another distribution, so that a layer that stays behind is seen.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from async_grpo.config.model import Precision
from async_grpo.errors import EngineError
from async_grpo.weights.base import CheckpointSource, HeldWeights
from rollout_server.engines.base import CHECKPOINT_VERSION, Engine, GenerationRequest

PROMPTS, NEW_TOKENS = 8, 4
SEPARABLE = 4.0
"""The two policies have to be at least so many times further apart than decoding may be from reading."""
FRESH_GAPS = 4.0
"""How many times the gap may grow that decoding and reading have before any update, with one set of weights."""
ROUNDING: dict[Precision, float] = {"float32": 1e-3, "bfloat16": 0.03}
"""Gap that rounding explains, as a share of the standard deviation of the logits. In random models of 8 to 64 layers
bfloat16 is 0.8% to 1.3% away from float32, with flipped weights too, so that two ways of rounding are up to 1.8% apart.
A single matrix of their last layer that keeps old weights makes 4% to 26%. float32 has 16 bits more, but sums over
other orders, and matrix units may round its factors."""


@dataclass(frozen=True, slots=True)
class UpdateCheck:
    """What was compared, in units of log-probability."""

    gap: float
    """Mean difference of decoding and reading, in the worse of the two updates."""
    allowed: float
    distance: float
    """Mean difference of the two policies, over the same tokens."""
    load_s: float
    """Seconds for both updates."""
    check_s: float
    """Seconds for everything, updates included."""


@dataclass(frozen=True, slots=True)
class _Round:
    """Completions under one set of weights: all tokens up to the last one, which is [N], decoded and read."""

    contexts: list[list[int]]
    lasts: list[int]
    gap: float
    read_N: np.ndarray
    spread: float


async def check_updates(
    engine: Engine, model_dir: Path, precision: Precision, *, vocabulary: int, prompt_tokens: int
) -> UpdateCheck:
    """Load two policies and compare decoded tokens; the engine has the checkpoint's weights afterwards.

    `vocabulary`: token ids are below it. `prompt_tokens`: more than the largest batch of a captured graph. Raises
    EngineError, with what was found, if decoding does not follow, or if an update fails.
    """
    started_s = time.monotonic()
    prompts = np.random.default_rng(0).integers(vocabulary, size=(PROMPTS, prompt_tokens)).tolist()
    fresh = await _compare(engine, prompts, "fresh")
    load_s = await _load(engine, model_dir, precision, epoch=-2, flipped=True)
    flipped = await _compare(engine, prompts, "flipped")
    load_s += await _load(engine, model_dir, precision, epoch=-3, flipped=False)
    restored = await _compare(engine, prompts, "restored")

    before_N, _ = await _read(engine, flipped.contexts, flipped.lasts)
    distance = float(np.abs(flipped.read_N - before_N).mean())
    rounds = {"other weights": flipped, "the checkpoint's weights again": restored}
    for loaded, found in rounds.items():
        allowed = max(ROUNDING[precision] * found.spread, FRESH_GAPS * fresh.gap)
        if not found.gap <= allowed:  # NaN is wrong too
            raise EngineError(
                f"after an update to {loaded}, log-probabilities of {len(found.lasts)} decoded tokens differ by "
                f"{found.gap:.3g} in the mean from those of the same tokens read as a prompt (allowed {allowed:.3g}, "
                f"{fresh.gap:.3g} before the update, {distance:.3g} between the two policies)"
            )
        if distance < SEPARABLE * allowed:
            raise EngineError(
                f"two policies cannot be told apart: their log-probabilities differ by {distance:.3g} in the mean, "
                f"and rounding alone may explain {allowed:.3g}"
            )
    gap = max(found.gap for found in rounds.values())
    return UpdateCheck(gap, allowed, distance, load_s, time.monotonic() - started_s)


async def _load(engine: Engine, model_dir: Path, precision: Precision, *, epoch: int, flipped: bool) -> float:
    """Update the engine from the folder; returns the seconds of the pause. `epoch`: one for each set of weights, so
    that nothing cached is reused."""
    source = CheckpointSource(folder=str(model_dir), dtype=precision, flipped=flipped)
    held = HeldWeights(epoch=epoch, version=CHECKPOINT_VERSION, source=source)
    return (await engine.update_weights(held, interruption="keep")).pause_s


async def _compare(engine: Engine, prompts: Sequence[list[int]], name: str) -> _Round:
    """Decode some tokens after each prompt, and read all but the last one of them."""
    requests = [
        GenerationRequest(f"update-check-{name}-{index}", prompt, NEW_TOKENS, seed=index)
        for index, prompt in enumerate(prompts)
    ]
    generations = await asyncio.gather(*(engine.generate(request) for request in requests))
    decoded = [
        ([*prompt, *generation.tokens[:-1].tolist()], int(generation.tokens[-1]), float(generation.logprobs[-1]))
        for prompt, generation in zip(prompts, generations, strict=True)
        if len(generation.tokens) > 1  # the first token comes from reading the prompt
    ]
    if not decoded:
        raise EngineError(f"no token was decoded: all {len(prompts)} completions ended at their first token")
    contexts, lasts, logprobs = map(list, zip(*decoded, strict=True))
    read_N, spread = await _read(engine, contexts, lasts)
    return _Round(contexts, lasts, float(np.abs(np.array(logprobs) - read_N).mean()), read_N, spread)


async def _read(engine: Engine, contexts: Sequence[list[int]], lasts: Sequence[int]) -> tuple[np.ndarray, float]:
    """Log-probabilities [N] of the last tokens, from reading what is before each, and the standard deviation of the
    logits. One after another, so that no context is cut to share a batch, and its rest small enough for a graph."""
    rows = []
    for context in contexts:
        row = await engine.vocabulary_logprobs(context)
        assert row is not None, "vLLM samples from a distribution"
        rows.append(row.astype(np.float64))
    spread = float(np.mean([row[np.isfinite(row)].std() for row in rows]))
    return np.array([row[last] for row, last in zip(rows, lasts, strict=True)]), spread
