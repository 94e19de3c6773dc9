"""Checks of the data: rejected rows, and prompts with too many tokens of the policy."""

from __future__ import annotations

from pathlib import Path

from async_grpo.config import RunConfig
from async_grpo.config.data import DataConfig
from async_grpo.data.jsonl import PromptLengths, check_rows, count_prompt_tokens
from async_grpo.data.prepare.formats import Rejections
from async_grpo.data.prepared_source import open_configured_folder
from async_grpo.data.tokenizer import find_tokenizer
from async_grpo.errors import ConfigError, DataError


def list_data_files(data: DataConfig) -> dict[str, Path]:
    """Return configuration key -> data file that the run reads."""
    if data.kind != "jsonl":
        return {}
    paths = {"data.path": data.path, "data.eval_path": data.eval_path}
    return {key: path for key, path in paths.items() if path is not None}


def find_rejected_rows(config: RunConfig) -> Rejections:
    """Return the rows that the run will reject. Raises DataError for data that cannot be used at all."""
    if config.data.kind != "jsonl" or config.data.path is None:
        return Rejections()
    if not config.data.path.is_dir():
        return check_rows(config)
    open_configured_folder(config).close()
    return Rejections()


def count_prompt_lengths(config: RunConfig, policy: Path) -> PromptLengths | None:
    """Return the lengths of the prompts in tokens of this policy; None for data other than JSON lines.

    Raises DataError if every prompt is too long.
    """
    path = config.data.path
    if config.data.kind != "jsonl" or path is None or not path.is_file():
        return None
    return count_prompt_tokens(config, find_tokenizer(policy, "model.path"))


def check_data(config: RunConfig) -> None:
    """Raise ConfigError for data that cannot be used at all."""
    try:
        find_rejected_rows(config)
    except DataError as error:
        raise ConfigError(str(error)) from None


def check_prompts(config: RunConfig, policy: Path) -> str:
    """Return a description of the prompt lengths. Raises ConfigError if every prompt is too long."""
    try:
        return str(count_prompt_lengths(config, policy) or "not counted: they are not JSON lines")
    except DataError as error:
        raise ConfigError(str(error)) from None
