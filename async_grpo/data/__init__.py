from __future__ import annotations

from async_grpo.config.schema import RunConfig
from async_grpo.data.base import TaskSource
from async_grpo.data.tokenizer import Tokenizer


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
    from async_grpo.data.arithmetic import ArithmeticSource

    return ArithmeticSource(config, tokenizer)
