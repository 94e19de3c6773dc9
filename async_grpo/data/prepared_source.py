"""Tasks from a prepared folder. Nothing is loaded or tokenized again; memory does not grow with the folder."""

from __future__ import annotations

from collections.abc import Mapping

from async_grpo.config import RunConfig
from async_grpo.config.data import DataConfig
from async_grpo.data.base import prompt_limit, prompt_limit_reason
from async_grpo.data.prepared_dataset import DatasetManifest, DatasetSplit, PreparedSet, open_prepared
from async_grpo.data.shuffle import ShuffledPasses
from async_grpo.data.tokenizer import Tokenizer, encode_one
from async_grpo.errors import DataError
from async_grpo.wire import Task, tokens_to_bytes

_PROBES = 8
"""Number of prompts tokenized again, to check that the model's tokenizer made their ids."""


class PreparedSource:
    """Training rows in reshuffled passes, each a pure function of the index, and the folder's own held-out rows.

    Raises DataError for a damaged folder, one of another tokenizer, prompts that leave no room for a whole completion,
    settings that `prepare` has decided already, and a folder without training or held-out rows.
    """

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        self._set = open_folder(config)
        _check_tokenizer(config.data, self._set, tokenizer)
        held_out = min(len(self._set.held_out), config.eval.prompts)
        self._held_out = [_task(self._set.held_out, i, i) for i in range(held_out)]
        self._passes = ShuffledPasses(len(self._set.train), seed=config.seed, shuffle=config.data.shuffle)

    @property
    def dropped(self) -> Mapping[str, int]:
        """Always empty: unusable rows were left out, and counted, when the folder was made."""
        return {}

    @property
    def training_rows(self) -> int:
        """Rows in one pass."""
        return len(self._set.train)

    def task(self, index: int) -> Task:
        """The task at this position of the stream."""
        return _task(self._set.train, self._passes.row(index), index)

    def held_out(self) -> list[Task]:
        """The tasks for evaluation."""
        return self._held_out


def open_folder(config: RunConfig) -> PreparedSet:
    """The folder `data.path`, after all checks that need no tokenizer. Raises DataError."""
    data = config.data
    assert data.path is not None
    _check_unused_settings(data)
    prepared = open_prepared(data.path)
    rows, held_out = len(prepared.train), len(prepared.held_out)
    if not rows or not held_out:
        raise DataError(f"{data.path} has {rows} training rows and {held_out} held-out rows. Prepare more data")
    _check_lengths(config, prepared.manifest)
    return prepared


def _task(split: DatasetSplit, row: int, index: int) -> Task:
    tokens, stored = split.row(row)
    return Task(
        index=index,
        prompt=stored.prompt,
        prompt_tokens=tokens,
        answer=stored.answer,
        metadata=stored.metadata,
    )


def _check_unused_settings(data: DataConfig) -> None:
    values = {key: getattr(data, key) for key in ("template", "eval_path")}
    given = [
        f"data.{key} ({value!r})" for key, value in values.items() if value != DataConfig.model_fields[key].default
    ]
    if given:
        raise DataError(
            f"{data.path} is a prepared folder: `async-grpo prepare` has chosen its template and its held-out rows, so "
            f"{' and '.join(given)} would do nothing. Leave it out (a template of the run's file is undone by "
            "-o \"data.template='{prompt}'\"), or prepare the data again with --template and --held-out-from"
        )


def _check_lengths(config: RunConfig, manifest: DatasetManifest) -> None:
    limit, longest = prompt_limit(config), manifest.longest_prompt_tokens
    if longest > limit:
        raise DataError(
            f"the longest prompt of {config.data.path} has {longest} tokens, but {limit} is the most: "
            f"{prompt_limit_reason(config)}. Prepare the data again with --max-prompt-tokens {limit}, or raise those"
        )


def _check_tokenizer(data: DataConfig, prepared: PreparedSet, tokenizer: Tokenizer) -> None:
    rows, special = len(prepared.train), prepared.manifest.special_tokens
    for row in range(0, rows, -(-rows // _PROBES)):
        tokens, stored = prepared.train.row(row)
        if not _matches(tokenizer, stored.prompt, tokens, special):
            raise DataError(
                f"{data.path} was prepared with another tokenizer than that of the run's model: the prompt "
                f"{stored.prompt[:60]!r} has other token ids there. Prepare the data again with --model set to the "
                "folder of the run's model. (A model that the run makes for itself, model.random, has a tokenizer of "
                "its own: give it a JSON-lines file)"
            )


def _matches(tokenizer: Tokenizer, prompt: str, tokens: bytes, special_tokens: bool) -> bool:
    try:
        return tokens_to_bytes(encode_one(tokenizer, prompt, special_tokens=special_tokens)) == tokens
    except Exception:  # a tokenizer that does not know the characters at all
        return False
