"""The prompts and their reference answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from async_grpo.config.base import NonNegativeInt, PositiveInt, StrictModel
from async_grpo.config.model import ArithmeticTaskConfig, Hub

DataFormat = Literal["auto", "gsm8k", "deepscaler", "dapo", "alpaca", "generic"]
"""Choices of `async-grpo prepare --format`: those of FORMATS in data/prepare/formats.py, plus `auto` and `generic`."""


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
    """Subset of a data set on a hub: its folder or configuration, such as `main`. Empty: the usual subset of a data set
    that docs/data.md lists, or else its only one."""
    split: str = "train"
    """Training split of a data set on a hub. Its split `test` is held out if docs/data.md lists the data set with
    one."""
    eval_path: Path | None = None
    """JSON-lines file of held-out prompts. None: hold out the last `eval.prompts` rows of `path`. Unused for a prepared
    folder, which contains its held-out rows."""
    prompt_field: str = "question"
    """Field of a row that contains the question."""
    answer_field: str = "answer"
    """Field of a row that contains the reference answer."""
    template: str = "{prompt}"
    """Prompt template; `{prompt}` is replaced by the question. Unused for a prepared folder, which has its own."""
    max_prompt_tokens: PositiveInt = 512
    """Maximum length of a prompt, in tokens. Longer prompts of a JSON-lines file are dropped and counted; in a prepared
    folder they are an error."""
    shuffle: bool = True
    """Shuffle the training rows before every pass. False: keep the order of the file."""

    def find_problems(self) -> Iterator[str]:
        if self.kind == "jsonl" and self.path is None:
            yield "kind jsonl needs a file. Set data.path, for example -o data.path=train.jsonl"
        if "{prompt}" not in self.template:
            yield (
                f"template {self.template!r} does not contain {{prompt}}, so every prompt would be the same. Add "
                "{prompt} where the question belongs"
            )


class PrepareConfig(StrictModel):
    """Options of `async-grpo prepare`; a field has the name of its option."""

    files: Annotated[list[Path], Field(min_length=1)]
    out: Path
    model: Path
    """Checkpoint folder whose tokenizer encodes the prompts."""
    format: DataFormat = "auto"
    prompt_field: str = ""
    answer_field: str = ""
    keep_fields: list[str] = []
    """Fields to pass to verifiers, as metadata of the task."""
    template: str = "raw"
    """raw, qwen_r1, chat, or the path of a Jinja file."""
    system: str = ""
    max_prompt_tokens: PositiveInt = 512
    held_out: NonNegativeInt = 256
    """Number of rows reserved for evaluation."""
    held_out_from: list[Path] = []
    """Files of held-out rows; if set, no rows of `files` are held out."""
    keep_duplicates: bool = False
    shuffle: bool = True
    seed: NonNegativeInt = 1

    def find_problems(self) -> Iterator[str]:
        fields = [field for field in (self.prompt_field, self.answer_field) if field]
        needed = 2 if self.format == "generic" else 0
        if len(fields) != needed:
            yield (
                f"--format is {self.format}, --prompt-field {self.prompt_field!r} and --answer-field "
                f"{self.answer_field!r}. Give both fields with --format generic, and only then"
            )
        if not self.held_out and not self.held_out_from:
            yield "--held-out is 0 and there is no --held-out-from: nothing could be evaluated. Give one of them"
        if self.keep_duplicates and not self.held_out_from:
            yield (
                "--keep-duplicates could put the same question into the training rows and the held-out rows. Name the "
                "held-out rows with --held-out-from, or leave --keep-duplicates out"
            )
