"""The prompts and their reference answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from async_grpo.config.base import NonNegativeInt, PositiveInt, StrictModel
from async_grpo.config.model import ArithmeticTaskConfig, Hub

DataFormat = Literal["auto", "gsm8k", "deepscaler", "dapo", "alpaca", "generic"]
"""Choices of `async-grpo prepare --format`: FORMATS of data/prepare/formats.py, `auto` and `generic`."""


class DataConfig(StrictModel):
    """The prompts and their reference answers."""

    kind: Literal["arithmetic", "jsonl"] = "arithmetic"
    """`arithmetic`: generated additions. `jsonl`: the rows of `path`."""
    arithmetic: ArithmeticTaskConfig = ArithmeticTaskConfig()
    path: Path | None = None
    """A JSON-lines file, a folder that `async-grpo prepare` made, or the id of a data set on `hub`, such as
    `openai/gsm8k` or `openai/gsm8k@REVISION` (kind: jsonl)."""
    hub: Hub = "huggingface"
    """The hub of an id in `path`: `huggingface` or `modelscope`."""
    subset: str = ""
    """Subset of a data set on a hub: its folder or configuration, such as `main`. Empty: the known or the only one."""
    split: str = "train"
    """Split of a data set on a hub to train on. A split named `test` is held out if the data set is known to have
    one (docs/data.md)."""
    eval_path: Path | None = None
    """A JSON-lines file of held-out prompts; without it the last `eval.prompts` rows are held out. A prepared folder
    has its own."""
    prompt_field: str = "question"
    """Field of a row that holds the question."""
    answer_field: str = "answer"
    """Field of a row that holds the reference answer."""
    template: str = "{prompt}"
    """Text around the prompt; `{prompt}` is replaced. A prepared folder has its own."""
    max_prompt_tokens: PositiveInt = 512
    """Longer prompts of a JSON-lines file are dropped and counted; a prepared folder must have none."""
    shuffle: bool = True
    """Shuffle the training rows before every pass. false: keep the order of the file."""

    def problems(self) -> Iterator[str]:
        if self.kind == "jsonl" and self.path is None:
            yield "kind jsonl needs a file. Set data.path, for example -o data.path=train.jsonl"
        if "{prompt}" not in self.template:
            yield f"template {self.template!r} does not contain {{prompt}}. Add it where the prompt goes"


class PrepareConfig(StrictModel):
    """The options of `async-grpo prepare`, by their names."""

    files: Annotated[list[Path], Field(min_length=1)]
    out: Path
    model: Path
    """A checkpoint folder: the tokenizer in it makes the token ids."""
    format: DataFormat = "auto"
    prompt_field: str = ""
    answer_field: str = ""
    keep_fields: list[str] = []
    """Fields that become metadata of the task, which verifiers see."""
    template: str = "raw"
    """raw, qwen_r1, chat, or a Jinja file."""
    system: str = ""
    max_prompt_tokens: PositiveInt = 512
    held_out: NonNegativeInt = 256
    """Number of rows kept from training, for evaluation."""
    held_out_from: list[Path] = []
    """Files whose rows are held out instead."""
    keep_duplicates: bool = False
    shuffle: bool = True
    seed: NonNegativeInt = 1

    def problems(self) -> Iterator[str]:
        named = bool(self.prompt_field) + bool(self.answer_field)
        if named != (2 if self.format == "generic" else 0):
            yield (
                f"--format is {self.format}, --prompt-field {self.prompt_field!r} and --answer-field "
                f"{self.answer_field!r}. Give both fields with --format generic, and only then"
            )
        if not self.held_out and not self.held_out_from:
            yield "--held-out is 0 and there is no --held-out-from: nothing could be evaluated. Give one"
        if self.keep_duplicates and not self.held_out_from:
            yield (
                "--keep-duplicates would put one question on both sides of the split. Name the held-out rows "
                "with --held-out-from, or let duplicates go"
            )
