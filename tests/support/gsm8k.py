"""The published files of GSM8K, where this machine has them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

TRAIN = Path(
    os.environ.get("ASYNC_GRPO_GSM8K") or Path(__file__).parents[3] / "shared" / "data" / "gsm8k" / "train.jsonl"
)
TEST = TRAIN.with_name("test.jsonl")

needs_gsm8k = pytest.mark.skipif(
    not (TRAIN.exists() and TEST.exists()),
    reason=f"no GSM8K (train.jsonl, test.jsonl) in {TRAIN.parent}; set ASYNC_GRPO_GSM8K to its train.jsonl",
)


def answers(path: Path) -> list[str]:
    """The answers as they are published: reasoning, `#### `, the number."""
    return [json.loads(line)["answer"] for line in path.read_text().splitlines()]
