"""Local records of a hub's answers, and whether a cached snapshot is complete.

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
    """The folder for files that this package makes once and keeps: $ASYNC_GRPO_CACHE, or ~/.cache/async_grpo."""
    return Path(os.environ.get("ASYNC_GRPO_CACHE") or Path.home() / ".cache" / "async_grpo")


def seen_commits(repo: RepoFiles) -> list[str]:
    """The commits that this revision has been on this machine, the newest last."""
    file = _record(repo, "commits")
    return file.read_text().split() if file.exists() else []


def remember_commit(repo: RepoFiles, commit: str) -> None:
    """Record that the revision is this commit now."""
    _remember(repo, "commits", "\n".join([*(seen for seen in seen_commits(repo) if seen != commit), commit]))


def remember_names(repo: RepoFiles, files: Mapping[str, HubFile]) -> None:
    """Record which files the repository has at a pinned revision."""
    _remember(repo, "files", json.dumps(sorted(files)))


def is_complete(repo: RepoFiles, folder: Path) -> bool:
    """True if `folder` has all wanted files.

    Other programs share the caches and leave some files of a snapshot there, and other calls of this one fetch other
    files, so the files are compared with what the hub listed; without a listing, a model must have every file of its
    weights.
    """
    names = _record(repo, "files")
    if names.exists():
        return all((folder / name).is_file() for name in json.loads(names.read_text()) if repo.is_wanted(name))
    return _looks_complete(repo, folder)


def remove_damaged(folder: Path, files: Mapping[str, HubFile]) -> list[str]:
    """Remove the files whose length or SHA-256 is not what the hub states; returns their names."""
    with ThreadPoolExecutor() as pool:  # a hash of a large file leaves the interpreter free
        intact = pool.map(lambda name: _is_intact(folder / name, files[name]), files)
        damaged = [name for name, good in zip(files, intact, strict=True) if not good]
    for name in damaged:
        (folder / name).resolve().unlink(missing_ok=True)
        (folder / name).unlink(missing_ok=True)
    return damaged


def _record(repo: RepoFiles, what: str) -> Path:
    return cache_dir() / "hub" / f"{repo.hub}-{repo.kind}-{repo}.{what}".replace("/", "--")


def _remember(repo: RepoFiles, what: str, text: str) -> None:
    file = _record(repo, what)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, text)


def _looks_complete(repo: RepoFiles, folder: Path) -> bool:
    paths = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    present = {name for name in paths if repo.is_wanted(name)}
    needed = {pattern for pattern in repo.wanted if "*" not in pattern}
    if "*.safetensors" in repo.wanted:
        indexes = [json.loads(file.read_text()) for file in folder.glob("*.safetensors.index.json")]
        needed |= {"tokenizer_config.json", *(name for index in indexes for name in index["weight_map"].values())}
        return needed <= present and any(name.endswith(".safetensors") for name in present)
    return bool(present) and needed <= present


def _is_intact(file: Path, stated: HubFile) -> bool:
    if not file.is_file() or file.stat().st_size != stated.size:
        return False
    if not stated.sha256:
        return True
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() == stated.sha256
