"""Where prompts come from: an endless, deterministic stream of tasks, and held-out tasks for evaluation.

- `TaskSource`        the contract
- `JsonlSource`       rows of a JSON-lines file (`jsonl`)
- `PreparedSource`    rows of a folder that `async-grpo prepare` has made (`prepared_source`)
- `ArithmeticSource`  generated problems (`arithmetic_source`)
- `make_source`       the one that a configuration asks for

The stream is a pure function of (configuration, index), so that every server of a run sees the
same tasks and a restarted one goes on where it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, cast

from async_grpo.config import RunConfig
from async_grpo.errors import ConfigError
from async_grpo.wire import Task, tokens_to_bytes


class Tokenizer(Protocol):
    """What is needed of a Hugging Face tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Text -> token ids, with the special tokens that the model expects before a prompt."""
        ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Token ids -> text."""
        ...


class TaskSource(Protocol):
    """Guarantees: `task(i)` is deterministic and defined for every i >= 0; no held-out prompt is in it."""

    @property
    def dropped(self) -> Mapping[str, int]:
        """Rows that are not used, counted by reason; as text with the first of each."""
        ...

    def task(self, index: int) -> Task:
        """The task at this position of the stream."""
        ...

    def held_out(self) -> list[Task]:
        """The tasks for evaluation, always the same."""
        ...


def make_source(config: RunConfig, tokenizer: Tokenizer, *, kept: int | None = None) -> TaskSource:
    """The source that `data` describes. `kept`: for who holds out more than the run did, which kept the first so many
    prompts from training; further ones that it trains on are dropped. Raises DataError if it holds nothing that can
    be used."""
    if config.data.path is not None and config.data.kind == "jsonl":
        if config.data.path.is_dir():
            from async_grpo.data.prepared_source import PreparedSource

            return PreparedSource(config, tokenizer)
        from async_grpo.data.jsonl import JsonlSource

        return JsonlSource(config, tokenizer, kept=kept)
    from async_grpo.data.arithmetic_source import ArithmeticSource

    return ArithmeticSource(config, tokenizer)


def load_tokenizer(model: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face checkpoint folder: its tokenizer.json as it stands, if it has one. By the model's
    type alone transformers 5 would split text as that family's own tokenizer does, and drop what is not in the
    vocabulary without a word."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    kind = PreTrainedTokenizerFast if (model / "tokenizer.json").is_file() else AutoTokenizer
    return cast(Tokenizer, kind.from_pretrained(str(model)))


def find_tokenizer(model: Path, key: str) -> Tokenizer:
    """As `load_tokenizer`, of a folder that a user has named by `key`: nothing is fetched. Raises ConfigError."""
    if not (model / "tokenizer_config.json").is_file():
        raise ConfigError(
            f"{key}: {model} has no tokenizer_config.json, so it holds no tokenizer. Name the folder of a Hugging "
            "Face checkpoint"
        )
    try:
        return load_tokenizer(model)
    except Exception as error:  # whatever transformers raises for files that it cannot read
        raise ConfigError(f"{key}: the tokenizer in {model} cannot be loaded ({error}). Fetch it again") from error


def make_task(index: int, prompt: str, tokens: list[int], answer: str, metadata: dict[str, str] | None = None) -> Task:
    """A task record."""
    return Task(
        index=index,
        prompt=prompt,
        prompt_tokens=tokens_to_bytes(tokens),
        answer=answer,
        metadata=metadata or {},
    )


def prompt_limit(config: RunConfig) -> int:
    """The longest prompt that leaves room for a whole completion, in tokens."""
    room = config.rollout.vllm.max_model_len - config.sampling.max_tokens
    return min(config.data.max_prompt_tokens, room)
