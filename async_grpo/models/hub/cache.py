"""Local records of a hub's answers, and checks of cached snapshots.

    $ASYNC_GRPO_CACHE/hub/HUB-KIND-OWNER--NAME[@REVISION].commits   commits of a revision, the newest last
                                                        .files     names of all files of a pinned revision

The files themselves are in the cache of the hub's client.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from async_grpo.models.hub.base import HubFile, RepoFiles
from async_grpo.utils.files import write_atomic


def cache_dir() -> Path:
    """Folder for files that this package makes once and keeps: $ASYNC_GRPO_CACHE, or ~/.cache/async_grpo."""
    return Path(os.environ.get("ASYNC_GRPO_CACHE") or Path.home() / ".cache" / "async_grpo")


def seen_commits(repo: RepoFiles) -> list[str]:
    """Commits that this revision has resolved to on this machine, the newest last."""
    file = _record_file(repo, "commits")
    return file.read_text().split() if file.exists() else []


def record_commit(repo: RepoFiles, commit: str) -> None:
    """Record that the revision now resolves to this commit."""
    earlier = [seen for seen in seen_commits(repo) if seen != commit]
    _write_record(repo, "commits", "\n".join([*earlier, commit]))


def record_file_names(repo: RepoFiles, files: Mapping[str, HubFile]) -> None:
    """Record the names of the files of the repository at a pinned revision."""
    _write_record(repo, "files", json.dumps(sorted(files)))


def is_complete(repo: RepoFiles, folder: Path) -> bool:
    """True if `folder` has all selected files.

    A cached snapshot can be partial: other programs share the cache, and calls with other patterns fetch other files.
    So we compare it with the hub's list of files. Without a list, a model must have all files of its weights.
    """
    file = _record_file(repo, "files")
    if not file.exists():
        return _has_needed_files(repo, folder)
    selected = [name for name in json.loads(file.read_text()) if repo.matches_patterns(name)]
    return all((folder / name).is_file() for name in selected)


def remove_damaged_files(folder: Path, files: Mapping[str, HubFile]) -> list[str]:
    """Remove files whose size or SHA-256 differs from the hub's, and return their names."""
    with ThreadPoolExecutor() as pool:  # hashing releases the interpreter lock
        intact = pool.map(lambda name: _is_intact(folder / name, files[name]), files)
        damaged = [name for name, is_intact in zip(files, intact, strict=True) if not is_intact]

    # A snapshot contains links to files in the hub's cache. Remove both: if the target stayed, the hub's library would
    # link to the damaged file again instead of downloading it.
    for name in damaged:
        (folder / name).resolve().unlink(missing_ok=True)
        (folder / name).unlink(missing_ok=True)
    return damaged


def _record_file(repo: RepoFiles, suffix: str) -> Path:
    return cache_dir() / "hub" / f"{repo.hub}-{repo.kind}-{repo}.{suffix}".replace("/", "--")


def _write_record(repo: RepoFiles, suffix: str, text: str) -> None:
    file = _record_file(repo, suffix)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, text)


def _has_needed_files(repo: RepoFiles, folder: Path) -> bool:
    paths = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    present = {name for name in paths if repo.matches_patterns(name)}
    needed = {pattern for pattern in repo.allow_patterns if "*" not in pattern}
    if "*.safetensors" not in repo.allow_patterns:
        return bool(present) and needed <= present

    needed.add("tokenizer_config.json")
    for file in folder.glob("*.safetensors.index.json"):
        needed.update(json.loads(file.read_text())["weight_map"].values())
    return needed <= present and any(name.endswith(".safetensors") for name in present)


def _is_intact(file: Path, expected: HubFile) -> bool:
    if not file.is_file() or file.stat().st_size != expected.size:
        return False
    if not expected.sha256:
        return True
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() == expected.sha256
