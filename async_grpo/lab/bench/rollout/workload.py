"""The requests of a round, drawn by seed: both contestants get the same ones in the same order.

The length of a completion is a function of its request's seed. So a server without any code of this bench generates
the same lengths as the loop that it is compared with.

The tokenizer of the benches has numbers as tokens: a prompt of N space-separated digits has exactly N tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from async_grpo.config.model import Precision, TinyQwen2Config
from async_grpo.data.base import make_task
from async_grpo.data.tokenizer import Tokenizer, load_tokenizer
from async_grpo.errors import EngineError
from async_grpo.models.tiny.qwen2 import build_tiny_qwen2
from async_grpo.utils.files import whole_folder
from async_grpo.wire import Task
from rollout_server.engines.base import GenerationRequest, Truncation, sample_seed

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM


class Lengths(Protocol):
    """Distribution of completion lengths."""

    @property
    def longest(self) -> int:
        """Maximum number of tokens."""
        ...

    def draw(self, seed: int) -> int:
        """Return the tokens (>= 1) of the completion of the request with this seed; always the same."""
        ...


@dataclass(frozen=True, slots=True)
class Uniform:
    """Uniform between `shortest` and `longest`, both included."""

    shortest: int
    longest: int

    def draw(self, seed: int) -> int:
        return int(np.random.default_rng(seed).integers(self.shortest, self.longest + 1))

    def __str__(self) -> str:
        return f"{self.shortest} to {self.longest} tokens"


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal with the given median; the logarithm has standard deviation `sigma`; truncated at `longest`."""

    median: int
    sigma: float
    longest: int

    def draw(self, seed: int) -> int:
        drawn = np.random.default_rng(seed).lognormal(math.log(self.median), self.sigma)
        return int(min(max(round(drawn), 1), self.longest))

    def __str__(self) -> str:
        return f"lognormal, median {self.median}, sigma {self.sigma:g}, at most {self.longest} tokens"


@dataclass(frozen=True, slots=True)
class RolloutWork:
    """`groups` prompts, each completed `group_size` times, `concurrency` completions at a time."""

    groups: int
    group_size: int
    groups_per_step: int
    """Groups per batch. Must divide `groups`."""
    concurrency: int
    lengths: Lengths
    prompt_tokens: int = 32
    seed: int = 1
    truncation: Truncation | None = None
    """Truncated sampling of the server's rounds. None: from the whole distribution."""

    @property
    def longest(self) -> int:
        """Tokens of the longest possible sequence, prompt included."""
        return self.prompt_tokens + self.lengths.longest

    def task(self, index: int, vocabulary: int) -> Task:
        """Return the prompt of a group: random tokens, so that none is in the prefix cache."""
        tokens = np.random.default_rng([self.seed, index]).integers(0, vocabulary, self.prompt_tokens).tolist()
        return make_task(index, f"bench {index}", tokens, str(index))

    def requests(self, vocabulary: int) -> list[GenerationRequest]:
        """Return all requests, group by group, with the seeds that a rollout server gives them."""
        requests = []
        for group, index, seed in self._seeds():
            prompt = self.task(group, vocabulary).prompt_ids().tolist()
            request = GenerationRequest(f"{group}-{index}", prompt, max_tokens=self.lengths.draw(seed), seed=seed)
            requests.append(request)
        return requests

    def lengths_by_seed(self) -> dict[int, int]:
        """Return the tokens of every completion by the seed of its request.

        Call it before a round, like `requests`, so that drawing takes no time of either contestant.
        """
        return {seed: self.lengths.draw(seed) for _, _, seed in self._seeds()}

    def check_lengths(self, tokens: list[int]) -> None:
        """Raise EngineError unless the completions, in request order, have exactly the drawn lengths.

        Less work would look like more speed.
        """
        drawn = list(self.lengths_by_seed().values())
        if tokens != drawn:
            wrong = sum(a != b for a, b in zip(tokens, drawn, strict=False)) + abs(len(tokens) - len(drawn))
            raise EngineError(
                f"{wrong} of {len(drawn)} completions do not have the length that was drawn for them "
                f"({sum(tokens)} tokens instead of {sum(drawn)}), so the result would compare different work. "
                "Check if the engine stopped early or the seeds of requests differ"
            )

    def _seeds(self) -> Iterator[tuple[int, int, int]]:
        """Yield (group, index, seed) of every request."""
        for group in range(self.groups):
            for index in range(self.group_size):
                yield group, index, sample_seed(self.seed, "train", group, index, 1)


@dataclass(frozen=True, slots=True)
class RolloutRound:
    """Tokens and times of one round."""

    tokens: list[int]
    """Tokens of every completion, in request order."""
    seconds: float
    cpu_s: float
    """CPU seconds of this process."""
    bytes_per_token: float = 0.0
    """Bytes of the groups' records per token; 0 for bare vLLM."""
    kept_per_token: float = 0.0
    """Mean number of tokens that truncated sampling kept."""

    @property
    def tokens_per_s(self) -> float:
        """Speed over the whole round, including the engine's filling up and running empty."""
        return sum(self.tokens) / self.seconds

    @property
    def cpu_us_per_token(self) -> float:
        """CPU time of this process, without the engine's processes."""
        return 1e6 * self.cpu_s / sum(self.tokens)


def number_words(model: Path, size: int) -> Tokenizer:
    """Write the tokenizer to the model's folder. Every id below `size` has a text, and none ends a completion.

    Larger numbers are read digit by digit if transformers applies the rules of the checkpoint's model family.

    >>> number_words(Path("model"), 32).encode("7 3 7")  # doctest: +SKIP
    [7, 3, 7]
    """
    from tokenizers import Tokenizer as Words
    from tokenizers import models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Words(models.WordLevel({str(number): number for number in range(size)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0").save_pretrained(model)
    return load_tokenizer(model)


def number_model(
    folder: Path, size: TinyQwen2Config, vocabulary: int, dtype: Precision = "float32"
) -> Qwen2ForCausalLM:
    """Write a random checkpoint without a stop token, and the tokenizer of the benches; return the model."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # the bench shows its own
    with whole_folder(folder, shared=True) as draft:
        tokenizer = number_words(draft, vocabulary)
        model = build_tiny_qwen2(size, tokenizer, vocab_size=vocabulary, seed=1).to(getattr(torch, dtype))
        model.save_pretrained(draft)
    return model
