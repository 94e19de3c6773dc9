"""Models and data that a configuration names by hub id: pinned to commits for the run, and downloaded to this machine.

configuration --pin_inputs--> ids with commits (config.yaml) --fetch_inputs--> local files (roles.yaml, checks, roles)

A plan that must not download calls `use_local_inputs` instead of `fetch_inputs`.
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
from async_grpo.models.hub_dataset import data_repo, find_training_files, write_training_files
from trainer.checkpoint.store import RunStore

Section = TypeVar("Section", bound=BaseModel)

KEYS = ("model.path", "data.path", "trainer.reference.path")
"""Configuration keys that accept the id of a hub repository."""


def hub_inputs(config: RunConfig) -> dict[str, HubRepo]:
    """Return configuration key -> hub repository that it names; {} if all inputs are local."""
    repos = {"model.path": model_repo(config), "data.path": data_repo(config.data)}
    reference = config.trainer.reference.path
    if reference is not None:
        key = "trainer.reference.path"
        repos[key] = hub_repo(reference, "model", config.model.hub, key)
    return {key: repo for key, repo in repos.items() if repo is not None}


def pin_inputs(config: RunConfig, *, planning: bool = False, pinned: Sequence[HubRepo] = ()) -> RunConfig:
    """Return the configuration with a commit for every id.

    The commit is the one that the run has used so far, else that of the same repository in `pinned`, else the newest.
    Raises ConfigError. With `planning`, an id stays unpinned if the hub is unreachable.
    """
    inputs = hub_inputs(config)
    candidates = [*_read_pinned(config).values(), *pinned] if inputs else []
    paths: dict[str, Path] = {}
    for key, repo in inputs.items():
        commit = next((candidate for candidate in candidates if _is_commit_of(candidate, repo)), None)
        try:
            paths[key] = Path(str(commit or repo.pin_revision()))
        except HubUnreachable:
            if not planning:
                raise
    return _replace_paths(config, paths)


def _is_commit_of(candidate: HubRepo, repo: HubRepo) -> bool:
    """True if `candidate` is a commit of `repo`, and of its branch if it names one."""
    same = (candidate.key, candidate.id, candidate.hub) == (repo.key, repo.id, repo.hub)
    return same and (repo.revision is None or candidate.revision in repo.list_seen_commits())


def _read_pinned(config: RunConfig) -> Mapping[str, HubRepo]:
    """Return the commits that the run in the folder was pinned to; without a folder, those of its copy in `runs_store`.

    A bare machine downloads the folder from the copy only after this. If inputs were pinned to newer commits than the
    copy has, the run would count as another experiment and could not be resumed.
    """
    folder = RunFolder(config.run_dir)
    try:
        if folder.config_file.exists():
            return hub_inputs(folder.read_config())
        return _read_pinned_in_copy(config)
    except ConfigError:
        return {}


def _read_pinned_in_copy(config: RunConfig) -> Mapping[str, HubRepo]:
    """Return the commits that the copy of the run was pinned to; {} if there is no copy or its store is unreachable,
    which a later check reports."""
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


def fetch_inputs(config: RunConfig, report_progress: Callable[[str], None], keys: Collection[str] = KEYS) -> RunConfig:
    """Return the configuration with local files instead of ids, after downloading missing ones. Raises ConfigError."""
    paths: dict[str, Path] = {}
    for key, repo in hub_inputs(config).items():
        if key not in keys:
            continue
        if key == "data.path":
            paths |= _data_paths(write_training_files(config.data, repo.pin_revision(), report_progress))
        else:
            paths[key] = repo.pin_revision().fetch_files(report_progress)
    return _replace_paths(config, paths)


def _data_paths(files: tuple[Path, Path | None]) -> dict[str, Path]:
    training, held_out = files
    if held_out is None:
        return {"data.path": training}
    return {"data.path": training, "data.eval_path": held_out}


def use_local_inputs(config: RunConfig) -> RunConfig:
    """Return the configuration with those models and data that are downloaded already; other ids stay.

    Downloads config.json of the first policy's model if the hub is reachable, because the memory plan needs its shape.
    """
    model = model_repo(config)
    if model is not None:
        with contextlib.suppress(ConfigError):
            model.with_only_config().fetch_files(lambda message: None)

    paths: dict[str, Path] = {}
    for key, repo in hub_inputs(config).items():
        if key == "data.path":
            files = find_training_files(config.data, repo)
            if files:
                paths |= _data_paths(files)
        elif folder := repo.find_folder():
            paths[key] = folder
    return _replace_paths(config, paths)


def describe_downloads(config: RunConfig) -> dict[str, str]:
    """Return configuration key -> description of its download, for the ids that `use_local_inputs` did not replace."""
    downloads = {}
    for key, repo in hub_inputs(config).items():
        try:
            size = f", {sum(repo.list_file_sizes().values()) / 1e6:,.1f} MB"
        except ConfigError:
            size = ""
        downloads[key] = f"{repo.description}{size}"
    return downloads


def _replace_paths(config: RunConfig, paths: Mapping[str, Path]) -> RunConfig:
    for key, path in paths.items():
        config = _replace_value(config, key.split("."), path)
    return config


def _replace_value(section: Section, keys: list[str], path: Path) -> Section:
    value: Any = path if len(keys) == 1 else _replace_value(getattr(section, keys[0]), keys[1:], path)
    return section.model_copy(update={keys[0]: value})
