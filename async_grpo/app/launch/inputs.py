"""Models and data that a configuration names by hub id: pinned for the run, and downloaded to this machine.

configuration --pin--> ids with commits (config.yaml) --fetch, here--> local files (roles.yaml, checks, roles)
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from async_grpo.app.launch.run_folder import RunFolder
from async_grpo.config import RunConfig
from async_grpo.errors import ConfigError, HubUnreachable
from async_grpo.models.hub import HubRepo, hub_repo, model_repo
from async_grpo.models.hub_dataset import data_repo, training_files, written_files
from trainer.checkpoint.store import RunStore

Section = TypeVar("Section", bound=BaseModel)

KEYS = ("model.path", "data.path", "trainer.reference.path")
"""Configuration keys that take the id of a hub."""


def hub_inputs(config: RunConfig) -> dict[str, HubRepo]:
    """Configuration key -> the hub repository that it names; {} if all inputs are local."""
    reference = config.trainer.reference.path
    found = {"model.path": model_repo(config), "data.path": data_repo(config.data)}
    if reference is not None:
        key = "trainer.reference.path"
        found[key] = hub_repo(reference, "model", config.model.hub, key)
    return {key: repo for key, repo in found.items() if repo is not None}


def pin_inputs(config: RunConfig, *, planning: bool = False, held: Sequence[HubRepo] = ()) -> RunConfig:
    """The configuration with a commit for every id: the one that the run, or else another of `held`, has had so far,
    else the newest. Raises ConfigError; with `planning` an id stays as it is if the hub cannot be asked."""
    inputs = hub_inputs(config)
    before = [*_earlier(config).values(), *held] if inputs else []
    paths: dict[str, Path] = {}
    for key, repo in inputs.items():
        earlier = next((one for one in before if _is_of(one, repo)), None)
        try:
            paths[key] = Path(str(earlier or repo.pinned()))
        except HubUnreachable:
            if not planning:
                raise
    return _with(config, paths)


def _is_of(earlier: HubRepo, repo: HubRepo) -> bool:
    """Whether `earlier` is a commit that `repo`, without a revision or on a branch, has been."""
    same = (earlier.key, earlier.id, earlier.hub) == (repo.key, repo.id, repo.hub)
    return same and (repo.revision is None or earlier.revision in repo.seen())


def _earlier(config: RunConfig) -> Mapping[str, HubRepo]:
    """The repositories that the run in the folder, or else its copy in `runs_store`, was pinned to.

    A bare machine gets the folder from the copy only after this. With newer commits than those of the copy, the run
    would not be the same and could not be resumed.
    """
    folder = RunFolder(config.run_dir)
    try:
        if folder.config_file.exists():
            return hub_inputs(folder.read_config())
        return _in_copy(config)
    except ConfigError:
        return {}


def _in_copy(config: RunConfig) -> Mapping[str, HubRepo]:
    """The repositories that the copy of the run was pinned to; {} if there is none, or the store cannot be reached,
    which stops the start later."""
    if config.runs_store is None:
        return {}
    with tempfile.TemporaryDirectory() as name:
        copy = RunFolder(Path(name) / config.name)
        try:
            content = RunStore.open(config.runs_store, config.name).read_config()
        except OSError:
            return {}
        if content is None:
            return {}
        copy.path.mkdir()
        copy.config_file.write_bytes(content)
        return hub_inputs(copy.read_config())


def fetch_inputs(config: RunConfig, say: Callable[[str], None], keys: Collection[str] = KEYS) -> RunConfig:
    """The configuration with local files in place of ids, downloaded if they are missing. Raises ConfigError."""
    paths: dict[str, Path] = {}
    for key, repo in hub_inputs(config).items():
        if key not in keys:
            continue
        if key == "data.path":
            paths |= _data_paths(training_files(config.data, repo.pinned(), say))
        else:
            paths[key] = repo.pinned().fetch(say)
    return _with(config, paths)


def _data_paths(files: tuple[Path, Path | None]) -> dict[str, Path]:
    trained, held_out = files
    return {"data.path": trained} | ({} if held_out is None else {"data.eval_path": held_out})


def use_local_inputs(config: RunConfig) -> RunConfig:
    """The configuration with models and data that have been downloaded; other ids stay. Of the first policy's model,
    config.json is fetched if the hub answers, for the plan of memory."""
    if repo := model_repo(config):
        with contextlib.suppress(ConfigError):
            repo.settings().fetch(lambda line: None)
    paths: dict[str, Path] = {}
    for key, repo in hub_inputs(config).items():
        if key == "data.path":
            paths |= _data_paths(files) if (files := written_files(config.data, repo)) else {}
        elif folder := repo.folder():
            paths[key] = folder
    return _with(config, paths)


def describe_downloads(config: RunConfig) -> dict[str, str]:
    """Configuration key -> what would be downloaded for it, in words, for the ids that `use_local_inputs` has left."""
    found = {}
    for key, repo in hub_inputs(config).items():
        try:
            size = f", {sum(repo.files().values()) / 1e6:,.1f} MB"
        except ConfigError:
            size = ""
        found[key] = f"{repo.where}{size}"
    return found


def _with(config: RunConfig, paths: Mapping[str, Path]) -> RunConfig:
    for key, path in paths.items():
        config = _replaced(config, key.split("."), path)
    return config


def _replaced(section: Section, keys: list[str], path: Path) -> Section:
    value: Any = path if len(keys) == 1 else _replaced(getattr(section, keys[0]), keys[1:], path)
    return section.model_copy(update={keys[0]: value})
