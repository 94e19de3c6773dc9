"""The checkpoints of a run, found from its folder."""

from __future__ import annotations

from pathlib import Path

from async_grpo.config import RunConfig, load
from async_grpo.errors import ConfigError
from async_grpo.launch.run_folder import RunFolder


def find_checkpoint(run_dir: Path, version: int | None) -> tuple[RunConfig, Path]:
    """The configuration of a run and the folder of a checkpoint, the newest by default. Raises ConfigError."""
    folder = RunFolder(run_dir)
    if not folder.config_file.is_file():
        raise ConfigError(f"{run_dir} is not the folder of a run (it has no {folder.config_file.name}). Check the name")
    checkpoints = run_dir / "checkpoints"
    versions = sorted(int(path.name) for path in checkpoints.glob("*") if path.name.isdecimal())
    if not versions:
        raise ConfigError(
            f"{run_dir} has no checkpoint yet. The first one comes after trainer.checkpoint.every_steps steps, or when "
            "the run ends"
        )
    wanted = versions[-1] if version is None else version
    if wanted not in versions:
        raise ConfigError(
            f"{run_dir} has no checkpoint of version {wanted}, only of {', '.join(map(str, versions))}. Older ones are "
            "deleted; see trainer.checkpoint.keep and keep_best"
        )
    return load(folder.config_file), checkpoints / f"{wanted:08d}"
