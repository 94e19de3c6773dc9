"""Load a converted checkpoint in one layout after another, and write each back as Hugging Face tensors.

    python -m tests.support.trainer_programs.load_converted SETTINGS CHECKPOINT LAYOUTS.json

LAYOUTS: {FILE: {keys of the trainer}, ...}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from async_grpo.config.trainer import TrainerConfig
from trainer.platform import Platform, select_platform


def main() -> None:
    platform = select_platform("cpu")
    platform.activate(TrainerConfig())
    from megatron.core import parallel_state

    from trainer.ranks.distributed import lay_out, start_ranks, stop_ranks

    layouts = {Path(out): TrainerConfig(**keys) for out, keys in json.loads(Path(sys.argv[3]).read_text()).items()}
    start_ranks(next(iter(layouts.values())), platform, 1, 60.0)
    for out, layout in layouts.items():
        parallel_state.destroy_model_parallel()
        lay_out(layout, 1)
        load(Path(sys.argv[1]), Path(sys.argv[2]), layout, out, platform)
    stop_ranks()


def load(settings: Path, checkpoint: Path, layout: TrainerConfig, out: Path, platform: Platform) -> None:
    import torch
    from megatron.core import dist_checkpointing
    from safetensors.torch import save_file

    from trainer.checkpoint.state import metadata
    from trainer.model.builder import build_model
    from trainer.model.hf_folder import read_config
    from trainer.model.hf_weights import export_hf_tensors
    from trainer.ranks.distributed import is_rank_zero

    hf = read_config(settings)
    model = build_model(hf, platform, torch.float32, layout)
    wanted = {"model": model.sharded_state_dict(metadata=metadata())}
    model.load_state_dict(dist_checkpointing.load(wanted, str(checkpoint))["model"])
    tensors = {name: tensor.clone() for name, tensor in export_hf_tensors(model, hf)}
    if is_rank_zero():
        save_file(tensors, out)


if __name__ == "__main__":
    main()
