"""Hugging Face checkpoint folders: reads safetensors one tensor at a time, and writes folders atomically."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from async_grpo.errors import DataError
from async_grpo.utils.files import whole_folder

SHARD_BYTES = 4 << 30
"""Maximum size of one safetensors file in bytes. A larger tensor gets its own file."""

_SETTINGS_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)


def read_config(folder: Path) -> PretrainedConfig:
    """Read the model's configuration. Raises DataError if it is missing or transformers cannot read it."""
    if not (folder / "config.json").is_file():
        raise DataError(f"{folder} has no config.json, so it is not a Hugging Face checkpoint folder")
    try:
        return AutoConfig.from_pretrained(folder)
    except Exception as error:  # transformers raises many kinds of errors for a file that it cannot read
        raise DataError(f"transformers cannot read {folder / 'config.json'} ({error}). Fetch it again") from None


class SafetensorsFolder(Mapping[str, Tensor]):
    """The tensors of a folder by name, each read on access. `on_read` is called after each access.

    Raises DataError if the folder has no safetensors files, or an incomplete one.
    """

    def __init__(self, folder: Path, on_read: Callable[[], None] = lambda: None) -> None:
        self._on_read = on_read
        self._files: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                with safe_open(path, framework="pt") as file:
                    self._files.update(dict.fromkeys(file.keys(), path))
            except SafetensorError as error:
                raise DataError(f"{path} is not a complete safetensors file ({error}). Fetch it again") from None
        if not self._files:
            raise DataError(f"{folder} has no tensors in *.safetensors. Convert the weights to safetensors")

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        self._on_read()
        return tensor

    def read_dtypes(self) -> set[str]:
        """Return the data types of all tensors in the format's notation (F32, BF16, ...). Reads no tensor."""
        dtypes: set[str] = set()
        for path in sorted(set(self._files.values())):
            with safe_open(path, framework="pt") as file:
                names = file.keys()
                dtypes.update(file.get_slice(name).get_dtype() for name in names)
        return dtypes

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def write_hf_folder(
    target: Path, source: Path, tensors: Iterable[tuple[str, Tensor]], *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write a folder for transformers and vLLM: `tensors`, with configuration and tokenizer from `source`.

    At most `shard_bytes` of tensors are in memory at a time.
    """
    with whole_folder(target) as draft:
        copy_settings(source, draft)
        files: list[tuple[Path, list[str]]] = []
        dtype = ""
        total_bytes = 0
        for shard in _group_by_size(tensors, shard_bytes):
            path = draft / f"shard-{len(files)}"
            save_file(shard, path, metadata={"format": "pt"})
            files.append((path, list(shard)))
            dtype = str(next(iter(shard.values())).dtype).removeprefix("torch.")
            total_bytes += sum(tensor.nbytes for tensor in shard.values())
        _name_shards(draft, files, total_bytes)
        _set_dtype(draft / "config.json", dtype)


def copy_settings(source: Path, target: Path) -> None:
    """Copy the configuration and tokenizer files that exist."""
    for name in _SETTINGS_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _group_by_size(tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if shard and sum(other.nbytes for other in shard.values()) + tensor.nbytes > shard_bytes:
            yield shard
            shard = {}
        shard[name] = tensor.contiguous()
    yield shard


def _name_shards(folder: Path, files: list[tuple[Path, list[str]]], total_bytes: int) -> None:
    """Name the files as transformers does. Several files need an index."""
    if len(files) == 1:
        files[0][0].rename(folder / "model.safetensors")
        return
    file_of_tensor = {}
    for number, (path, names) in enumerate(files, start=1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        path.rename(folder / file)
        file_of_tensor.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": file_of_tensor}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _set_dtype(path: Path, dtype: str) -> None:
    """Set the data type in config.json to that of the written weights."""
    config = json.loads(path.read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    path.write_text(json.dumps(config, indent=2) + "\n")
