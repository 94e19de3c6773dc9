"""Low-rank adapters on their way to an engine: their names, their sum with the weights that the engine has, their base.

    trainer: A, B of every target --transport--> AdapterReader: base folder + A, B --> whole tensors --> any engine

The base never travels: trainer and engine read it from the same Hugging Face folder, and `base_digest`, which is
published beside the adapters, proves that it is the same. The sum is made on the CPU, in float32, and rounded once:

    W' = round(W + scale * B A)      W [out, in], A [r, in], B [out, r]

Names are those of PEFT's files, `base_model.model.` + the module's name + `.lora_A.weight` or `.lora_B.weight`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from async_grpo.config.model import LoraConfig
from async_grpo.errors import WeightsCorrupt, WeightsError
from async_grpo.utils.files import whole_folder
from async_grpo.weights.base import MergeBase, TensorReader
from async_grpo.weights.manifest import TensorSpec, WeightVersion, make_layout

PREFIX = "base_model.model."
DIGEST_BYTES = 8
DIGEST = "base_digest"
"""Name of the published tensor that identifies the base: uint8 [8]."""


def adapter_names(name: str) -> tuple[str, str]:
    """The names of A and B of a Hugging Face weight.

    >>> adapter_names("model.layers.0.mlp.up_proj.weight")[0]
    'base_model.model.model.layers.0.mlp.up_proj.lora_A.weight'
    """
    module = PREFIX + name.removesuffix(".weight")
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def base_name(name: str) -> str | None:
    """The Hugging Face weight that the adapter `name` belongs to; None for anything else.

    >>> base_name("base_model.model.model.layers.0.mlp.up_proj.lora_B.weight")
    'model.layers.0.mlp.up_proj.weight'
    """
    module, _, part = name.removesuffix(".weight").rpartition(".")
    return f"{module.removeprefix(PREFIX)}.weight" if part in ("lora_A", "lora_B") else None


@torch.no_grad()
def add_adapter(base: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """base + scale * b a, computed in float32 and rounded to the dtype of `base` [out, in]."""
    return torch.addmm(base.float(), b.float(), a.float(), alpha=scale).to(base.dtype)


def merge_adapters(name: str, base: Tensor, adapters: Mapping[str, Tensor], scale: float) -> Tensor:
    """The Hugging Face weight `name` with its adapters, if it has any among `adapters`."""
    name_a, name_b = adapter_names(name)
    return add_adapter(base, adapters[name_a], adapters[name_b], scale) if name_a in adapters else base


class SafetensorsFolder:
    """The tensors of a Hugging Face folder, mapped: one is read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        """Raises WeightsError if the folder has no safetensors."""
        self._files = {}
        for path in sorted(folder.glob("*.safetensors")):
            file = safe_open(path, framework="pt")
            self._files.update(dict.fromkeys(file.keys(), file))
        if not self._files:
            raise WeightsError(f"{folder} has no *.safetensors, so there is nothing to add adapters to.")

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def shape(self, name: str) -> list[int]:
        """The shape of a tensor, which is not read."""
        return list(self._files[name].get_slice(name).get_shape())


@functools.cache
def base_digest(folder: Path) -> bytes:
    """xxh3_64 of names and bytes of all tensors of the folder: 8 bytes. Reads all of it, once in a process."""
    digest, tensors = xxhash.xxh3_64(), SafetensorsFolder(folder)
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(raw_bytes(tensors[name]))
    return digest.digest()


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor on the CPU, copied only if they are not contiguous."""
    return memoryview(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())


def make_peft_config(lora: LoraConfig, base: str) -> Mapping[str, Any]:
    """What PEFT's adapter_config.json says of these adapters; `base`: folder or id of the frozen model."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.peft_alpha,
        "use_rslora": lora.rslora,
        "target_modules": list(lora.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


def write_peft_folder(target: Path, config: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write a folder that PEFT and vLLM load; `config` is that of PEFT."""
    with whole_folder(target) as draft:
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors},
            draft / "adapter_model.safetensors",
            metadata={"format": "pt"},
        )
        (draft / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


class AdapterReader:
    """A version of the adapters as a `TensorReader` of the whole model: every target is summed when it is read."""

    def __init__(self, adapters: TensorReader, base: MergeBase) -> None:
        """Raises WeightsCorrupt if the adapters were trained on another base, or do not fit it, and WeightsError if
        there is none."""
        self._adapters = adapters
        self._specs = adapters.layout.by_name()
        self._folder = _opened(Path(base.folder))
        self._dtype, self._scale = getattr(torch, base.dtype), base.scale
        self._check_base(Path(base.folder))
        self.targets = {found for name in self._specs if (found := base_name(name)) is not None}
        self.layout = make_layout((name, base.dtype, self._folder.shape(name)) for name in self._folder)
        if missing := self.targets - set(self._folder):
            raise WeightsCorrupt(f"the adapters are for {min(missing)}, which {base.folder} does not have.")

    def changed_since(self, base: WeightVersion) -> list[TensorSpec]:
        """The targets whose adapters differ from those of `base`, all targets if that is not known: the rest never
        changes."""
        changed, names = self._adapters.changed_since(base), self.targets
        if changed is not None:
            names = {found for spec in changed if (found := base_name(spec.name)) is not None}
        return [spec for spec in self.layout.tensors if spec.name in names]

    def read(self, spec: TensorSpec) -> memoryview:
        """The bytes of a tensor of the whole model."""
        tensor = self._folder[spec.name].to(self._dtype)
        if spec.name in self.targets:
            a, b = (self._adapter(name) for name in adapter_names(spec.name))
            tensor = add_adapter(tensor, a, b, self._scale)
        return raw_bytes(tensor)

    def adapters(self) -> dict[str, Tensor]:
        """Copies of A and B of every target, by PEFT's names."""
        return {name: self._adapter(name) for name in self._specs if base_name(name) is not None}

    def __iter__(self) -> Iterator[tuple[TensorSpec, memoryview]]:
        for spec in self.layout.tensors:
            yield spec, self.read(spec)

    def verify(self) -> None:
        """Raise WeightsCorrupt if adapters that were read may have been overwritten."""
        self._adapters.verify()

    def _adapter(self, name: str) -> Tensor:
        spec = self._specs[name]
        data = bytearray(self._adapters.read(spec))
        return torch.frombuffer(data, dtype=getattr(torch, spec.dtype)).view(spec.shape)

    def _check_base(self, folder: Path) -> None:
        spec = self._specs.get(DIGEST)
        if spec is None:
            raise WeightsCorrupt(
                "the trainer publishes whole weights, and this server expects adapters (model.lora). Give both the "
                "same configuration; nothing was applied."
            )
        theirs, ours = bytes(self._adapters.read(spec)), base_digest(folder)
        if theirs != ours:
            raise WeightsCorrupt(
                f"the adapters were trained on weights with digest {theirs.hex()}, and those in {folder} have "
                f"{ours.hex()}: the sum would be another policy. Give trainer and servers the same files as "
                "model.path; nothing was applied."
            )


@functools.cache
def _opened(folder: Path) -> SafetensorsFolder:
    return SafetensorsFolder(folder)
