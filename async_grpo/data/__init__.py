"""Where prompts come from. `make_source` picks the source that a configuration asks for.

- `base`              TaskSource, the contract; RejectedRow
- `arithmetic`        generated problems
- `jsonl`             rows of a JSON-lines file
- `prepared_source`   rows of a folder that `async-grpo prepare` has made; `prepared_dataset` is its format
- `shuffle`           the order of rows: seeded, every row once a pass
- `tokenizer`         texts to token ids, many at a time
- `prepare`           `async-grpo prepare`: published files to a prepared folder
"""

from __future__ import annotations

from async_grpo.config.schema import RunConfig
from async_grpo.data.base import TaskSource
from async_grpo.data.tokenizer import Tokenizer


def make_source(config: RunConfig, tokenizer: Tokenizer, *, kept: int | None = None) -> TaskSource:
    """The source that `config.data` describes.

    `kept` is for an evaluation with more held-out prompts than the run had: the run kept the first `kept` of them from
    training, and further ones that it trains on are dropped. Raises DataError if no row can be used.
    """
    if config.data.path is not None and config.data.kind == "jsonl":
        if config.data.path.is_dir():
            from async_grpo.data.prepared_source import PreparedSource

            return PreparedSource(config, tokenizer)
        from async_grpo.data.jsonl import JsonlSource

        return JsonlSource(config, tokenizer, kept=kept)
    from async_grpo.data.arithmetic import ArithmeticSource

    return ArithmeticSource(config, tokenizer)
