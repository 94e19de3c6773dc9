"""From what a user types to the server that holds a run: its configuration with the server's address.

    CONFIG (+ overrides)  -->  the name and folder of the run  -->  its roles.yaml, or redis.url
    run folder            -->  its roles.yaml

Nothing is made, started or written.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from async_grpo.config import RunConfig, load
from async_grpo.errors import ConfigError
from async_grpo.launch.run_folder import RunFolder, run_name
from buffer import PASSWORD_VARIABLE

PATIENCE_S = 5.0
"""For the server, at most: somebody sits in front of the terminal."""


def locate(config: Path | None, overrides: Sequence[str], run_dir: Path | None) -> RunConfig:
    """The configuration of a run that was started, `redis.url` set. Raises ConfigError."""
    if run_dir is not None:
        if config is not None or overrides:
            raise ConfigError("--run-dir names the run already. Leave out CONFIG and -o, or leave out --run-dir")
        return _impatient(_of_folder(RunFolder(run_dir)))
    if config is None:
        raise ConfigError("which run? Give the CONFIG (and -o) that it was started with, or --run-dir runs/NAME")
    asked = load(config, overrides)
    asked = asked.model_copy(update={"name": run_name(asked.name, overrides)})
    return _impatient(asked if asked.redis.url is not None else _of_folder(RunFolder(asked.run_dir)))


def _of_folder(folder: RunFolder) -> RunConfig:
    if not folder.roles_file.is_file():
        raise ConfigError(
            f"{folder.path} holds no run that was started (it has no {folder.roles_file.name}). Check the name: "
            "overrides (-o) are part of it. A run on a server of its own is found by its CONFIG with -o redis.url=..."
        )
    config = load(folder.roles_file)
    if load(folder.config_file).redis.url is None:
        _check_embedded(config)
    return config


def _check_embedded(config: RunConfig) -> None:
    """Its server lives as long as the run does, and has no password."""
    socket = Path(unquote(urlsplit(config.redis.url or "").path))
    if not socket.is_socket():
        raise ConfigError(
            f"the run {config.name} is not running: its embedded server is gone with it ({socket}). "
            "The command that started it resumes it, and what the buffer held is there again"
        )
    os.environ.pop(PASSWORD_VARIABLE, None)


def _impatient(config: RunConfig) -> RunConfig:
    redis = config.redis.model_copy(update={"timeout_s": min(config.redis.timeout_s, PATIENCE_S)})
    return config.model_copy(update={"redis": redis})
