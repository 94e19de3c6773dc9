"""Rows, files and configurations for data tests; `tokenizers` has a tokenizer with one token per byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from async_grpo.config import RunConfig
from async_grpo.config.data import PrepareConfig
from async_grpo.data.prepare.formats import Rejections
from async_grpo.data.prepare.pipeline import prepare_dataset
from async_grpo.data.prepared_dataset import DatasetManifest
from async_grpo.data.tokenizer import Tokenizer
from tests.support.tokenizers import Bytes


def questions(count: int, start: int = 0) -> list[Any]:
    return [{"question": f"q{number}", "answer": f"so #### {number}"} for number in range(start, start + count)]


def written(path: Path, rows: list[Any]) -> Path:
    """Write a JSON-lines file; rows that are texts are written unchanged."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def prepared(
    folder: Path, rows: list[Any], tokenizer: Tokenizer | None = None, **changes: Any
) -> tuple[DatasetManifest, Rejections]:
    """Prepare `folder/out` from `folder/rows.jsonl`, with two held-out rows."""
    file = written(folder / "rows.jsonl", rows)
    options = {"files": [file], "out": folder / "out", "model": folder, "held_out": 2, **changes}
    return prepare_dataset(PrepareConfig.model_validate(options), tokenizer or Bytes(), lambda done: None)


def config_of(seed: int = 1, prompts: int = 2, longest: int = 1024, **data: Any) -> RunConfig:
    """Configuration with data from `path` (JSON lines or a prepared folder), else arithmetic."""
    return RunConfig.model_validate(
        {
            "name": "test",
            "seed": seed,
            "model": {"random": {}},
            "data": {"kind": "jsonl" if "path" in data else "arithmetic", **data},
            "sampling": {"max_tokens": 32},
            "rollout": {"vllm": {"max_model_len": longest}},
            "eval": {"prompts": prompts},
        }
    )
