"""A proof, before a server joins its run, that an engine's log-probabilities are of the distribution it samples from.

    engine --whole vocabulary at temperature 1--> log p_1
    engine --generate at temperature T--> token, its log-probability     compared with (log_softmax(log p_1 / T))[token]

    log_softmax(log_softmax(z) / T) = log_softmax(z / T)      for logits z, because softmax ignores constants

The right side is made here in float64 and never by the engine's own division by T, so a sampler that reports
log-probabilities of temperature 1 (vLLM's `raw_logprobs`), or logits, is found. The proof is made at the run's
temperature and at a second one, at which the two distributions lie far apart for this policy. The first token of a
completion comes from reading the prompt, the second from decoding, so that both ways through the engine are covered.

A sampler that ignores the temperature when it draws is found by tokens drawn at a low one: by Markov's inequality, if
they are from p_T, the sum of their log p_T - log p_1 is below -a with a probability of at most e^-a.

What the sampler does with a temperature does not depend on the weights, so the proof is not repeated after an update;
the trainer compares log-probabilities in every step (`logprob_gap`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from async_grpo.config.model import Precision
from async_grpo.errors import LogprobsWrong, WaitTimeout
from rollout_server.engines.base import Engine, GenerationRequest

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 4, 8, 2
OTHER_TEMPERATURES = (2.0, 0.5, 0.1, 0.01)
"""Candidates for the second temperature. Of a language model 2 draws unlikely tokens, whose log-probabilities differ by
several units from those of temperature 1, while rounding counts half."""
FAR_APART = 0.3
"""Mean difference of log p_T and log p_1 that is enough for the second temperature."""
SHARE = 0.25
"""Most that the gap may be at the second temperature, as a share of the distance from log p_1."""
MOST_GAP: dict[Precision, float] = {"float32": 0.01, "bfloat16": 0.25}
"""Most that the mean gap may be at the run's temperature T >= 1: reading and decoding round differently."""
LOW_TEMPERATURE, MOST_EVIDENCE = 0.2, 12.0
"""T and a of Markov's inequality."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LogprobProof:
    """What was compared, and the largest |reported - recomputed| log-probability."""

    temperatures: tuple[float, float]
    tokens: int
    gap_max: float


@dataclass(frozen=True, slots=True)
class _Samples:
    """N sampled tokens, and their log-probabilities: reported, recomputed at the temperature, at temperature 1."""

    temperature: float
    tokens: list[int]
    reported_N: Floats
    expected_N: Floats
    raw_N: Floats

    @property
    def gap_N(self) -> Floats:
        return np.abs(self.reported_N - self.expected_N)

    @property
    def distance(self) -> float:
        return float(np.abs(self.raw_N - self.expected_N).mean())


async def prove_logprobs(
    engine: Engine, *, vocabulary: int, temperature: float, precision: Precision, timeout_s: float
) -> LogprobProof | None:
    """Compare the log-probabilities of some 16 tokens. Returns None if the engine has no distribution to sample from.

    `vocabulary`: token ids are below it; `temperature`: the run's. Raises LogprobsWrong, EngineError, and WaitTimeout
    after `timeout_s` seconds.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _prove(engine, vocabulary, temperature, precision)
    except TimeoutError:
        raise WaitTimeout(
            f"{engine.description} to generate a few tokens for the proof of its log-probabilities",
            timeout_s,
            "Is its process alive? Raise launch.ready_timeout_s if it compiles for that long",
        ) from None


async def _prove(engine: Engine, vocabulary: int, temperature: float, precision: Precision) -> LogprobProof | None:
    drawn = np.random.default_rng(0).integers(vocabulary, size=(PROMPTS, PROMPT_TOKENS))
    prompts: list[list[int]] = drawn.tolist()
    first = [row for row in await _after(engine, prompts) if row is not None]
    if len(first) < PROMPTS:
        return None
    other = _other_temperature(first, temperature)
    usual, hard = [await _sample(engine, prompts, first, value) for value in (temperature, other)]
    for samples, most in (
        (usual, MOST_GAP[precision] * max(1.0, 1 / temperature)),
        (hard, SHARE * hard.distance),
    ):
        if not samples.gap_N.mean() <= most:  # NaN is wrong too
            raise LogprobsWrong(_difference(engine, samples, most))
    low = await _sample(engine, prompts, first, LOW_TEMPERATURE)
    if (evidence := float((low.expected_N - low.raw_N).sum())) < -MOST_EVIDENCE:
        raise LogprobsWrong(
            f"{engine.description} does not sample at the temperature that it is asked for: {len(low.tokens)} tokens "
            f"drawn at {LOW_TEMPERATURE:g} are e^{-evidence:.0f} times as likely at temperature 1. {_MEND}"
        )
    gap_max = max(float(samples.gap_N.max()) for samples in (usual, hard))
    return LogprobProof((temperature, other), len(usual.tokens) + len(hard.tokens), gap_max)


async def _after(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[Floats | None]:
    """log p_1 [V] of the token after each prompt."""
    found = await asyncio.gather(*(engine.vocabulary_logprobs(prompt) for prompt in prompts))
    return [None if row is None else row.astype(np.float64) for row in found]


async def _sample(
    engine: Engine, prompts: Sequence[list[int]], first: Sequence[Floats], temperature: float
) -> _Samples:
    """Sample completions as for training, then ask for the vocabulary after each of their tokens but the last."""
    requests = [
        GenerationRequest(f"proof-{temperature:g}-{place}", prompt, NEW_TOKENS, temperature, seed=place)
        for place, prompt in enumerate(prompts)
    ]
    made = await asyncio.gather(*(engine.generate(request) for request in requests))
    longer = [[*prompt, int(one.tokens[0])] for prompt, one in zip(prompts, made, strict=True) if len(one.tokens) > 1]
    rows = [*first, *(row for row in await _after(engine, longer) if row is not None)]
    order = [(one, place) for place in range(NEW_TOKENS) for one in made if place < len(one.tokens)]
    tokens = [int(one.tokens[place]) for one, place in order]
    return _Samples(
        temperature,
        tokens,
        np.array([one.logprobs[place] for one, place in order], np.float64),
        np.array([_log_softmax(row / temperature)[token] for row, token in zip(rows, tokens, strict=True)]),
        np.array([_log_softmax(row)[token] for row, token in zip(rows, tokens, strict=True)]),
    )


def _other_temperature(rows: Sequence[Floats], temperature: float) -> float:
    """The first temperature at which tokens' log-probabilities are FAR_APART from those of temperature 1; if there is
    none, the one with the largest distance."""

    def distance(value: float) -> float:
        pairs = [(_log_softmax(row / value), _log_softmax(row)) for row in rows]
        return float(np.mean([(np.exp(at) * np.abs(at - raw)).sum() for at, raw in pairs]))

    candidates = [value for value in OTHER_TEMPERATURES if value != temperature]
    return next((value for value in candidates if distance(value) >= FAR_APART), max(candidates, key=distance))


def _log_softmax(row: Floats) -> Floats:
    shifted = row - row.max()
    return shifted - np.log(np.exp(shifted).sum())


_MEND = (
    "Training with it would weight every token wrongly. Install the releases of docs/platforms.md, and remove what "
    "rollout.vllm.extra or an own worker extension does to the sampler"
)


def _difference(engine: Engine, samples: _Samples, most: float) -> str:
    worst = int(np.nan_to_num(samples.gap_N, nan=np.inf).argmax())
    raw = np.abs(samples.reported_N - samples.raw_N).mean() < SHARE * samples.distance
    return (
        f"{engine.description} reports log-probabilities that are not of the distribution it samples from: at "
        f"temperature {samples.temperature:g} token {samples.tokens[worst]} got {samples.reported_N[worst]:.5f}, and "
        f"log_softmax(logits / {samples.temperature:g}) is {samples.expected_N[worst]:.5f}; over {len(samples.tokens)} "
        f"tokens the mean gap is {samples.gap_N.mean():.3g}, allowed {most:.3g}."
        + (" They are those of temperature 1 (vLLM's raw_logprobs). " if raw else " ")
        + _MEND
    )
