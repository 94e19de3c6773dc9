"""Converts checkpoints between formats, in one process on the CPU.

    Hugging Face folder --(convert_to_megatron)--> Megatron distributed checkpoint, which ranks in any layout can load
    Megatron distributed checkpoint of this project or of a run --(convert_to_hugging_face)--> Hugging Face folder
    checkpoint of a run that trains adapters (model.lora) --(convert_to_hugging_face)--> PEFT folder, or merged weights

The weights are in memory once: tensors are read, and shards of a Hugging Face folder written, one after another. No bit
changes. A target is complete or absent.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_grpo.config.trainer import TrainerConfig
from async_grpo.errors import ConfigError
from async_grpo.utils.files import whole_folder
from trainer.platform import Platform, select_platform

if TYPE_CHECKING:
    import torch
    from megatron.core.models.gpt import GPTModel
    from transformers import PretrainedConfig

    from async_grpo.config.model import LoraConfig
    from trainer.model.lora import Adapters

Progress = Callable[[int, int], None]
"""Called with (tensors done, total tensors)."""

_PRECISIONS = {"F32": "float32", "BF16": "bfloat16"}
"""Data type in safetensors -> `model.precision`."""

_WRITTEN_TIMEOUT_S = 60.0
"""Seconds to wait for files that this process has written itself."""


def is_megatron(folder: Path) -> bool:
    """True for a Megatron distributed checkpoint; any other folder may be a Hugging Face one."""
    return (folder / ".metadata").is_file()


def convert_to_megatron(source: Path, target: Path, progress: Progress) -> None:
    """Convert a Hugging Face folder. Raises ConfigError for a model that cannot be built, DataError for bad files."""
    _check_free(target)
    with _single_rank() as platform:
        from trainer.model.checks import check_architecture
        from trainer.model.hf_folder import SafetensorsFolder, copy_settings, read_config
        from trainer.model.hf_weights import load_hf_tensors
        from trainer.model.weight_map import model_tensors

        hf = read_config(source)
        check_architecture(hf, TrainerConfig())
        count = sum(1 for _ in model_tensors(hf, 1))
        tensors = SafetensorsFolder(source, on_read=_make_counter(progress, count))
        model, dtype = _build(hf, platform, _tensor_precision(source, tensors.read_dtypes()))
        load_hf_tensors(model, hf, tensors)
        with whole_folder(target) as draft:
            copy_settings(source, draft)
            _write_checkpoint(draft, model, hf, dtype)
            # Check again: the conversion takes minutes, and renaming the draft would replace a folder made meanwhile.
            _check_free(target)


def convert_to_hugging_face(
    checkpoint: Path,
    settings: Path,
    target: Path,
    progress: Progress,
    *,
    lora: LoraConfig | None = None,
    merge: bool = False,
) -> None:
    """Convert a Megatron checkpoint; configuration and tokenizer come from `settings`, the folder of the first policy.

    With `lora` the checkpoint holds adapters of these weights: they become a PEFT folder, or are added to the weights
    (`merge`). Raises CheckpointError, before anything is written, if it is damaged or of another model than `settings`.
    """
    _check_free(target)
    with _single_rank() as platform:
        from async_grpo.weights.lora import make_peft_config, write_peft_folder
        from trainer.model.hf_folder import write_hf_folder
        from trainer.model.lora import export_merged, export_trained, stage_adapters
        from trainer.model.weight_map import model_tensors

        model, hf, adapters = _load_checkpoint(checkpoint, settings, platform, lora)
        if adapters is None or merge:
            total = sum(1 for _ in model_tensors(hf, 1))
            tensors = _count_tensors(export_merged(model, hf, adapters), progress, total)
            write_hf_folder(target, settings, tensors)
        else:
            total = sum(1 for _ in stage_adapters(hf, adapters.config, 0, 1))
            tensors = _count_tensors(export_trained(model, hf, adapters), progress, total)
            write_peft_folder(target, make_peft_config(adapters.config, str(settings)), tensors)


def _load_checkpoint(
    checkpoint: Path, settings: Path, platform: Platform, lora: LoraConfig | None
) -> tuple[GPTModel, PretrainedConfig, Adapters | None]:
    """Build the model and load the weights of a checkpoint; `settings` has the base weights of adapters."""
    from megatron.core import dist_checkpointing

    from trainer.checkpoint.manifest import check_matches_run, damaged_checkpoint, find_changed_files, read_manifest
    from trainer.checkpoint.state import metadata, model_traits
    from trainer.model.hf_folder import SafetensorsFolder, read_config
    from trainer.model.hf_weights import load_hf_tensors
    from trainer.model.lora import Adapters, attach_adapters, sharded_state

    manifest = read_manifest(checkpoint)
    hf = read_config(settings)
    model, dtype = _build(hf, platform, str(manifest.model["precision"]))
    adapters = Adapters.from_config(lora, settings)
    check_matches_run(checkpoint, manifest, version=manifest.version, model=model_traits(hf, dtype, adapters))
    damaged = find_changed_files(checkpoint, manifest, manifest.files)
    if damaged:
        raise damaged_checkpoint(checkpoint, f"{', '.join(damaged)} does not hold what was written")
    if adapters is not None:
        load_hf_tensors(model, hf, SafetensorsFolder(settings))
        attach_adapters(model, hf, adapters.config, seed=0)
    wanted = {"model": sharded_state(model, hf, adapters, metadata())}
    model.load_state_dict(dist_checkpointing.load(wanted, str(checkpoint))["model"], strict=adapters is None)
    return model, hf, adapters


def _check_free(target: Path) -> None:
    if target.exists():
        raise ConfigError(
            f"{target} exists already and would be overwritten. Choose another target, or remove that one first"
        )


@contextmanager
def _single_rank() -> Iterator[Platform]:
    """Run the block as the only rank, on the CPU. Megatron's global state makes this process useless afterwards."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    platform = select_platform("cpu")
    config = TrainerConfig(threads=os.cpu_count() or 1)
    platform.activate(config)
    from trainer.ranks.distributed import start_ranks, stop_ranks

    start_ranks(config, platform, seed=1, longest_wait_s=_WRITTEN_TIMEOUT_S)
    yield platform
    stop_ranks()


def _build(hf: PretrainedConfig, platform: Platform, precision: str) -> tuple[GPTModel, torch.dtype]:
    from trainer.model.builder import DTYPES, build_model

    dtype = DTYPES[precision]
    return build_model(hf, platform, dtype, TrainerConfig()), dtype


def _tensor_precision(source: Path, dtypes: set[str]) -> str:
    if len(dtypes) != 1 or not dtypes <= _PRECISIONS.keys():
        raise ConfigError(
            f"{source} holds tensors of type {' and '.join(sorted(dtypes))}; a Megatron checkpoint is all F32 or all "
            "BF16, and a conversion that changed the type would not keep the bits. Save the model in one of the two"
        )
    return _PRECISIONS[dtypes.pop()]


def _write_checkpoint(folder: Path, model: GPTModel, hf: PretrainedConfig, dtype: torch.dtype) -> None:
    """Write the checkpoint of a run at version 0, without an optimizer."""
    from trainer.checkpoint.manifest import CheckpointManifest, complete_folder
    from trainer.checkpoint.snapshot import RankSnapshot
    from trainer.checkpoint.state import current_layout, metadata, model_traits

    state = {"model": model.sharded_state_dict(metadata=metadata())}
    snapshot = RankSnapshot(state, folder, live=())  # nothing trains here, so the weights need not be copied
    part = snapshot.write()
    snapshot.finish([part])
    manifest = CheckpointManifest(version=0, epoch=0, model=model_traits(hf, dtype), layout=current_layout())
    complete_folder(folder, manifest, part.files)


def _make_counter(progress: Progress, total: int) -> Callable[[], None]:
    done = 0

    def count_tensor() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    return count_tensor


def _count_tensors(tensors: Iterator[tuple[str, Any]], progress: Progress, total: int) -> Iterator[tuple[str, Any]]:
    count_tensor = _make_counter(progress, total)
    for pair in tensors:
        yield pair
        count_tensor()
