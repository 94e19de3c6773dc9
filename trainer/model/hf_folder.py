"""Hugging Face checkpoint folders: safetensors read one tensor at a time, and folders written atomically."""

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
"""Largest size of one safetensors file in bytes (a larger tensor has a file of its own)."""

_COPIED = (
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
    """The model's configuration. Raises DataError if there is none, or none that transformers reads."""
    if not (folder / "config.json").is_file():
        raise DataError(f"{folder} has no config.json, so it is not a Hugging Face checkpoint folder")
    try:
        return AutoConfig.from_pretrained(folder)
    except Exception as error:  # whatever transformers raises for a file that it cannot read
        raise DataError(
            f"{folder / 'config.json'} is not one that transformers reads ({error}). Fetch it again"
        ) from None


class SafetensorsFolder(Mapping[str, Tensor]):
    """The tensors of a folder by name. A tensor is read when it is asked for; `was_read` is called after each.

    Raises DataError if the folder has no safetensors files, or one that is not whole.
    """

    def __init__(self, folder: Path, was_read: Callable[[], None] = lambda: None) -> None:
        self._was_read = was_read
        self._files: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                with safe_open(path, framework="pt") as file:
                    self._files.update(dict.fromkeys(file.keys(), path))
            except SafetensorError as error:
                raise DataError(f"{path} is not a whole safetensors file ({error}). Fetch it again") from None
        if not self._files:
            raise DataError(f"{folder} holds no tensors in *.safetensors. Convert the weights to safetensors")

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        self._was_read()
        return tensor

    def kinds(self) -> set[str]:
        """The types of the tensors, as the format writes them (F32, BF16, ...); no tensor is read."""
        found: set[str] = set()
        for path in sorted(set(self._files.values())):
            with safe_open(path, framework="pt") as file:
                names = file.keys()
                found.update(file.get_slice(name).get_dtype() for name in names)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def write_folder(
    target: Path, source: Path, tensors: Iterable[tuple[str, Tensor]], *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write a folder that transformers and vLLM load: `tensors`, with configuration and tokenizer from `source`.

    Only the tensors of one file of `shard_bytes` are held at a time.
    """
    with whole_folder(target) as draft:
        copy_settings(source, draft)
        files: list[tuple[Path, list[str]]] = []
        dtype, total_bytes = "", 0
        for shard in _shards(tensors, shard_bytes):
            path = draft / f"shard-{len(files)}"
            save_file(shard, path, metadata={"format": "pt"})
            files.append((path, list(shard)))
            dtype = str(next(iter(shard.values())).dtype).removeprefix("torch.")
            total_bytes += sum(tensor.nbytes for tensor in shard.values())
        _name_shards(draft, files, total_bytes)
        _set_dtype(draft / "config.json", dtype)


def copy_settings(source: Path, target: Path) -> None:
    """Copy configuration and tokenizer: everything that is not a tensor."""
    for name in _COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _shards(tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if shard and sum(held.nbytes for held in shard.values()) + tensor.nbytes > shard_bytes:
            yield shard
            shard = {}
        shard[name] = tensor.contiguous()
    yield shard


def _name_shards(folder: Path, files: list[tuple[Path, list[str]]], total_bytes: int) -> None:
    """Name the files as transformers does; several need an index."""
    if len(files) == 1:
        files[0][0].rename(folder / "model.safetensors")
        return
    places = {}
    for number, (path, names) in enumerate(files, start=1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        path.rename(folder / file)
        places.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _set_dtype(path: Path, dtype: str) -> None:
    """State in config.json the precision of the weights that lie beside it."""
    config = json.loads(path.read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    path.write_text(json.dumps(config, indent=2) + "\n")
