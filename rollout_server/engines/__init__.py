"""Inference engines behind one seam (`base`): vLLM, the servers of a live run over HTTP, and a scripted one.

The engine's own processes pass through this module, so it imports nothing before `make_engine` is called.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from async_grpo.config import RunConfig
    from async_grpo.utils.requirements import Check
    from rollout_server.engines.base import Engine


def make_engine(config: RunConfig, model: Path, *, name: str) -> Engine:
    """The engine that `rollout.engine` names, with the weights of a Hugging Face folder. The server's `name` seeds it.

    Its module, and its framework, are imported here and nowhere else. Raises ConfigError, DependencyError.
    """
    match config.rollout.engine:
        case "vllm":
            from rollout_server.engines.base import sample_seed
            from rollout_server.engines.vllm.engine import VllmEngine

            seed = sample_seed(config.seed, name) % 2**31
            return VllmEngine(
                model,
                config.rollout,
                precision=config.model.precision,
                seed=seed,
                name=name,
                sleeps=config.launch.share_devices == "sleep",
                lora=config.model.lora,
            )


def import_engine(config: RunConfig) -> None:
    """Import the framework of the engine, in a process that has no thread yet; engines may need that to start fast."""
    if config.rollout.engine == "vllm":
        from rollout_server.engines.vllm.fork_server import import_and_fork

        import_and_fork(config.rollout.vllm)


def engine_probes(engine: str, platform: str) -> Sequence[Check]:
    """Checks of an engine's installation on a platform of the trainer for `async-grpo doctor`; () if none."""
    match engine:
        case "vllm":
            from rollout_server.engines.vllm.platform import probes

            return probes(platform)
    return ()
