"""The client of ModelScope: modelscope_hub, of the extra `modelscope`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from async_grpo.errors import DependencyError
from async_grpo.models.hub.base import Failure, HubErrors, HubFile, RepoFiles
from async_grpo.models.hub.cache import record_file_names


class ModelScope:
    """A HubClient of modelscope.cn.

    ModelScope's API returns no commits, so a branch stays a branch, and its cached copy is not updated.
    """

    name = "ModelScope"
    endpoint_variable = "MODELSCOPE_ENDPOINT"
    token_variable = "MODELSCOPE_API_TOKEN"

    def resolve_revision(self, repo: RepoFiles) -> str:
        """See HubClient."""
        return repo.revision or "master"

    def list_files(self, repo: RepoFiles) -> Mapping[str, HubFile]:
        """See HubClient. The library compares hashes itself."""
        listed = _api().list_repo_files(repo.id, repo.kind, revision=repo.revision, recursive=True)
        files = {str(file.path): HubFile(int(file.size or 0)) for file in listed}
        record_file_names(repo, files)
        return files

    def find_snapshot(self, repo: RepoFiles) -> Path | None:
        """See HubClient."""
        api = _api()
        from modelscope_hub.errors import CacheNotFound

        try:
            return _snapshot(api, repo, local_files_only=True)
        except CacheNotFound:
            return None

    def download_snapshot(self, repo: RepoFiles, report_progress: Callable[[str], None]) -> Path:
        """See HubClient. The library prints its own progress."""
        return _snapshot(_api(), repo, local_files_only=False)

    def map_error(self, error: Exception) -> Failure | None:
        """See HubClient."""
        from modelscope_hub import errors

        return HubErrors(
            refused=(errors.AuthenticationError, errors.PermissionDeniedError),
            missing=(errors.NotExistError,),
            unreachable=(errors.HubError, OSError),
        ).classify(error)


def _snapshot(api: Any, repo: RepoFiles, *, local_files_only: bool) -> Path:
    folder = api.download_repo(
        repo.id,
        repo.kind,
        revision=repo.revision,
        local_files_only=local_files_only,
        allow_patterns=list(repo.allow_patterns),
        ignore_patterns=list(repo.ignore_patterns),
    )
    return Path(folder)


def _api() -> Any:
    try:
        from modelscope_hub import HubApi
    except ImportError:
        raise DependencyError(
            "hub modelscope needs the package modelscope-hub. Install it: pip install 'async-grpo[modelscope]'"
        ) from None
    return HubApi()
