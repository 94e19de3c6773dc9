"""The interface of a hub's client, and what it is given: the files of one repository."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from async_grpo.config.model import Hub

Kind = Literal["model", "dataset"]

MODEL_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
"""Files that trainer and engine read, in the top folder of a checkpoint. Pickled weights are excluded."""
TOKENIZER_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
MODEL_COPIES = ("*/*", "consolidated*")
"""Copies of the weights in other formats, in folders of their own or under other names."""
DATA_FILES = ("*.parquet", "*.jsonl", "*.json")


@dataclass(frozen=True, slots=True)
class RepoFiles:
    """Files of a repository at a revision: those that match `wanted` and not `unwanted`."""

    id: str
    kind: Kind
    hub: Hub = "huggingface"
    revision: str | None = None
    wanted: tuple[str, ...] = MODEL_FILES
    unwanted: tuple[str, ...] = MODEL_COPIES

    def __str__(self) -> str:
        return f"{self.id}@{self.revision}" if self.revision else self.id

    def is_wanted(self, name: str) -> bool:
        """True for the name of a file that matches."""
        return _matches(name, self.wanted) and not _matches(name, self.unwanted)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


@dataclass(frozen=True, slots=True)
class HubFile:
    """Size in bytes and SHA-256 of a file, as the hub states them."""

    size: int
    sha256: str = ""
    """"" if the hub states none, or its client compares it."""


Failure = Literal["refused", "missing", "unreachable"]
"""Reasons why a repository cannot be had: no permission, no such id or revision, no answer."""

_REFUSED = (401, 403)


class HubSilent(OSError):
    """The hub is not asked: its client is offline, or it has just let a request time out."""

    def __init__(self, reason: str, *, mirror_helps: bool) -> None:
        super().__init__(reason)
        self.mirror_helps = mirror_helps


@dataclass(frozen=True, slots=True)
class HubErrors:
    """Exceptions of a hub's library by their reason; an unknown id is often a special case of no answer."""

    refused: tuple[type[Exception], ...]
    missing: tuple[type[Exception], ...]
    unreachable: tuple[type[Exception], ...]

    def classify(self, error: Exception) -> Failure | None:
        """The reason for `error`; None for a fault of another kind."""
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(error, self.refused) or (status in _REFUSED and not isinstance(error, self.missing)):
            return "refused"
        if isinstance(error, self.missing):
            return "missing"
        return "unreachable" if isinstance(error, self.unreachable) else None


class HubClient(Protocol):
    """A hub. The methods raise what its library raises, or HubSilent; `map_error` gives the reason."""

    @property
    def name(self) -> str:
        """Name of the hub in messages."""

    @property
    def endpoint_variable(self) -> str:
        """Environment variable with the address of the hub or of a mirror."""

    @property
    def token_variable(self) -> str:
        """Environment variable with the user's token."""

    def resolve_revision(self, repo: RepoFiles) -> str:
        """The revision to record for a run: a commit, if the hub has commits."""

    def list_files(self, repo: RepoFiles) -> Mapping[str, HubFile]:
        """Every file of the repository by its name, wanted or not. The names of a pinned revision are recorded."""

    def find_snapshot(self, repo: RepoFiles) -> Path | None:
        """The folder of cached files, maybe not all of them; None if there is none. Makes no requests."""

    def download_snapshot(self, repo: RepoFiles, report_progress: Callable[[str], None]) -> Path:
        """Download the wanted files that are missing, and return their folder; progress goes to `report_progress`."""

    def map_error(self, error: Exception) -> Failure | None:
        """The reason why a call has failed; None for a fault that is not the hub's."""
