"""Program that makes a run's random model, with a tokenizer trained on the prompts of its data.

python -m async_grpo.models.random_model --config RUN_CONFIG_JSON --out FOLDER --seed 1
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from async_grpo.config import RunConfig
from async_grpo.config.model import RandomModelConfig
from async_grpo.errors import DataError
from async_grpo.models.tiny.random_qwen2 import make_random_model

_MAX_TEXTS = 4000


def read_prompts(config: RunConfig) -> Iterator[str]:
    """Yield the prompts of the run's data, which needs no tokenizer. Raises DataError for a prepared folder."""
    if config.data.kind == "jsonl":
        from async_grpo.data.jsonl import usable_rows
        from async_grpo.data.prepare.formats import Rejections

        assert config.data.path is not None
        if config.data.path.is_dir():
            raise DataError(
                f"{config.data.path} is a prepared folder: its token ids belong to an existing tokenizer, and "
                "model.random would train another. Give model.path, or point data.path at a JSON-lines file"
            )
        return (row.prompt for row in usable_rows(config.data.path, config.data, Rejections()))
    from async_grpo.data.arithmetic import arithmetic_prompts

    return arithmetic_prompts(config)


def main() -> None:
    """Make the model of a run configuration (JSON)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, help="a RunConfig as JSON")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    config = RunConfig.model_validate_json(arguments.config)
    shape = config.model.random or RandomModelConfig()
    make_random_model(shape, islice(read_prompts(config), _MAX_TEXTS), arguments.out, arguments.seed)


if __name__ == "__main__":
    main()
