"""The client of Hugging Face: huggingface_hub."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from async_grpo.models.hub.base import Failure, HubErrors, HubFile, HubSilent, RepoFiles
from async_grpo.models.hub.cache import remember_commit, remember_names, seen_commits

LINE_EVERY_S = 5.0
"""Seconds between two progress lines of a download when the output is not a terminal."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_ANSWER_S = 10.0
"""Seconds to wait for the hub's answer about a repository."""
_SILENT_S = 60.0
"""After a timeout, do not retry the hub for this many seconds; one plan makes several requests."""


class HuggingFace:
    """A HubClient of huggingface.co or a mirror."""

    name = "Hugging Face"
    endpoint_variable = "HF_ENDPOINT"
    token_variable = "HF_TOKEN"

    def __init__(self) -> None:
        self._silent_since: dict[str, float] = {}  # address -> when a request to it timed out

    def resolve_revision(self, repo: RepoFiles) -> str:
        """See HubClient. If the hub does not answer, the commit that the revision was when it last did."""
        if _is_commit(repo):
            assert repo.revision is not None
            return repo.revision
        seen = seen_commits(repo)
        try:
            commit = str(self._info(repo).sha)
        except Exception as error:  # which kinds there are depends on the HTTP library: see `map_error`
            if not seen or self.map_error(error) != "unreachable":
                raise
            return seen[-1]
        remember_commit(repo, commit)
        return commit

    def list_files(self, repo: RepoFiles) -> Mapping[str, HubFile]:
        """See HubClient."""
        listed = self._info(repo).siblings or ()
        files = {file.rfilename: HubFile(int(file.size or 0), file.lfs.sha256 if file.lfs else "") for file in listed}
        if _is_commit(repo):
            remember_names(repo, files)
        return files

    def find_snapshot(self, repo: RepoFiles) -> Path | None:
        """See HubClient."""
        from huggingface_hub import errors

        # Older clients have no IncompleteSnapshotError.
        incomplete = getattr(errors, "IncompleteSnapshotError", errors.LocalEntryNotFoundError)
        try:
            return self._snapshot(repo, local_files_only=True)
        except (errors.LocalEntryNotFoundError, incomplete):
            return None

    def download_snapshot(self, repo: RepoFiles, report_progress: Callable[[str], None]) -> Path:
        """See HubClient."""
        options = {} if sys.stderr.isatty() else {"tqdm_class": _progress_lines(report_progress)}
        return self._snapshot(repo, local_files_only=False, **options)

    def map_error(self, error: Exception) -> Failure | None:
        """See HubClient."""
        from huggingface_hub import errors

        return HubErrors(
            refused=(errors.GatedRepoError,),
            missing=(errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError),
            unreachable=(errors.HfHubHTTPError, OSError, *_transport_errors()),
        ).classify(error)

    def _info(self, repo: RepoFiles) -> Any:
        from huggingface_hub import HfApi, constants

        if constants.HF_HUB_OFFLINE:
            raise HubSilent("HF_HUB_OFFLINE is set", mirror_helps=False)
        if time.monotonic() - self._silent_since.get(constants.ENDPOINT, -_SILENT_S) < _SILENT_S:
            raise HubSilent("it has just let a question time out", mirror_helps=True)
        asked_s = time.monotonic()
        try:
            return HfApi().repo_info(
                repo.id, repo_type=repo.kind, revision=repo.revision, files_metadata=True, timeout=_ANSWER_S
            )
        except Exception as error:
            if self.map_error(error) == "unreachable" and time.monotonic() - asked_s >= _ANSWER_S:
                self._silent_since[constants.ENDPOINT] = time.monotonic()
            raise

    def _snapshot(self, repo: RepoFiles, *, local_files_only: bool, **options: Any) -> Path:
        from huggingface_hub import snapshot_download

        folder = snapshot_download(
            repo.id,
            repo_type=repo.kind,
            revision=repo.revision,
            local_files_only=local_files_only,
            allow_patterns=list(repo.wanted),
            ignore_patterns=list(repo.unwanted),
            **options,
        )
        return Path(folder)


def _is_commit(repo: RepoFiles) -> bool:
    return _COMMIT.fullmatch(repo.revision or "") is not None


def _progress_lines(report_progress: Callable[[str], None]) -> type:
    """A progress bar of huggingface_hub that says a line every LINE_EVERY_S seconds, for output that is no terminal."""
    from huggingface_hub.utils import tqdm

    class ProgressLines(tqdm):
        def __init__(self, *args: Any, **named: Any) -> None:
            self._counts_bytes = named.get("name") == "huggingface_hub.snapshot_download" and named.get("unit") == "B"
            super().__init__(*args, **{**named, "mininterval": LINE_EVERY_S, "file": io.StringIO(), "disable": False})

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            if self._counts_bytes and self.n:
                report_progress(f"downloaded {self.n / 1e6:,.0f} of {self.total / 1e6:,.0f} MB")

        def __del__(self) -> None:
            """Say nothing: a bar that the client leaves open is collected long after the download."""

    return ProgressLines


def _transport_errors() -> Iterator[type[Exception]]:
    """Errors of the HTTP client of huggingface_hub when no answer comes. The client's name depends on the release."""
    for name in ("httpx2", "httpx"):
        with contextlib.suppress(ImportError):
            yield import_module(name).TransportError
