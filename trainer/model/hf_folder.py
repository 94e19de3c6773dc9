"""Hugging Face checkpoint folders: safetensors read one tensor at a time, and written whole or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from async_grpo.errors import DataError

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
    """The model's configuration. Raises DataError if there is none."""
    if not (folder / "config.json").is_file():
        raise DataError(f"{folder} has no config.json, so it is not a Hugging Face checkpoint folder")
    return AutoConfig.from_pretrained(folder)


class SafetensorsFolder(Mapping[str, Tensor]):
    """The tensors of a folder by name; a tensor is read when it is asked for.

    Raises DataError if the folder has no safetensors files.
    """

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                self._files.update(dict.fromkeys(file.keys(), path))
        if not self._files:
            raise DataError(f"{folder} holds no tensors in *.safetensors. Convert the weights to safetensors")

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._files[name], framework="pt") as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def write_folder(target: Path, source: Path, tensors: Mapping[str, Tensor]) -> None:
    """A folder that transformers and vLLM load: `tensors`, with configuration and tokenizer from `source`."""
    draft = target.with_name(target.name + ".part")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    for name in _COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, draft / name)
    _set_dtype(draft / "config.json", tensors)
    save_file(dict(tensors), draft / "model.safetensors", metadata={"format": "pt"})
    shutil.rmtree(target, ignore_errors=True)
    draft.rename(target)


def _set_dtype(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """State in config.json the precision of the weights that lie beside it."""
    config = json.loads(path.read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2) + "\n")
