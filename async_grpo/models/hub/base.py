"""The interface of a hub's client, and the selection of files of one repository."""

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
"""Copies of the weights in other formats, in separate folders or under other names."""
DATA_FILES = ("*.parquet", "*.jsonl", "*.json")


@dataclass(frozen=True, slots=True)
class RepoFiles:
    """Files of a repository at a revision that match `allow_patterns` and not `ignore_patterns`."""

    id: str
    kind: Kind
    hub: Hub = "huggingface"
    revision: str | None = None
    allow_patterns: tuple[str, ...] = MODEL_FILES
    ignore_patterns: tuple[str, ...] = MODEL_COPIES

    def __str__(self) -> str:
        return f"{self.id}@{self.revision}" if self.revision else self.id

    def matches_patterns(self, name: str) -> bool:
        """True if the file is one of the selection."""
        return _matches(name, self.allow_patterns) and not _matches(name, self.ignore_patterns)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


@dataclass(frozen=True, slots=True)
class HubFile:
    """Size in bytes and SHA-256 of a file, as listed by the hub."""

    size: int
    sha256: str = ""
    """"" if the hub lists none, or its client compares it."""


Failure = Literal["refused", "missing", "unreachable"]
"""Reasons why a repository is not available: no permission, no such id or revision, no answer."""

_REFUSED_STATUS = (401, 403)


class HubNotQueried(OSError):
    """No request was sent: the client is offline, or the last request has just timed out."""

    def __init__(self, reason: str, *, mirror_helps: bool) -> None:
        super().__init__(reason)
        self.mirror_helps = mirror_helps


@dataclass(frozen=True, slots=True)
class HubErrors:
    """Exceptions of a hub's library by reason."""

    refused: tuple[type[Exception], ...]
    missing: tuple[type[Exception], ...]
    unreachable: tuple[type[Exception], ...]

    def classify(self, error: Exception) -> Failure | None:
        """Return the reason for `error`; None if it is not the hub's."""
        # Before `missing`: huggingface_hub derives its class for gated repositories from that for missing ones.
        if isinstance(error, self.refused):
            return "refused"

        # Before the status: huggingface_hub raises the class for missing ones with status 401 for an unknown id.
        if isinstance(error, self.missing):
            return "missing"
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in _REFUSED_STATUS:
            return "refused"

        # Last: the libraries derive the other classes from those for "unreachable".
        return "unreachable" if isinstance(error, self.unreachable) else None


class HubClient(Protocol):
    """A hub. Methods raise exceptions of its library, or HubNotQueried; `map_error` returns the reason."""

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
        """Return the revision to record for a run: a commit, if the hub has commits."""

    def list_files(self, repo: RepoFiles) -> Mapping[str, HubFile]:
        """Return all files of the repository by name, selected or not. Records the names for a pinned revision."""

    def find_snapshot(self, repo: RepoFiles) -> Path | None:
        """Return the folder of cached files, possibly incomplete; None if there is none. Makes no requests."""

    def download_snapshot(self, repo: RepoFiles, report_progress: Callable[[str], None]) -> Path:
        """Download the selected files that are not cached, and return their folder."""

    def map_error(self, error: Exception) -> Failure | None:
        """Return the reason why a call failed; None if it is not the hub's."""
