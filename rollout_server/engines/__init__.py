"""Inference engines behind one interface (`base`).

- `base`          Sampler, Engine, requests, results, version spans, seeds
- `vllm`          vLLM in this process
- `http`          the rollout servers of a live run, over HTTP
- `scripted`      an engine without a model, for tests and simulations
- `proof`         startup proof of an engine's log-probabilities
- `model_files`   facts read from a checkpoint folder

vLLM's own processes import this module too, so it imports no engine until `make_engine` is called.
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
    """Create the engine that `rollout.engine` selects, for a Hugging Face checkpoint folder.

    `name`: the server's name; each server gets its own engine seed from it. The engine's module and framework are
    imported here and nowhere else. Raises ConfigError, DependencyError.
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
                sleep_mode=config.launch.share_devices == "sleep",
                lora=config.model.lora,
                fp32_head=config.model.fp32_head,
            )


def import_engine(config: RunConfig) -> None:
    """Import the engine's framework. Call before the process has threads: vLLM forks its engine process from here."""
    if config.rollout.engine == "vllm":
        from rollout_server.engines.vllm.fork_server import import_and_fork

        import_and_fork(config.rollout.vllm)


def engine_checks(engine: str, platform: str) -> Sequence[Check]:
    """Installation checks of an engine for `async-grpo doctor`; empty if there are none.

    `platform`: name of the trainer's platform.
    """
    match engine:
        case "vllm":
            from rollout_server.engines.vllm.platform import installation_checks

            return installation_checks(platform)
    return ()
