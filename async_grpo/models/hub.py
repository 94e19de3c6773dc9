"""Models and data sets of a hub by their ids: Hugging Face (huggingface_hub) or ModelScope (modelscope_hub).

    OWNER/NAME[@REVISION] --pinned--> OWNER/NAME@COMMIT --folder--> its files in the hub's cache, or None
                                                        --fetch---> the same, downloaded

The hub's own client downloads: it resumes, locks what another process is downloading, and finds mirrors, caches and
tokens by its variables (HF_ENDPOINT, HF_HOME, HF_TOKEN, HF_HUB_OFFLINE; MODELSCOPE_ENDPOINT, MODELSCOPE_CACHE,
MODELSCOPE_API_TOKEN). What is in the cache is never asked for again. No pickled file is fetched.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import io
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from async_grpo.config import RunConfig
from async_grpo.config.model import Hub
from async_grpo.errors import ConfigError, DependencyError, HubUnreachable
from async_grpo.utils.files import write_atomic

Kind = Literal["model", "dataset"]

MODEL_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
"""Files that trainer and engine read, in the top folder of a checkpoint. Pickled weights are excluded."""
TOKENIZER_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
MODEL_COPIES = ("*/*", "consolidated*")
"""Copies of the weights in other formats, in folders of their own or under other names."""
DATA_FILES = ("*.parquet", "*.jsonl", "*.json")

LOCAL_FOLDERS = frozenset({"checkpoints", "data", "datasets", "model", "models", "outputs", "runs"})
"""Common names of local folders: a path that begins with one is never taken for an id."""

_ID = re.compile(r"(?P<id>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_VARIABLES = {"huggingface": ("HF_ENDPOINT", "HF_TOKEN"), "modelscope": ("MODELSCOPE_ENDPOINT", "MODELSCOPE_API_TOKEN")}
_NAMES = {"huggingface": "Hugging Face", "modelscope": "ModelScope"}
_WHOLE = ".whole"
"""Marks a snapshot of ModelScope as complete, which its client does not record."""
_REFUSED = (401, 403)
LINE_EVERY_S = 5.0
"""Seconds between two progress lines of a download when the output is not a terminal."""
_ANSWER_S = 10.0
"""Seconds to wait for a hub's answer about a repository."""
_SILENT_S = 60.0
"""Seconds for which a hub that let a question time out is not asked again: a plan has several questions."""
_silent_since: dict[str, float] = {}
"""Address of a hub -> when it let a question time out."""


def cache_dir() -> Path:
    """The folder for files that this package makes once and keeps: $ASYNC_GRPO_CACHE, or ~/.cache/async_grpo."""
    return Path(os.environ.get("ASYNC_GRPO_CACHE") or Path.home() / ".cache" / "async_grpo")


@dataclass(frozen=True, slots=True)
class HubRepo:
    """A repository of a hub at a revision, for the configuration key `key`; files outside `wanted` do not matter."""

    id: str
    kind: Kind
    hub: Hub = "huggingface"
    revision: str | None = None
    key: str = "model.path"
    wanted: tuple[str, ...] = MODEL_FILES
    unwanted: tuple[str, ...] = MODEL_COPIES

    def __str__(self) -> str:
        return f"{self.id}@{self.revision}" if self.revision else self.id

    @property
    def where(self) -> str:
        """Description of the repository for messages."""
        return f"{self.kind} {self} on {_NAMES[self.hub]}"

    def pinned(self) -> HubRepo:
        """The same with a commit in place of a branch; what is in the cache if the hub does not answer.

        ModelScope tells no commits; there the revision stays, and the copy in the cache stays what it was.
        Raises ConfigError.
        """
        if self.hub == "modelscope":
            return replace(self, revision=self.revision or "master")
        if self.revision and _COMMIT.fullmatch(self.revision):
            return self
        seen = self.seen()
        try:
            commit = str(self._info().sha)
        except HubUnreachable:
            if not seen:
                raise
            commit = seen[-1]
        else:
            self._remember("commits", "\n".join([*(one for one in seen if one != commit), commit]))
        return replace(self, revision=commit)

    def seen(self) -> list[str]:
        """The commits that this revision has been on this machine, the newest last."""
        file = self._memory("commits")
        return file.read_text().split() if file.exists() else []

    def folder(self) -> Path | None:
        """The folder of the cached files; None if some are missing. Makes no requests.

        Other programs share the cache of Hugging Face and leave some files of a commit there, so the files are compared
        with what the hub listed; without a listing, a model must have every file of its weights.
        """
        with self._explained():
            try:
                found = Path(self._snapshot(local_files_only=True))
            except _absent(self.hub):
                return None
        if self.hub == "modelscope":
            return found if (found / _WHOLE).exists() else None
        listing = self._memory("files")
        if listing.exists():
            names = [name for name in json.loads(listing.read_text()) if self._is_wanted(name)]
            return found if all((found / name).is_file() for name in names) else None
        return found if self._looks_whole(found) else None

    def _looks_whole(self, folder: Path) -> bool:
        paths = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        found = {name for name in paths if self._is_wanted(name)}
        needed = {pattern for pattern in self.wanted if "*" not in pattern}
        if "*.safetensors" in self.wanted:
            indexes = [json.loads(file.read_text()) for file in folder.glob("*.safetensors.index.json")]
            needed |= {"tokenizer_config.json", *(name for index in indexes for name in index["weight_map"].values())}
            return needed <= found and any(name.endswith(".safetensors") for name in found)
        return bool(found) and needed <= found

    def _memory(self, what: str) -> Path:
        return cache_dir() / "hub" / f"{self.hub}-{self.kind}-{self}.{what}".replace("/", "--")

    def _remember(self, what: str, text: str) -> None:
        file = self._memory(what)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, text)

    def files(self) -> dict[str, int]:
        """Name -> size in bytes of every file that would be fetched. Raises ConfigError, HubUnreachable."""
        return {name: size for name, (size, _) in self._listed().items()}

    def _listed(self) -> dict[str, tuple[int, str]]:
        """Name -> size and SHA-256 ("" if the hub does not tell) of every file that would be fetched."""
        with self._explained():
            if self.hub == "modelscope":
                listed = _modelscope().list_repo_files(self.id, self.kind, revision=self.revision, recursive=True)
                found = {str(file.path): (int(file.size or 0), "") for file in listed}  # the client compares hashes
            else:
                told = self._info().siblings or ()
                found = {file.rfilename: (int(file.size or 0), file.lfs.sha256 if file.lfs else "") for file in told}
                if _COMMIT.fullmatch(self.revision or ""):
                    self._remember("files", json.dumps(sorted(found)))
        return {name: facts for name, facts in sorted(found.items()) if self._is_wanted(name)}

    def fetch(self, say: Callable[[str], None]) -> Path:
        """The folder of the files, downloaded if need be; reports through `say`. Raises ConfigError."""
        if (cached := self.folder()) is not None:
            return cached
        files = self._listed()
        if not files:
            raise ConfigError(
                f"{self.key}: the {self.where} has none of {', '.join(self.wanted)}. "
                + ("Weights are read as safetensors only" if self.kind == "model" else "Export it as Parquet or JSON")
            )
        say(
            f"downloading the {self.where}: {len(files)} files, {sum(size for size, _ in files.values()) / 1e6:,.1f} MB"
        )
        with self._explained():
            folder = Path(self._snapshot(local_files_only=False, say=say))
        self._check(folder, files)
        if self.hub == "modelscope":
            (folder / _WHOLE).touch()
        return folder

    def _check(self, folder: Path, files: Mapping[str, tuple[int, str]]) -> None:
        """Remove files whose length or SHA-256 is not what the hub says, and raise ConfigError."""
        with ThreadPoolExecutor() as pool:  # a hash of a large file leaves the interpreter free
            wholes = pool.map(lambda name: _is_whole(folder / name, *files[name]), files)
            wrong = [name for name, whole in zip(files, wholes, strict=True) if not whole]
        for name in wrong:
            (folder / name).resolve().unlink(missing_ok=True)
            (folder / name).unlink(missing_ok=True)
        if wrong:
            raise ConfigError(
                f"{self.key}: {', '.join(wrong)} of the {self.where} came with another length or SHA-256 than the hub "
                "states, and has been removed. Start again; if it stays so, the mirror or a proxy changes files"
            )

    def settings(self) -> HubRepo:
        """The same repository, of which only config.json is wanted."""
        return replace(self, wanted=("config.json",))

    def _is_wanted(self, name: str) -> bool:
        return _matches(name, self.wanted) and not _matches(name, self.unwanted)

    def _info(self) -> Any:
        from huggingface_hub import HfApi, constants

        if constants.HF_HUB_OFFLINE:
            raise HubUnreachable(self._offline("HF_HUB_OFFLINE is set"))
        if time.monotonic() - _silent_since.get(constants.ENDPOINT, -_SILENT_S) < _SILENT_S:
            raise HubUnreachable(self._offline("it has just let a question time out", _VARIABLES[self.hub][0]))
        asked_s = time.monotonic()
        try:
            with self._explained():
                return HfApi().repo_info(
                    self.id, repo_type=self.kind, revision=self.revision, files_metadata=True, timeout=_ANSWER_S
                )
        except HubUnreachable:
            if time.monotonic() - asked_s >= _ANSWER_S:
                _silent_since[constants.ENDPOINT] = time.monotonic()
            raise

    def _snapshot(self, *, local_files_only: bool, say: Callable[[str], None] = print) -> str:
        filters: dict[str, Any] = {"allow_patterns": list(self.wanted), "ignore_patterns": list(self.unwanted)}
        if self.hub == "modelscope":
            return str(
                _modelscope().download_repo(
                    self.id, self.kind, revision=self.revision, local_files_only=local_files_only, **filters
                )
            )
        from huggingface_hub import snapshot_download

        if not sys.stderr.isatty():
            filters["tqdm_class"] = _progress_lines(say)
        return snapshot_download(
            self.id, repo_type=self.kind, revision=self.revision, local_files_only=local_files_only, **filters
        )

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn what a hub's client raises for a repository that cannot be had into a ConfigError."""
        endpoint, token = _VARIABLES[self.hub]
        try:
            yield
        except Exception as error:
            refused, missing, away = _failures(self.hub)
            status = getattr(getattr(error, "response", None), "status_code", None)
            if isinstance(error, refused) or (status in _REFUSED and not isinstance(error, missing)):
                raise ConfigError(
                    f"{self.key}: the {self.where} is not open to you. Accept its terms on its page there, and set "
                    f"{token} to a token of your account that is still valid"
                ) from None
            if isinstance(error, missing):
                raise ConfigError(
                    f"{self.key} is {self}: there is no such folder here, and no such {self.kind} or revision on "
                    f"{_NAMES[self.hub]}. Correct the path, or the id (OWNER/NAME@REVISION). A private one needs a "
                    f"token in {token}"
                ) from None
            if isinstance(error, away):
                raise HubUnreachable(self._offline(f"{type(error).__name__}: {error}"[:300], endpoint)) from None
            raise

    def _offline(self, why: str, endpoint: str = "") -> str:
        mirror = f"set {endpoint} to a mirror, " if endpoint else ""
        return (
            f"{self.key}: the {self.where} is not whole in the cache of this machine, and the hub cannot be asked "
            f"({why}). Connect, {mirror}or give a local folder"
        )


def _progress_lines(say: Callable[[str], None]) -> type:
    """A progress bar of huggingface_hub that says a line every LINE_EVERY_S seconds, for output that is no terminal."""
    from huggingface_hub.utils import tqdm

    class ProgressLines(tqdm):
        def __init__(self, *args: Any, **named: Any) -> None:
            self._counts_bytes = named.get("name") == "huggingface_hub.snapshot_download" and named.get("unit") == "B"
            super().__init__(*args, **{**named, "mininterval": LINE_EVERY_S, "file": io.StringIO(), "disable": False})

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            if self._counts_bytes and self.n:
                say(f"downloaded {self.n / 1e6:,.0f} of {self.total / 1e6:,.0f} MB")

        def __del__(self) -> None:
            """Say nothing: a bar that the client leaves open is collected long after the download."""

    return ProgressLines


def _is_whole(file: Path, size: int, sha256: str) -> bool:
    if not file.is_file() or file.stat().st_size != size:
        return False
    with file.open("rb") as stream:
        return not sha256 or hashlib.file_digest(stream, "sha256").hexdigest() == sha256


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _modelscope() -> Any:
    try:
        from modelscope_hub import HubApi
    except ImportError:
        raise DependencyError(
            "hub modelscope needs the package modelscope-hub. Install it: pip install 'async-grpo[modelscope]'"
        ) from None
    return HubApi()


def _absent(hub: Hub) -> tuple[type[Exception], ...]:
    """What a client raises for files that are not in its cache when it may not ask."""
    if hub == "modelscope":
        from modelscope_hub.errors import CacheNotFound

        return (CacheNotFound,)
    from huggingface_hub import errors

    newer = getattr(errors, "IncompleteSnapshotError", errors.LocalEntryNotFoundError)  # older clients do not tell
    return (errors.LocalEntryNotFoundError, newer)


def _failures(hub: Hub) -> tuple[tuple[type[Exception], ...], ...]:
    """What a client raises for a repository that is refused, for one that is unknown, and without an answer."""
    if hub == "modelscope":
        from modelscope_hub import errors

        refused = (errors.AuthenticationError, errors.PermissionDeniedError)
        return refused, (errors.NotExistError,), (errors.HubError, OSError)
    from huggingface_hub import errors as hf

    missing = (hf.RepositoryNotFoundError, hf.RevisionNotFoundError, hf.HFValidationError)
    return (hf.GatedRepoError,), missing, (hf.HfHubHTTPError, OSError, *_transport_errors())


def _transport_errors() -> Iterator[type[Exception]]:
    """What the HTTP client of huggingface_hub raises without an answer; it has changed its name with its major
    release."""
    for name in ("httpx2", "httpx"):
        with contextlib.suppress(ImportError):
            yield import_module(name).TransportError


def hub_repo(path: Path, kind: Kind, hub: Hub, key: str) -> HubRepo | None:
    """The repository that a configured path names; None for a path of this machine.

    What exists here comes first. `models/x` is a path whose file is missing: its first part is the usual name of a
    local folder (`LOCAL_FOLDERS`), or a folder that exists.
    """
    found = _ID.fullmatch(str(path))
    if found is None or path.exists() or path.parts[0] in LOCAL_FOLDERS or Path(path.parts[0]).exists():
        return None
    wanted = (MODEL_FILES, MODEL_COPIES) if kind == "model" else (DATA_FILES, ())
    return HubRepo(found["id"], kind, hub, found["revision"], key, *wanted)


def model_repo(config: RunConfig) -> HubRepo | None:
    """The repository of the first policy; None if the model is here or is made here."""
    path = config.model.path
    return None if path is None else hub_repo(path, "model", config.model.hub, "model.path")


def settings_folder(config: RunConfig) -> Path | None:
    """The folder with config.json of `model.path`, as far as it is here; None if the model is made. Asks nobody."""
    repo = model_repo(config)
    return config.model.path if repo is None else repo.settings().folder() or config.model.path
