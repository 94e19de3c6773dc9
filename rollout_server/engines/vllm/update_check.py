"""Startup check of an engine with captured graphs: does decoding follow weight updates?

    checkpoint --> flipped weights --> checkpoint again       each loaded as an update is
        |               |                    |
     decode, read    decode, read         decode, read        the last token of some completions

A captured graph reads memory at the addresses of its capture. If a layer allocates new memory when its weights are
replaced, the graph keeps using the old weights. Only tokens that graphs decode are then wrong, and vLLM does not
notice. `reload.check_addresses` detects parameters that moved, but a layer may also multiply with tensors that are no
parameters. So we compare tokens as well: the log-probability that decoding reported with the one from reading the same
tokens as a prompt. vLLM reads a prompt without graphs if it is longer than the largest captured batch; ours are.

The flipped weights have the other sign in every second row of each tensor. Their magnitudes are the checkpoint's, so
rounding errors are similar. Their distribution is different, so a layer that keeps old weights is visible.
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

PROMPTS = 8
NEW_TOKENS = 4
SEPARABLE = 4.0
"""Minimum distance of the two policies, as a multiple of the allowed gap between decoding and reading."""
FRESH_GAPS = 4.0
"""Allowed gap as a multiple of the gap before any update, with one set of weights."""
ROUNDING: dict[Precision, float] = {"float32": 1e-3, "bfloat16": 0.03}
"""Gap that rounding explains, as a fraction of the standard deviation of the logits.

In random models of 8 to 64 layers, bfloat16 differs from float32 by 0.8% to 1.3%, also with flipped weights, so two
ways of rounding differ by up to 1.8%. A single matrix of the last layer that keeps old weights causes 4% to 26%.
float32 has 16 more bits, but sums in other orders, and matrix units may round its factors."""


@dataclass(frozen=True, slots=True)
class UpdateCheck:
    """Result of the check. Gaps and distances are in units of log-probability."""

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
class _Comparison:
    """Completions under one set of weights: decoded and read log-probabilities of N last tokens."""

    contexts: list[list[int]]
    """Prompt and all tokens before the last one."""
    last_tokens: list[int]
    gap: float
    """Mean difference of decoding and reading."""
    read_N: np.ndarray
    spread: float
    """Standard deviation of the logits."""


async def check_updates(
    engine: Engine, model_dir: Path, precision: Precision, *, vocabulary: int, prompt_tokens: int
) -> UpdateCheck:
    """Load two policies and compare decoded tokens. The engine has the checkpoint's weights afterwards.

    vocabulary: token ids are below it. prompt_tokens: more than the largest batch of a captured graph. Raises
    EngineError with the measured gaps if decoding does not follow, or if an update fails.
    """
    started_s = time.monotonic()
    prompts = np.random.default_rng(0).integers(vocabulary, size=(PROMPTS, prompt_tokens)).tolist()
    fresh = await _compare(engine, prompts, "fresh")
    load_s = await _load_policy(engine, model_dir, precision, epoch=-2, flipped=True)
    flipped = await _compare(engine, prompts, "flipped")
    load_s += await _load_policy(engine, model_dir, precision, epoch=-3, flipped=False)
    restored = await _compare(engine, prompts, "restored")

    # The engine has the checkpoint's weights again: read the tokens of the flipped policy with them.
    checkpoint_N, _ = await _read_logprobs(engine, flipped.contexts, flipped.last_tokens)
    distance = float(np.abs(flipped.read_N - checkpoint_N).mean())

    for weights, comparison in (("other weights", flipped), ("the checkpoint's weights again", restored)):
        allowed = max(ROUNDING[precision] * comparison.spread, FRESH_GAPS * fresh.gap)
        if not comparison.gap <= allowed:  # written so that NaN fails too
            raise EngineError(
                f"after an update to {weights}, log-probabilities of {len(comparison.last_tokens)} decoded tokens "
                f"differ on average by {comparison.gap:.3g} from those of the same tokens read as a prompt (allowed "
                f"{allowed:.3g}, {fresh.gap:.3g} before the update, {distance:.3g} between the two policies)"
            )
        if distance < SEPARABLE * allowed:
            raise EngineError(
                f"two policies cannot be told apart: their log-probabilities differ on average by {distance:.3g}, and "
                f"rounding alone may explain {allowed:.3g}"
            )

    gap = max(flipped.gap, restored.gap)
    return UpdateCheck(gap, allowed, distance, load_s, time.monotonic() - started_s)


async def _load_policy(engine: Engine, model_dir: Path, precision: Precision, *, epoch: int, flipped: bool) -> float:
    """Update the engine from the folder. Returns the seconds of the pause.

    epoch: unique per set of weights, so that the engine reuses no cached prefix.
    """
    source = CheckpointSource(folder=str(model_dir), dtype=precision, flipped=flipped)
    held = HeldWeights(epoch=epoch, version=CHECKPOINT_VERSION, source=source)
    return (await engine.update_weights(held, interruption="keep")).pause_s


async def _compare(engine: Engine, prompts: Sequence[list[int]], name: str) -> _Comparison:
    """Decode some tokens after each prompt, and read all but the last one of them."""
    requests = [
        GenerationRequest(f"update-check-{name}-{index}", prompt, NEW_TOKENS, seed=index)
        for index, prompt in enumerate(prompts)
    ]
    generations = await asyncio.gather(*(engine.generate(request) for request in requests))

    contexts: list[list[int]] = []
    last_tokens: list[int] = []
    decoded: list[float] = []
    for prompt, generation in zip(prompts, generations, strict=True):
        if len(generation.tokens) < 2:
            continue  # its only token comes from prefill
        contexts.append([*prompt, *generation.tokens[:-1].tolist()])
        last_tokens.append(int(generation.tokens[-1]))
        decoded.append(float(generation.logprobs[-1]))
    if not contexts:
        raise EngineError(f"no token was decoded: all {len(prompts)} completions ended at their first token")

    read_N, spread = await _read_logprobs(engine, contexts, last_tokens)
    gap = float(np.abs(np.array(decoded) - read_N).mean())
    return _Comparison(contexts, last_tokens, gap, read_N, spread)


async def _read_logprobs(
    engine: Engine, contexts: Sequence[list[int]], last_tokens: Sequence[int]
) -> tuple[np.ndarray, float]:
    """Return log-probabilities [N] of the last tokens from reading their contexts, and the logits' standard deviation.

    One context at a time. In a shared batch a context might be split, and its remainder be small enough for a graph.
    """
    rows = []
    for context in contexts:
        row = await engine.vocabulary_logprobs(context)
        assert row is not None, "vLLM samples from a distribution"
        rows.append(row.astype(np.float64))
    spread = float(np.mean([row[np.isfinite(row)].std() for row in rows]))
    return np.array([row[token] for row, token in zip(rows, last_tokens, strict=True)]), spread
