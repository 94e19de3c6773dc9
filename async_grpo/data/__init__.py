"""Sources of prompts. `make_source` creates the one that the configuration selects.

- `base`              TaskSource, the interface; RejectedRow
- `arithmetic`        generated problems
- `jsonl`             rows of a JSON-lines file
- `prepared_source`   rows of a folder made by `async-grpo prepare`; `prepared_dataset` is its format
- `shuffle`           the order of rows: seeded, every row once per pass
- `tokenizer`         texts to token ids, in batches
- `prepare`           `async-grpo prepare`: published files to a prepared folder
"""

from __future__ import annotations

from async_grpo.config.schema import RunConfig
from async_grpo.data.base import TaskSource
from async_grpo.data.tokenizer import Tokenizer


def make_source(config: RunConfig, tokenizer: Tokenizer, *, held_out_by_run: int | None = None) -> TaskSource:
    """Create the source that `config.data` describes. Raises DataError if no row can be used.

    held_out_by_run: number of held-out prompts of the run, for an evaluation that uses more. The run did not train on
    these; further held-out prompts that it does train on are dropped.
    """
    if config.data.path is not None and config.data.kind == "jsonl":
        if config.data.path.is_dir():
            from async_grpo.data.prepared_source import PreparedSource

            return PreparedSource(config, tokenizer)
        from async_grpo.data.jsonl import JsonlSource

        return JsonlSource(config, tokenizer, held_out_by_run=held_out_by_run)
    from async_grpo.data.arithmetic import ArithmeticSource

    return ArithmeticSource(config, tokenizer)
