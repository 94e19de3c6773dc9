"""A repository in a configuration: parse its id, find its cached files, download it. The same for every hub."""

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
    HubNotQueried,
    Kind,
    RepoFiles,
)
from async_grpo.models.hub.cache import is_complete, remove_damaged_files, seen_commits
from async_grpo.models.hub.huggingface import HuggingFace
from async_grpo.models.hub.modelscope import ModelScope

LOCAL_FOLDERS = frozenset({"checkpoints", "data", "datasets", "model", "models", "outputs", "runs"})
"""Common names of local folders. A path that starts with one is never parsed as an id."""

_CLIENTS: Mapping[Hub, HubClient] = {"huggingface": HuggingFace(), "modelscope": ModelScope()}
_ID = re.compile(r"(?P<id>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True, slots=True)
class HubRepo(RepoFiles):
    """Files of a repository, for the configuration key or option `key`."""

    key: str = "model.path"

    @property
    def client(self) -> HubClient:
        """Client of the hub that has the repository."""
        return _CLIENTS[self.hub]

    @property
    def description(self) -> str:
        """Description of the repository for messages."""
        return f"{self.kind} {self} on {self.client.name}"

    def pin_revision(self) -> HubRepo:
        """Return the repository with its branch resolved to a commit, to the last seen one if the hub does not answer.

        Raises ConfigError.
        """
        with self._map_errors():
            return replace(self, revision=self.client.resolve_revision(self))

    def list_seen_commits(self) -> list[str]:
        """Commits that this revision has resolved to on this machine, the newest last."""
        return seen_commits(self)

    def find_folder(self) -> Path | None:
        """Return the folder of the cached files; None if a file is missing. Makes no requests."""
        with self._map_errors():
            folder = self.client.find_snapshot(self)
        if folder is None or not is_complete(self, folder):
            return None
        return folder

    def list_file_sizes(self) -> dict[str, int]:
        """Return name -> size in bytes of the files to download. Raises ConfigError, HubUnreachable."""
        return {name: file.size for name, file in self._list_matching_files().items()}

    def _list_matching_files(self) -> dict[str, HubFile]:
        with self._map_errors():
            files = self.client.list_files(self)
        return {name: file for name, file in sorted(files.items()) if self.matches_patterns(name)}

    def fetch_files(self, report_progress: Callable[[str], None]) -> Path:
        """Return the folder of the files, downloaded if needed. Raises ConfigError."""
        cached = self.find_folder()
        if cached is not None:
            return cached

        files = self._list_matching_files()
        if not files:
            raise ConfigError(
                f"{self.key}: the {self.description} has none of {', '.join(self.allow_patterns)}. "
                + ("Weights are read as safetensors only" if self.kind == "model" else "Export it as Parquet or JSON")
            )
        megabytes = sum(file.size for file in files.values()) / 1e6
        report_progress(f"downloading the {self.description}: {len(files)} files, {megabytes:,.1f} MB")
        with self._map_errors():
            folder = self.client.download_snapshot(self, report_progress)

        damaged = remove_damaged_files(folder, files)
        if damaged:
            raise ConfigError(
                f"{self.key}: {', '.join(damaged)} of the {self.description} was downloaded with another size or "
                "SHA-256 than the hub lists, and has been removed. Start again; if it happens again, the mirror or a "
                "proxy changes files"
            )
        return folder

    def with_only_config(self) -> HubRepo:
        """Return the same repository with only config.json selected."""
        return replace(self, allow_patterns=("config.json",))

    @contextlib.contextmanager
    def _map_errors(self) -> Iterator[None]:
        """Map exceptions of a hub's library to ConfigError, unless they are faults of our own."""
        try:
            yield
        except AsyncGrpoError:
            raise
        except Exception as error:  # each library has its own classes: see `map_error`
            failure = self.client.map_error(error)
            if failure is None:
                raise
            raise self._describe_failure(failure, error) from None

    def _describe_failure(self, failure: Failure, error: Exception) -> ConfigError:
        if failure == "refused":
            return ConfigError(
                f"{self.key}: the {self.description} is not open to you. Accept its terms on its page there, and set "
                f"{self.client.token_variable} to a token of your account that is still valid"
            )
        if failure == "missing":
            return ConfigError(
                f"{self.key} is {self}: there is no such folder here, and no such {self.kind} or revision on "
                f"{self.client.name}. Correct the path, or the id (OWNER/NAME@REVISION). A private one needs a "
                f"token in {self.client.token_variable}"
            )
        reason = f"{type(error).__name__}: {error}"[:300]
        mirror_advice = f"set {self.client.endpoint_variable} to a mirror, "
        if isinstance(error, HubNotQueried):
            reason = str(error)
            if not error.mirror_helps:
                mirror_advice = ""
        return HubUnreachable(
            f"{self.key}: the {self.description} is not completely in the cache of this machine, and the hub cannot be "
            f"reached ({reason}). Connect, {mirror_advice}or give a local folder"
        )


def hub_repo(path: Path, kind: Kind, hub: Hub, key: str) -> HubRepo | None:
    """Return the repository for a configured path; None for a local path.

    Existing files take precedence. `models/x` is a local path whose file is missing: it starts with a common name of a
    local folder (`LOCAL_FOLDERS`). So is a path in an existing folder.
    """
    match = _ID.fullmatch(str(path))
    if match is None or path.exists():
        return None
    first_folder = path.parts[0]
    if first_folder in LOCAL_FOLDERS or Path(first_folder).exists():
        return None
    return HubRepo(
        id=match["id"],
        kind=kind,
        hub=hub,
        revision=match["revision"],
        allow_patterns=MODEL_FILES if kind == "model" else DATA_FILES,
        ignore_patterns=MODEL_COPIES if kind == "model" else (),
        key=key,
    )


def model_repo(config: RunConfig) -> HubRepo | None:
    """Return the repository of the first policy; None if the model is local or made by the run."""
    path = config.model.path
    return None if path is None else hub_repo(path, "model", config.model.hub, "model.path")


def settings_folder(config: RunConfig) -> Path | None:
    """Local folder with config.json of `model.path`, if cached; None if the run makes its model. Makes no requests."""
    repo = model_repo(config)
    if repo is None:
        return config.model.path
    return repo.with_only_config().find_folder() or config.model.path
