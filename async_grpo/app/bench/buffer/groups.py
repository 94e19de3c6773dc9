"""Groups as large as real ones: 8 samples, about 276 KB, token ids and log-probabilities as raw bytes."""

from __future__ import annotations

import random

import msgspec
import numpy as np

from async_grpo.wire import Group, Sample, Task, Ticket, VersionSpan, logprobs_to_bytes, tokens_to_bytes

SAMPLES = 8
MEAN_TOKENS = 2610
"""A sample: 8 bytes a token in the arrays and about 5 of text; with headers, 276 KB a group."""
LENGTH_SPREAD = 0.5
"""Standard deviation of the logarithm of a completion's length."""
VOCABULARY = 151_936
PROMPT_TOKENS = 200
TEMPLATES = 16


def task(index: int) -> Task:
    """A prompt of 200 tokens."""
    rng = np.random.default_rng(index)
    ids = rng.integers(0, VOCABULARY, PROMPT_TOKENS)
    return Task(index=index, prompt=_text(rng, PROMPT_TOKENS), prompt_tokens=tokens_to_bytes(ids), answer=str(index))


def tiny_task(index: int) -> Task:
    """A prompt of one token."""
    return Task(index=index, prompt="?", prompt_tokens=tokens_to_bytes([index % VOCABULARY]), answer="!")


class GroupMaker:
    """Finished groups for tickets; the samples were made before, so that a loop spends its time on the buffer."""

    def __init__(self, seed: int = 0, *, templates: int = TEMPLATES) -> None:
        rng = np.random.default_rng(seed)
        self._pick = random.Random(seed)
        self._templates = [[_sample(rng) for _ in range(SAMPLES)] for _ in range(templates)]

    def group(self, ticket: Ticket, *, finished_s: float = 0.0) -> Group:
        """8 samples whose tokens are all of the ticket's version."""
        samples = [_of_version(sample, ticket.version) for sample in self._pick.choice(self._templates)]
        return _finished(ticket, samples, finished_s)


def tiny_group(ticket: Ticket) -> Group:
    """One sample of one token."""
    sample = Sample(tokens=tokens_to_bytes([1]), logprobs=logprobs_to_bytes([-0.5]), spans=[])
    return _finished(ticket, [_of_version(sample, ticket.version)], 0.0)


def _finished(ticket: Ticket, samples: list[Sample], finished_s: float) -> Group:
    return Group(
        seq=ticket.seq,
        attempt=ticket.attempt,
        task=ticket.task,
        samples=samples,
        server=ticket.holder,
        admitted_version=ticket.version,
        finished_s=finished_s,
    )


def _sample(rng: np.random.Generator) -> Sample:
    # The mean of a log-normal variable is exp(mu + sigma^2 / 2).
    mu = np.log(MEAN_TOKENS) - LENGTH_SPREAD**2 / 2
    length = max(1, round(float(rng.lognormal(mu, LENGTH_SPREAD))))
    return Sample(
        tokens=tokens_to_bytes(rng.integers(0, VOCABULARY, length)),
        logprobs=logprobs_to_bytes(-rng.exponential(0.5, length)),
        spans=[],
        text=_text(rng, length),
        rewards={"answer_tag": 1.0},
        reward=1.0,
    )


def _of_version(sample: Sample, version: int) -> Sample:
    return msgspec.structs.replace(sample, spans=[VersionSpan(version, 0, len(sample.token_ids()))])


def _text(rng: np.random.Generator, tokens: int) -> str:
    """Words of 1 to 7 letters, one a token."""
    letters = rng.integers(ord("a"), ord("z") + 1, (tokens, 7)).astype(np.uint8).tobytes().decode()
    sizes = rng.integers(1, 8, tokens)
    return " ".join(letters[7 * i : 7 * i + size] for i, size in enumerate(sizes))
