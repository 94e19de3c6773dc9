"""Publishing low-rank adapters instead of whole weights: tensor names, merging, and a check of the frozen base.

    trainer: A, B per target --transport--> AdapterReader: base folder + A, B --> merged tensors --> any engine

The base weights are not transferred. Trainer and engine read them from the same Hugging Face folder, and `base_digest`,
published with the adapters, proves that the two folders are equal. The sum is computed on the CPU in float32 and
rounded once:

    W' = round(W + scale * B A)      W [out, in], A [r, in], B [out, r]

Tensor names are PEFT's: `base_model.model.` + module name + `.lora_A.weight` or `.lora_B.weight`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
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
"""Name of the published tensor that contains the base's digest, uint8 [8]."""


def adapter_names(name: str) -> tuple[str, str]:
    """Names of the adapters A and B of a Hugging Face weight.

    >>> adapter_names("model.layers.0.mlp.up_proj.weight")[0]
    'base_model.model.model.layers.0.mlp.up_proj.lora_A.weight'
    """
    module = PREFIX + name.removesuffix(".weight")
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def base_name(name: str) -> str | None:
    """Name of the Hugging Face weight that adapter `name` belongs to. None if `name` is not an adapter.

    >>> base_name("base_model.model.model.layers.0.mlp.up_proj.lora_B.weight")
    'model.layers.0.mlp.up_proj.weight'
    """
    module, _, part = name.removesuffix(".weight").rpartition(".")
    if part not in ("lora_A", "lora_B"):
        return None
    return f"{module.removeprefix(PREFIX)}.weight"


@torch.no_grad()
def add_adapter(base: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return base + scale * b a, computed in float32 and rounded to the dtype of `base` [out, in]."""
    return torch.addmm(base.float(), b.float(), a.float(), alpha=scale).to(base.dtype)


def merge_adapters(name: str, base: Tensor, adapters: Mapping[str, Tensor], scale: float) -> Tensor:
    """Return the Hugging Face weight `name`, merged with its adapters if `adapters` contains them."""
    name_a, name_b = adapter_names(name)
    if name_a not in adapters:
        return base
    return add_adapter(base, adapters[name_a], adapters[name_b], scale)


class WeightFiles:
    """The tensors in a folder's *.safetensors files by name. Files are memory-mapped and read on demand."""

    def __init__(self, folder: Path) -> None:
        """Open all files. Raises WeightsError if there are none or one is damaged."""
        self._files = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                file = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise WeightsError(
                    f"{path} ({path.stat().st_size} bytes) cannot be read as safetensors ({error}). Fetch it again: it "
                    "may be an interrupted download."
                ) from error
            for name in file.keys():  # noqa: SIM118  (not a dict: it cannot be iterated)
                self._files[name] = file
        if not self._files:
            raise WeightsError(
                f"{folder} has no *.safetensors, so there are no weights to load. Set model.path to a folder that has."
            )

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def shape(self, name: str) -> list[int]:
        """Shape of a tensor, without reading it."""
        return list(self._files[name].get_slice(name).get_shape())


@functools.cache
def base_digest(folder: Path) -> bytes:
    """xxh3_64 over the names and bytes of all tensors in the folder. Reads all of them, once per process."""
    digest = xxhash.xxh3_64()
    tensors = WeightFiles(folder)
    for name in sorted(tensors):  # sorted: the same digest however the tensors are spread over files
        digest.update(name.encode())
        digest.update(raw_bytes(tensors[name]))
    return digest.digest()


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a CPU tensor. Copies only if the tensor is not contiguous."""
    return memoryview(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())


def make_peft_config(lora: LoraConfig, base: str) -> Mapping[str, Any]:
    """Content of PEFT's adapter_config.json. `base` is the folder or hub id of the frozen model."""
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
    """Write an adapter folder that PEFT and vLLM can load. `config` is the result of `make_peft_config`."""
    with whole_folder(target) as draft:
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors},
            draft / "adapter_model.safetensors",
            metadata={"format": "pt"},
        )
        (draft / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


class AdapterReader:
    """`TensorReader` of the whole model: frozen weights, with adapters merged into every target when it is read."""

    def __init__(self, adapters: TensorReader, base: MergeBase) -> None:
        """Raises WeightsCorrupt if the adapters belong to another base, and WeightsError if the base cannot be read."""
        self._adapters = adapters
        self._specs = adapters.layout.by_name()
        self._folder = _open_base(Path(base.folder))
        self._dtype = getattr(torch, base.dtype)
        self._scale = base.scale
        self._check_base(Path(base.folder))

        self.targets = _target_names(self._specs)
        self.layout = make_layout((name, base.dtype, self._folder.shape(name)) for name in self._folder)
        missing = self.targets - set(self._folder)
        if missing:
            raise WeightsCorrupt(
                f"there are adapters for {min(missing)}, which {base.folder} does not have; nothing was applied. Give "
                "trainer and servers the same model.path."
            )

    def changed_since(self, base: WeightVersion) -> list[TensorSpec]:
        """Targets whose adapters differ from `base`, or all targets if that is unknown. Other tensors never change."""
        changed = self._adapters.changed_since(base)
        names = self.targets if changed is None else _target_names(spec.name for spec in changed)
        return [spec for spec in self.layout.tensors if spec.name in names]

    def read(self, spec: TensorSpec) -> memoryview:
        """Return the bytes of one tensor of the whole model."""
        tensor = self._folder[spec.name].to(self._dtype)
        if spec.name in self.targets:
            name_a, name_b = adapter_names(spec.name)
            tensor = add_adapter(tensor, self._read_adapter(name_a), self._read_adapter(name_b), self._scale)
        return raw_bytes(tensor)

    def read_adapters(self) -> dict[str, Tensor]:
        """Return copies of all adapters, by PEFT's names."""
        return {name: self._read_adapter(name) for name in self._specs if base_name(name) is not None}

    def __iter__(self) -> Iterator[tuple[TensorSpec, memoryview]]:
        for spec in self.layout.tensors:
            yield spec, self.read(spec)

    def verify(self) -> None:
        """Raise WeightsCorrupt if the adapters may have been overwritten since they were opened."""
        self._adapters.verify()

    def _read_adapter(self, name: str) -> Tensor:
        spec = self._specs[name]
        data = bytearray(self._adapters.read(spec))  # a copy: torch.frombuffer needs writable memory
        return torch.frombuffer(data, dtype=getattr(torch, spec.dtype)).view(spec.shape)

    def _check_base(self, folder: Path) -> None:
        spec = self._specs.get(DIGEST)
        if spec is None:
            raise WeightsCorrupt(
                "the trainer publishes whole weights, but this server expects adapters (model.lora); nothing was "
                "applied. Give both the same configuration."
            )
        trainer_digest = bytes(self._adapters.read(spec))
        own_digest = base_digest(folder)
        if trainer_digest != own_digest:
            raise WeightsCorrupt(
                f"the adapters were trained on weights with digest {trainer_digest.hex()}, but the weights in {folder} "
                f"have digest {own_digest.hex()}. Merging them would give another policy, so nothing was applied. Give "
                "trainer and servers the same files as model.path."
            )


def _target_names(tensor_names: Iterable[str]) -> set[str]:
    """Hugging Face names of the weights that these adapters belong to."""
    targets = set()
    for tensor_name in tensor_names:
        target = base_name(tensor_name)
        if target is not None:
            targets.add(target)
    return targets


@functools.cache
def _open_base(folder: Path) -> WeightFiles:
    """Open the folder once per process: every update merges into the same base."""
    return WeightFiles(folder)
