"""Startup proof that an engine's log-probabilities are of the distribution it samples from.

    engine --full vocabulary at temperature 1--> log p_1
    engine --generate at temperature T--> token, its log-probability     compared with (log_softmax(log p_1 / T))[token]

    log_softmax(log_softmax(z) / T) = log_softmax(z / T)      for logits z, because softmax ignores constants

The right side is computed here in float64, without the engine's own division by T. So a sampler that reports
log-probabilities of temperature 1 (vLLM's `raw_logprobs`), or logits, is detected. The comparison runs at the run's
temperature and at a second one, where the two distributions are far apart for this policy. The first token of a
completion comes from prefill, the second from decoding, so both paths through the engine are covered.

A sampler that ignores the temperature when it draws is detected from tokens drawn at a low temperature T. If they are
from p_T, the expectation of p_1 / p_T is 1, so by Markov's inequality p_1 / p_T exceeds e^a with probability at most
e^-a.

Under truncated sampling the reported tokens must be those that the settings keep, and the reported log-probability that
of the distribution restricted to them. Rounding may move a token across the edge of the set, so the set must contain
the one of slightly stricter settings, and be contained in the one of slightly looser settings. The proof runs without
the repetition penalty, which depends on raw logits that no engine reports, and without min_tokens; the trainer's
`logprob_gap` covers both.

A server runs the proof before it joins its run. The sampler's treatment of temperature does not depend on the weights,
so the proof is not repeated after updates; the trainer compares log-probabilities in every step (`logprob_gap`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from async_grpo.config.model import Precision
from async_grpo.errors import LogprobsWrong, WaitTimeout
from rollout_server.engines.base import Engine, GenerationRequest, Truncation

PROMPTS = 4
PROMPT_TOKENS = 8
NEW_TOKENS = 2
OTHER_TEMPERATURES = (2.0, 0.5, 0.1, 0.01)
"""Candidates for the second temperature. Temperature 2 makes a language model draw unlikely tokens. Their
log-probabilities differ from those of temperature 1 by several units, while rounding errors are halved."""
FAR_APART = 0.3
"""Mean difference of log p_T and log p_1 that suffices for the second temperature."""
MAX_GAP_SHARE = 0.25
"""Maximum mean gap at the second temperature, as a fraction of the distance from log p_1."""
MAX_GAP: dict[Precision, float] = {"float32": 0.01, "bfloat16": 0.25}
"""Maximum mean gap at the run's temperature T, because prefill and decoding round differently. Divided by T below 1,
which magnifies rounding."""
LOW_TEMPERATURE = 0.2
"""T of Markov's inequality."""
MAX_EVIDENCE = 12.0
"""a of Markov's inequality: a right engine fails once in e^12 = 160,000 starts."""
EDGE_MASS = 0.01
"""Distance from top_p, and relative distance from min_p, within which rounding may decide about a token."""

Floats = npt.NDArray[np.float64]

_CONSEQUENCE_AND_FIX = (
    "Training with it would weight every token wrongly. Install the releases of docs/platforms.md, and remove changes "
    "to the sampler in rollout.vllm.extra or a custom worker extension"
)


@dataclass(frozen=True, slots=True)
class LogprobProof:
    """Size of the comparison, and its largest |reported - recomputed| log-probability."""

    temperatures: tuple[float, float]
    tokens: int
    gap_max: float


@dataclass(frozen=True, slots=True)
class _Samples:
    """N sampled tokens with three log-probabilities each."""

    temperature: float
    tokens: list[int]
    reported_N: Floats
    """As reported by the engine."""
    expected_N: Floats
    """Recomputed at `temperature`."""
    raw_N: Floats
    """Recomputed at temperature 1."""

    @property
    def gap_N(self) -> Floats:
        return np.abs(self.reported_N - self.expected_N)

    @property
    def distance(self) -> float:
        """Mean distance of the distribution from that of temperature 1."""
        return float(np.abs(self.raw_N - self.expected_N).mean())


async def prove_logprobs(
    engine: Engine,
    *,
    vocabulary: int,
    temperature: float,
    precision: Precision,
    timeout_s: float,
    truncation: Truncation | None = None,
) -> LogprobProof | None:
    """Compare the log-probabilities of about 16 tokens. Returns None for a scripted engine, which has no distribution.

    vocabulary: token ids are below it. temperature, truncation: the run's. Raises LogprobsWrong, EngineError, or
    WaitTimeout after `timeout_s` seconds.
    """
    try:
        async with asyncio.timeout(timeout_s):
            proof = await _prove(engine, vocabulary, temperature, precision)
            if proof is not None and truncation is not None:
                await _prove_truncation(engine, vocabulary, temperature, precision, truncation)
            return proof
    except TimeoutError:
        raise WaitTimeout(
            f"{engine.description} to generate a few tokens for the proof of its log-probabilities",
            timeout_s,
            "Is its process alive? Raise launch.ready_timeout_s if it compiles for that long",
        ) from None


def _random_prompts(vocabulary: int) -> list[list[int]]:
    prompts: list[list[int]] = np.random.default_rng(0).integers(vocabulary, size=(PROMPTS, PROMPT_TOKENS)).tolist()
    return prompts


async def _prove(engine: Engine, vocabulary: int, temperature: float, precision: Precision) -> LogprobProof | None:
    prompts = _random_prompts(vocabulary)
    first_rows = [row for row in await _next_token_logprobs(engine, prompts) if row is not None]
    if len(first_rows) < PROMPTS:
        return None

    second_temperature = _choose_second_temperature(first_rows, temperature)
    at_run_temperature = await _sample(engine, prompts, first_rows, temperature)
    at_second_temperature = await _sample(engine, prompts, first_rows, second_temperature)
    for samples, max_gap in (
        (at_run_temperature, MAX_GAP[precision] * max(1.0, 1 / temperature)),
        (at_second_temperature, MAX_GAP_SHARE * at_second_temperature.distance),
    ):
        if not samples.gap_N.mean() <= max_gap:  # written so that NaN fails too
            raise LogprobsWrong(_describe_gap(engine, samples, max_gap))

    cold = await _sample(engine, prompts, first_rows, LOW_TEMPERATURE)
    evidence = float((cold.expected_N - cold.raw_N).sum())
    if not evidence >= -MAX_EVIDENCE:  # written so that NaN fails too
        raise LogprobsWrong(
            f"{engine.description} does not sample at the requested temperature: {len(cold.tokens)} tokens drawn at "
            f"{LOW_TEMPERATURE:g} are e^{-evidence:.0f} times as likely at temperature 1. {_CONSEQUENCE_AND_FIX}"
        )

    gap_max = max(float(at_run_temperature.gap_N.max()), float(at_second_temperature.gap_N.max()))
    tokens = len(at_run_temperature.tokens) + len(at_second_temperature.tokens)
    return LogprobProof((temperature, second_temperature), tokens, gap_max)


async def _next_token_logprobs(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[Floats | None]:
    """Return log p_1 [V] of the token after each prompt."""
    rows = await asyncio.gather(*(engine.vocabulary_logprobs(prompt) for prompt in prompts))
    return [None if row is None else row.astype(np.float64) for row in rows]


async def _prove_truncation(
    engine: Engine, vocabulary: int, temperature: float, precision: Precision, truncation: Truncation
) -> None:
    """Compare the kept tokens, and the log-probabilities over them, of completions at the run's settings."""
    truncation = replace(truncation, repetition_penalty=1.0, min_tokens=0)
    prompts = _random_prompts(vocabulary)
    requests = [
        GenerationRequest(f"truncation-{index}", prompt, NEW_TOKENS, temperature, seed=index, truncation=truncation)
        for index, prompt in enumerate(prompts)
    ]
    generations = await asyncio.gather(*(engine.generate(request) for request in requests))

    max_gap = MAX_GAP[precision] * max(1.0, 1 / temperature)
    for prompt, generation in zip(prompts, generations, strict=True):
        contexts = [[*prompt, *generation.tokens[:position].tolist()] for position in range(len(generation.tokens))]
        rows = await _next_token_logprobs(engine, contexts)
        for position, row in enumerate(rows):
            if generation.sampling_mask is None or row is None:
                raise LogprobsWrong(
                    f"{engine.description} truncates and reports no kept tokens. {_CONSEQUENCE_AND_FIX}"
                )
            kept = set(generation.sampling_mask.slice_rows(position, position + 1).token_ids.tolist())
            scaled = _log_softmax(row / temperature)
            _check_kept_tokens(engine, kept, scaled, truncation, max_gap)

            token = int(generation.tokens[position])
            if token not in kept:
                raise LogprobsWrong(
                    f"{engine.description} sampled token {token}, which is not among the {len(kept)} tokens that it "
                    f"reports as kept. {_CONSEQUENCE_AND_FIX}"
                )
            ids = sorted(kept)
            expected = scaled[token] - np.log(np.exp(scaled[ids]).sum())
            gap = abs(float(generation.logprobs[position]) - expected)
            if not gap <= max_gap:
                raise LogprobsWrong(
                    f"{engine.description} reports log-probability {generation.logprobs[position]:.5f} for token "
                    f"{token}, and over the {len(ids)} tokens that it kept it is {expected:.5f}. {_CONSEQUENCE_AND_FIX}"
                )


def _check_kept_tokens(engine: Engine, kept: set[int], scaled: Floats, truncation: Truncation, max_gap: float) -> None:
    """Raise LogprobsWrong unless the set is the one that the settings keep, up to rounding at its edge.

    scaled: log-probabilities [V] at the run's temperature, before truncation.
    """
    surely_kept = kept_tokens(scaled, truncation, slack=-max_gap)
    possibly_kept = kept_tokens(scaled, truncation, slack=max_gap)
    missing = surely_kept - kept
    excess = kept - possibly_kept
    # Tokens that tie at the edge may be left out. Those that are clearly inside must be there.
    if missing or excess:
        raise LogprobsWrong(
            f"{engine.description} reports {len(kept)} kept tokens of {truncation}. Recomputed from its own "
            f"log-probabilities, {sorted(missing)[:5]} are missing and {sorted(excess)[:5]} should not be there. "
            f"{_CONSEQUENCE_AND_FIX}"
        )


def kept_tokens(scaled: Floats, truncation: Truncation, *, slack: float = 0.0) -> set[int]:
    """The tokens that min_p, top_k and top_p keep, in vLLM's order.

    scaled: log-probabilities [V] after temperature. slack: nats by which a token may miss the edge (negative: must
    clear it); top_p and min_p are then also moved by EDGE_MASS. A strict set is empty if several tokens tie for the
    first place, because an engine may then keep any of them.
    """
    edge = 0.0 if slack == 0 else math.copysign(EDGE_MASS, slack)
    order = np.argsort(-scaled, kind="stable")
    logprobs = scaled[order]
    is_kept = np.ones(len(order), np.bool_)
    if truncation.min_p > 0:
        is_kept &= logprobs >= logprobs[0] + math.log(truncation.min_p * (1 - edge)) - slack
    k = min(truncation.top_k, len(order))
    is_kept &= logprobs >= logprobs[k - 1] - slack
    if not is_kept.any():
        return set()

    # Top-p keeps a token if the mass of the more likely ones is below top_p, within the tokens kept so far.
    probabilities = np.exp(logprobs) * is_kept
    probabilities /= probabilities.sum()
    mass_before = np.cumsum(probabilities) - probabilities
    is_kept &= mass_before < min(1.0 + 1e-9, truncation.top_p + edge)
    if slack >= 0:
        is_kept[0] = True  # vLLM always keeps the most likely token
    return set(order[is_kept].tolist())


async def _sample(
    engine: Engine, prompts: Sequence[list[int]], first_rows: Sequence[Floats], temperature: float
) -> _Samples:
    """Sample completions at `temperature` without truncation, and recompute the log-probabilities of their tokens.

    first_rows: log p_1 after each prompt.
    """
    requests = [
        GenerationRequest(f"proof-{temperature:g}-{index}", prompt, NEW_TOKENS, temperature, seed=index)
        for index, prompt in enumerate(prompts)
    ]
    generations = await asyncio.gather(*(engine.generate(request) for request in requests))

    # A completion may end at its first token. For the others, get log p_1 after that token.
    contexts = []
    for prompt, generation in zip(prompts, generations, strict=True):
        if len(generation.tokens) > 1:
            contexts.append([*prompt, int(generation.tokens[0])])
    second_rows = [row for row in await _next_token_logprobs(engine, contexts) if row is not None]

    # In the order of the rows: the first tokens of all completions, then the second tokens.
    rows = [*first_rows, *second_rows]
    tokens: list[int] = []
    reported: list[float] = []
    for position in range(NEW_TOKENS):
        for generation in generations:
            if position < len(generation.tokens):
                tokens.append(int(generation.tokens[position]))
                reported.append(generation.logprobs[position])

    return _Samples(
        temperature,
        tokens,
        reported_N=np.array(reported, np.float64),
        expected_N=np.array([_log_softmax(row / temperature)[token] for row, token in zip(rows, tokens, strict=True)]),
        raw_N=np.array([_log_softmax(row)[token] for row, token in zip(rows, tokens, strict=True)]),
    )


def _choose_second_temperature(rows: Sequence[Floats], temperature: float) -> float:
    """Return the first candidate whose distribution is FAR_APART from that of temperature 1, else the farthest one."""

    def distance(candidate: float) -> float:
        distances = []
        for row in rows:
            scaled = _log_softmax(row / candidate)
            distances.append((np.exp(scaled) * np.abs(scaled - _log_softmax(row))).sum())
        return float(np.mean(distances))

    candidates = [candidate for candidate in OTHER_TEMPERATURES if candidate != temperature]
    for candidate in candidates:
        if distance(candidate) >= FAR_APART:
            return candidate
    return max(candidates, key=distance)


def _log_softmax(row: Floats) -> Floats:
    shifted = row - row.max()
    return shifted - np.log(np.exp(shifted).sum())


def _describe_gap(engine: Engine, samples: _Samples, max_gap: float) -> str:
    worst = int(np.nan_to_num(samples.gap_N, nan=np.inf).argmax())
    message = (
        f"{engine.description} reports log-probabilities that are not of the distribution it samples from: at "
        f"temperature {samples.temperature:g} it reported {samples.reported_N[worst]:.5f} for token "
        f"{samples.tokens[worst]}, and log_softmax(logits / {samples.temperature:g}) is "
        f"{samples.expected_N[worst]:.5f}. Over {len(samples.tokens)} tokens the mean gap is "
        f"{samples.gap_N.mean():.3g}, allowed {max_gap:.3g}. "
    )
    if np.abs(samples.reported_N - samples.raw_N).mean() < MAX_GAP_SHARE * samples.distance:
        message += "They are those of temperature 1 (vLLM's raw_logprobs). "
    return message + _CONSEQUENCE_AND_FIX
