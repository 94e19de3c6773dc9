"""The data of a run, read before anything starts: all that its rollout servers would read, but for token ids."""

from __future__ import annotations

from pathlib import Path

from async_grpo.config import RunConfig
from async_grpo.config.data import DataConfig
from async_grpo.data.fields import Rejections
from async_grpo.data.jsonl import check_rows
from async_grpo.data.prepared_source import open_folder


def data_files(data: DataConfig) -> dict[str, Path]:
    """Those that the run reads, by key."""
    paths = {"data.path": data.path, "data.eval_path": data.eval_path} if data.kind == "jsonl" else {}
    return {key: path for key, path in paths.items() if path is not None}


def check_data(config: RunConfig) -> Rejections:
    """Rows that the run will not take. Raises DataError for data that it cannot be started with."""
    if config.data.kind != "jsonl" or config.data.path is None:
        return Rejections()
    if not config.data.path.is_dir():
        return check_rows(config)
    open_folder(config).close()
    return Rejections()
