"""The policy that a run begins with: this rank's part of a Hugging Face checkpoint."""

from __future__ import annotations

from pathlib import Path

from async_grpo.config import RunConfig
from trainer.model.build import DTYPES
from trainer.model.checks import check_architecture
from trainer.model.convert import load_hf
from trainer.model.hf_folder import SafetensorsFolder, read_config
from trainer.platform import Platform
from trainer.policy import Policy, build_policy


def load_policy(config: RunConfig, folder: Path, platform: Platform) -> Policy:
    """Build and fill it. Raises ConfigError for an unsupported architecture, DataError for bad files."""
    hf = read_config(folder)
    check_architecture(hf, config.trainer)
    dtype = DTYPES[config.model.precision]
    policy = build_policy(hf, platform, config.trainer, dtype, config.sampling.temperature)
    load_hf(policy.model, hf, SafetensorsFolder(folder))
    # The distributed optimizer made its fp32 master copies when it was built: bring them up to date.
    policy.optimizer.reload_model_params()
    return policy
