"""Tasks from a prepared folder. Nothing is tokenized again, and memory does not grow with the folder."""

from __future__ import annotations

from collections.abc import Mapping

from async_grpo.config import RunConfig
from async_grpo.config.data import DataConfig
from async_grpo.data.base import prompt_limit, prompt_limit_reason
from async_grpo.data.prepared_dataset import DatasetManifest, DatasetSplit, PreparedSet, open_prepared_folder
from async_grpo.data.shuffle import ShuffledPasses
from async_grpo.data.tokenizer import Tokenizer, encode_one
from async_grpo.errors import DataError
from async_grpo.wire import Task, tokens_to_bytes

_COMPARED_PROMPTS = 8
"""Number of prompts that are tokenized again, to check that the model's tokenizer made the stored ids."""


class PreparedSource:
    """Training rows in reshuffled passes, and the folder's own held-out rows.

    Raises DataError for a damaged folder, another tokenizer, prompts that are too long, settings that `prepare` has
    already fixed, and a folder without training or held-out rows.
    """

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        self._set = open_configured_folder(config)
        _check_tokenizer(config.data, self._set, tokenizer)
        held_out = min(len(self._set.held_out), config.eval.prompts)
        self._held_out = [_read_task(self._set.held_out, row=index, index=index) for index in range(held_out)]
        self._passes = ShuffledPasses(len(self._set.train), seed=config.seed, shuffle=config.data.shuffle)

    @property
    def dropped(self) -> Mapping[str, int]:
        """Always empty: `async-grpo prepare` has left out and counted unusable rows."""
        return {}

    @property
    def training_rows(self) -> int:
        """Number of rows in one pass."""
        return len(self._set.train)

    def task(self, index: int) -> Task:
        """Return the task at position `index` of the stream."""
        return _read_task(self._set.train, row=self._passes.row_at(index), index=index)

    def held_out(self) -> list[Task]:
        """Return the tasks for evaluation."""
        return self._held_out


def open_configured_folder(config: RunConfig) -> PreparedSet:
    """Open the folder `data.path`, with all checks that need no tokenizer. Raises DataError."""
    data = config.data
    assert data.path is not None
    _check_unused_settings(data)
    prepared = open_prepared_folder(data.path)
    rows = len(prepared.train)
    held_out = len(prepared.held_out)
    if not rows or not held_out:
        raise DataError(f"{data.path} has {rows} training rows and {held_out} held-out rows. Prepare more data")
    _check_lengths(config, prepared.manifest)
    return prepared


def _read_task(split: DatasetSplit, *, row: int, index: int) -> Task:
    """Return row `row` of the split as the task at position `index` of the stream."""
    tokens, stored = split.read_row(row)
    return Task(
        index=index,
        prompt=stored.prompt,
        prompt_tokens=tokens,
        answer=stored.answer,
        metadata=stored.metadata,
    )


def _check_unused_settings(data: DataConfig) -> None:
    unused = []
    for key in ("template", "eval_path"):
        value = getattr(data, key)
        if value != DataConfig.model_fields[key].default:
            unused.append(f"data.{key} ({value!r})")
    if unused:
        raise DataError(
            f"{data.path} is a prepared folder: `async-grpo prepare` has fixed its template and held-out rows, so "
            f"{' and '.join(unused)} would have no effect. Remove it (a template from the run's file is reset by "
            "-o \"data.template='{prompt}'\"), or prepare the data again with --template and --held-out-from"
        )


def _check_lengths(config: RunConfig, manifest: DatasetManifest) -> None:
    limit = prompt_limit(config)
    longest = manifest.longest_prompt_tokens
    if longest > limit:
        raise DataError(
            f"the longest prompt of {config.data.path} has {longest} tokens, but the limit is {limit}: "
            f"{prompt_limit_reason(config)}. Prepare the data again with --max-prompt-tokens {limit}, or raise those"
        )


def _check_tokenizer(data: DataConfig, prepared: PreparedSet, tokenizer: Tokenizer) -> None:
    rows = len(prepared.train)
    step = -(-rows // _COMPARED_PROMPTS)
    for row in range(0, rows, step):
        tokens, stored = prepared.train.read_row(row)
        if not _encodes_to(tokenizer, stored.prompt, tokens, prepared.manifest.special_tokens):
            raise DataError(
                f"{data.path} was prepared with another tokenizer than that of the run's model: the prompt "
                f"{stored.prompt[:60]!r} has other token ids there. Prepare the data again with --model set to the "
                "folder of the run's model. (A model that the run creates, model.random, has its own tokenizer: use a "
                "JSON-lines file)"
            )


def _encodes_to(tokenizer: Tokenizer, prompt: str, tokens: bytes, special_tokens: bool) -> bool:
    try:
        return tokens_to_bytes(encode_one(tokenizer, prompt, special_tokens=special_tokens)) == tokens
    except Exception:  # the tokenizer may lack the characters altogether
        return False
