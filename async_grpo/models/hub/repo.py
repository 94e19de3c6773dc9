"""A repository of a hub that a configuration names, and everything that is asked of it, whichever hub it is."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from async_grpo.config import RunConfig
from async_grpo.config.model import Hub
from async_grpo.errors import AsyncGrpoError, ConfigError, HubUnreachable
from async_grpo.models.hub.base import (
    DATA_FILES,
    MODEL_COPIES,
    MODEL_FILES,
    Failure,
    HubClient,
    HubFile,
    HubSilent,
    Kind,
    RepoFiles,
)
from async_grpo.models.hub.cache import is_complete, remove_damaged, seen_commits
from async_grpo.models.hub.huggingface import HuggingFace
from async_grpo.models.hub.modelscope import ModelScope

LOCAL_FOLDERS = frozenset({"checkpoints", "data", "datasets", "model", "models", "outputs", "runs"})
"""Common names of local folders: a path that begins with one is never taken for an id."""

_CLIENTS: Mapping[Hub, HubClient] = {"huggingface": HuggingFace(), "modelscope": ModelScope()}
_ID = re.compile(r"(?P<id>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True, slots=True)
class HubRepo(RepoFiles):
    """Files of a repository, for the configuration key or option `key`."""

    key: str = "model.path"

    @property
    def client(self) -> HubClient:
        """The hub that has the repository."""
        return _CLIENTS[self.hub]

    @property
    def where(self) -> str:
        """Description of the repository for messages."""
        return f"{self.kind} {self} on {self.client.name}"

    def pinned(self) -> HubRepo:
        """The same with a commit in place of a branch; what is in the cache if the hub does not answer.

        Raises ConfigError.
        """
        with self._explained():
            return replace(self, revision=self.client.resolve_revision(self))

    def seen(self) -> list[str]:
        """The commits that this revision has been on this machine, the newest last."""
        return seen_commits(self)

    def folder(self) -> Path | None:
        """The folder of the cached files; None if some are missing. Makes no requests."""
        with self._explained():
            folder = self.client.find_snapshot(self)
        return folder if folder is not None and is_complete(self, folder) else None

    def files(self) -> dict[str, int]:
        """Name -> size in bytes of every file that would be fetched. Raises ConfigError, HubUnreachable."""
        return {name: file.size for name, file in self._wanted_files().items()}

    def _wanted_files(self) -> dict[str, HubFile]:
        with self._explained():
            files = self.client.list_files(self)
        return {name: file for name, file in sorted(files.items()) if self.is_wanted(name)}

    def fetch(self, report_progress: Callable[[str], None]) -> Path:
        """The folder of the files, downloaded if need be; reports through `report_progress`. Raises ConfigError."""
        if (cached := self.folder()) is not None:
            return cached

        files = self._wanted_files()
        if not files:
            raise ConfigError(
                f"{self.key}: the {self.where} has none of {', '.join(self.wanted)}. "
                + ("Weights are read as safetensors only" if self.kind == "model" else "Export it as Parquet or JSON")
            )
        megabytes = sum(file.size for file in files.values()) / 1e6
        report_progress(f"downloading the {self.where}: {len(files)} files, {megabytes:,.1f} MB")
        with self._explained():
            folder = self.client.download_snapshot(self, report_progress)

        if damaged := remove_damaged(folder, files):
            raise ConfigError(
                f"{self.key}: {', '.join(damaged)} of the {self.where} came with another length or SHA-256 than the "
                "hub states, and has been removed. Start again; if it stays so, the mirror or a proxy changes files"
            )
        return folder

    def settings(self) -> HubRepo:
        """The same repository, of which only config.json is wanted."""
        return replace(self, wanted=("config.json",))

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn what a hub's client raises for a repository that cannot be had into a ConfigError."""
        try:
            yield
        except AsyncGrpoError:
            raise
        except Exception as error:  # each library has its own kinds; `map_error` knows them
            failure = self.client.map_error(error)
            if failure is None:
                raise
            raise self._explanation(failure, error) from None

    def _explanation(self, failure: Failure, error: Exception) -> ConfigError:
        if failure == "refused":
            return ConfigError(
                f"{self.key}: the {self.where} is not open to you. Accept its terms on its page there, and set "
                f"{self.client.token_variable} to a token of your account that is still valid"
            )
        if failure == "missing":
            return ConfigError(
                f"{self.key} is {self}: there is no such folder here, and no such {self.kind} or revision on "
                f"{self.client.name}. Correct the path, or the id (OWNER/NAME@REVISION). A private one needs a "
                f"token in {self.client.token_variable}"
            )
        reason, mirror = f"{type(error).__name__}: {error}"[:300], f"set {self.client.endpoint_variable} to a mirror, "
        if isinstance(error, HubSilent):
            reason, mirror = str(error), mirror if error.mirror_helps else ""
        return HubUnreachable(
            f"{self.key}: the {self.where} is not whole in the cache of this machine, and the hub cannot be asked "
            f"({reason}). Connect, {mirror}or give a local folder"
        )


def hub_repo(path: Path, kind: Kind, hub: Hub, key: str) -> HubRepo | None:
    """The repository that a configured path names; None for a path of this machine.

    What exists here comes first. `models/x` is a path whose file is missing: its first part is the usual name of a
    local folder (`LOCAL_FOLDERS`), or a folder that exists.
    """
    match = _ID.fullmatch(str(path))
    if match is None or path.exists() or path.parts[0] in LOCAL_FOLDERS or Path(path.parts[0]).exists():
        return None
    wanted, unwanted = (MODEL_FILES, MODEL_COPIES) if kind == "model" else (DATA_FILES, ())
    return HubRepo(match["id"], kind, hub, match["revision"], wanted, unwanted, key)


def model_repo(config: RunConfig) -> HubRepo | None:
    """The repository of the first policy; None if the model is here or is made here."""
    path = config.model.path
    return None if path is None else hub_repo(path, "model", config.model.hub, "model.path")


def settings_folder(config: RunConfig) -> Path | None:
    """Local folder with config.json of `model.path`, if cached; None if the model is made. Makes no requests."""
    repo = model_repo(config)
    return config.model.path if repo is None else repo.settings().folder() or config.model.path
