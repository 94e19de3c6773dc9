"""One role in the foreground: what a container or a cluster job starts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from async_grpo.config import RunConfig
from async_grpo.errors import ConfigError
from async_grpo.launch.commands import rollout_argv, trainer_argv, trainer_environment
from async_grpo.launch.locate import locate
from async_grpo.launch.models import prepare_model
from async_grpo.launch.plan import resolve
from async_grpo.launch.run_folder import RunFolder, open_run, write_config
from buffer import connect_board


def run_rollout(path: Path, overrides: Sequence[str], name: str) -> int:
    """Become a rollout server. Raises ConfigError without redis.url."""
    _, folder, model = _prepare(path, overrides)
    return _become(rollout_argv(folder, model, name))


def join_run(run_dir: Path, name: str) -> int:
    """Become one more rollout server of a run that is going on. Raises ConfigError if it is not, or has this one."""
    config = locate(None, [], run_dir)
    model = asyncio.run(_prepare_to_join(config, name))
    return _become(rollout_argv(RunFolder(run_dir), model, name))


async def _prepare_to_join(config: RunConfig, name: str) -> Path:
    board = await connect_board(config.redis, config.name)
    try:
        names = [beat.name for beat in await board.servers()]
    finally:
        await board.aclose()
    if name in names:
        raise ConfigError(f"the run {config.name} has a server named {name} already ({', '.join(names)}). Give --name")
    return await prepare_model(config, print)


def run_trainer(path: Path, overrides: Sequence[str]) -> int:
    """Become the trainer (torchrun). Raises ConfigError without redis.url."""
    config, folder, model = _prepare(path, overrides)
    return _become(trainer_argv(config, folder, model), trainer_environment(config))


def _prepare(path: Path, overrides: Sequence[str]) -> tuple[RunConfig, RunFolder, Path]:
    config = resolve(path, overrides)
    if config.redis.url is None:
        raise ConfigError(
            "redis.url is not set: a role on its own needs a server that the other roles reach too. "
            "Pass -o redis.url=redis://HOST:6379, or use `async-grpo run`, which brings its own"
        )
    model = asyncio.run(prepare_model(config, print))
    folder = open_run(config)
    write_config(folder, config, for_roles=config)
    return config, folder, model


def _become(argv: Sequence[str], environment: Mapping[str, str] = MappingProxyType({})) -> int:
    """Replace this process, so that signals and the exit code are the role's own."""
    os.execve(argv[0], list(argv), {**os.environ, **environment})
