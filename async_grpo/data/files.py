"""A look at the data files of a run before anything starts."""

from __future__ import annotations

from pathlib import Path

from async_grpo.config.data import DataConfig
from async_grpo.data.prepared import read_manifest
from async_grpo.data.rows import kind_of
from async_grpo.errors import DataError


def file_problems(data: DataConfig) -> list[str]:
    """What is wrong with the paths of `data`, and how to mend it; empty if nothing is. Rows are looked at later."""
    problems = []
    for key, path in (("data.path", data.path), ("data.eval_path", data.eval_path)):
        if path is None:
            continue
        try:
            problem = _of_folder(path) if path.is_dir() and key == "data.path" else _of_file(path, key)
        except DataError as error:
            problem = str(error)
        if problem:
            problems.append(f"{key}: {problem}")
    return problems


def _of_folder(path: Path) -> str:
    """Raises DataError."""
    read_manifest(path)
    return ""


def _of_file(path: Path, key: str) -> str:
    """Raises DataError."""
    if not path.is_file():
        folder = ", or at a folder that `async-grpo prepare` has made" if key == "data.path" else ""
        return f"there is no file {path}. Point it at a JSON-lines file{folder}"
    kind = kind_of(path)
    if kind in ("json", "parquet"):
        what = "one JSON array" if kind == "json" else "a Parquet file"
        return (
            f"{path} is {what}, not JSON lines. Type: async-grpo prepare {path} --out FOLDER --model MODEL, and point "
            "data.path at the folder"
        )
    return "" if kind == "jsonl" else f"{path} is {kind}, not JSON lines. Unpack it, or name what it is a part of"
