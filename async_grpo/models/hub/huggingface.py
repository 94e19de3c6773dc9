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

from async_grpo.models.hub.base import Failure, HubErrors, HubFile, HubNotQueried, RepoFiles
from async_grpo.models.hub.cache import record_commit, record_file_names, seen_commits

LINE_EVERY_S = 5.0
"""Seconds between two progress lines of a download when the output is not a terminal."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_REQUEST_TIMEOUT_S = 10.0
"""Seconds to wait for the hub's answer about a repository."""
_RETRY_DELAY_S = 60.0
"""Seconds without requests after a timeout. One plan makes several requests, and each would wait again."""


class HuggingFace:
    """A HubClient of huggingface.co or a mirror."""

    name = "Hugging Face"
    endpoint_variable = "HF_ENDPOINT"
    token_variable = "HF_TOKEN"

    def __init__(self) -> None:
        self._timed_out_at: dict[str, float] = {}  # address -> time of the last timeout

    def resolve_revision(self, repo: RepoFiles) -> str:
        """See HubClient. Returns the last seen commit if the hub does not answer."""
        if _is_commit(repo):
            assert repo.revision is not None
            return repo.revision

        try:
            commit = str(self._request_info(repo).sha)
        except Exception as error:  # the classes depend on the HTTP library: see `map_error`
            seen = seen_commits(repo)
            if not seen or self.map_error(error) != "unreachable":
                raise
            return seen[-1]
        record_commit(repo, commit)
        return commit

    def list_files(self, repo: RepoFiles) -> Mapping[str, HubFile]:
        """See HubClient. Only files in LFS have a SHA-256."""
        files = {}
        for file in self._request_info(repo).siblings or ():
            sha256 = file.lfs.sha256 if file.lfs else ""
            files[file.rfilename] = HubFile(int(file.size or 0), sha256)
        if _is_commit(repo):
            record_file_names(repo, files)
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
        if sys.stderr.isatty():
            return self._snapshot(repo, local_files_only=False)
        return self._snapshot(repo, local_files_only=False, tqdm_class=_make_progress_lines(report_progress))

    def map_error(self, error: Exception) -> Failure | None:
        """See HubClient."""
        from huggingface_hub import errors

        return HubErrors(
            refused=(errors.GatedRepoError,),
            missing=(errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError),
            unreachable=(errors.HfHubHTTPError, OSError, *_transport_errors()),
        ).classify(error)

    def _request_info(self, repo: RepoFiles) -> Any:
        from huggingface_hub import HfApi, constants

        if constants.HF_HUB_OFFLINE:
            raise HubNotQueried("HF_HUB_OFFLINE is set", mirror_helps=False)
        timed_out_at = self._timed_out_at.get(constants.ENDPOINT)
        start = time.monotonic()
        if timed_out_at is not None and start - timed_out_at < _RETRY_DELAY_S:
            raise HubNotQueried("its last request has just timed out", mirror_helps=True)

        try:
            return HfApi().repo_info(
                repo.id, repo_type=repo.kind, revision=repo.revision, files_metadata=True, timeout=_REQUEST_TIMEOUT_S
            )
        except Exception as error:
            end = time.monotonic()
            if self.map_error(error) == "unreachable" and end - start >= _REQUEST_TIMEOUT_S:
                self._timed_out_at[constants.ENDPOINT] = end
            raise

    def _snapshot(self, repo: RepoFiles, *, local_files_only: bool, **options: Any) -> Path:
        from huggingface_hub import snapshot_download

        folder = snapshot_download(
            repo.id,
            repo_type=repo.kind,
            revision=repo.revision,
            local_files_only=local_files_only,
            allow_patterns=list(repo.allow_patterns),
            ignore_patterns=list(repo.ignore_patterns),
            **options,
        )
        return Path(folder)


def _is_commit(repo: RepoFiles) -> bool:
    return _COMMIT.fullmatch(repo.revision or "") is not None


def _make_progress_lines(report_progress: Callable[[str], None]) -> type:
    """Return a progress bar class for huggingface_hub that reports a line every LINE_EVERY_S seconds."""
    from huggingface_hub.utils import tqdm

    class ProgressLines(tqdm):
        def __init__(self, *args: Any, **named: Any) -> None:
            # huggingface_hub also opens a bar that counts files.
            self._counts_bytes = named.get("name") == "huggingface_hub.snapshot_download" and named.get("unit") == "B"
            named |= {"mininterval": LINE_EVERY_S, "file": io.StringIO(), "disable": False}
            super().__init__(*args, **named)

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            if self._counts_bytes and self.n:
                report_progress(f"downloaded {self.n / 1e6:,.0f} of {self.total / 1e6:,.0f} MB")

        def __del__(self) -> None:
            """Report nothing: huggingface_hub leaves a bar open, which is collected long after the download."""

    return ProgressLines


def _transport_errors() -> Iterator[type[Exception]]:
    """Yield the connection errors of huggingface_hub's HTTP library, whose name depends on the release."""
    for name in ("httpx2", "httpx"):
        with contextlib.suppress(ImportError):
            yield import_module(name).TransportError
