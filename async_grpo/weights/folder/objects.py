"""Where versions lie: a folder of a file system, or a bucket behind `obstore`. An object is whole or not there.

A missing object is FileNotFoundError in both; every other failure of the place is an OSError, without credentials.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from async_grpo.config.weights import WeightsConfig
from async_grpo.errors import ConfigError, DependencyError
from async_grpo.utils.files import atomic_file

REQUEST_RETRIES = 3
PART_BYTES = 16 << 20
"""Size of the parts in which a large object is uploaded."""
_SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


class Objects(Protocol):
    """Named objects; names are paths with `/`. Used from several threads."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes [start, stop) of the object, fewer at its end. Raises FileNotFoundError, OSError."""
        ...

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        """Create or replace the object, atomically. Raises OSError."""
        ...

    def list_names(self, prefix: str) -> list[str]:
        """Names of all objects below the folder `prefix`. Raises OSError."""
        ...

    def remove(self, names: Sequence[str]) -> None:
        """Remove the objects that are there. Raises OSError."""
        ...


class FolderObjects:
    """Files below a folder."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """See `Objects.read`."""
        with (self._root / name).open("rb") as file:
            file.seek(start)
            return file.read(-1 if stop is None else stop - start)

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        """See `Objects.write`; a machine that loses its power may leave a file that fails its hash."""
        path = self._root / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with atomic_file(path) as file:
            for part in parts:
                file.write(part)

    def list_names(self, prefix: str) -> list[str]:
        """See `Objects.list_names`; drafts are left out."""
        found = (path for path in (self._root / prefix).rglob("*") if not path.name.startswith("."))
        return [path.relative_to(self._root).as_posix() for path in found if path.is_file()]

    def remove(self, names: Sequence[str]) -> None:
        """See `Objects.remove`; folders that become empty go too."""
        for name in names:
            (self._root / name).unlink(missing_ok=True)
        for parent in {(self._root / name).parent for name in names}:
            with suppress(OSError):  # something else is in it
                while parent != self._root:
                    parent.rmdir()
                    parent = parent.parent


class BucketObjects:
    """Objects of an S3-compatible store (also gs:// and az://), by the package `obstore`."""

    def __init__(self, url: str, key: str) -> None:
        """`key` of the configuration names it. Connects to nothing yet. Credentials and endpoint come from the
        environment (AWS_...). Raises DependencyError, ConfigError."""
        try:
            import obstore
            from obstore.store import from_url
        except ImportError as error:
            raise DependencyError(
                f"{key} ({url}) needs the package obstore. pip install 'async-grpo[object-store]'"
            ) from error
        self._obstore: Any = obstore
        plain_http = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
        options: Any = {"timeout": "60s", "connect_timeout": "5s"} | ({"allow_http": True} if plain_http else {})
        retries: Any = {"max_retries": REQUEST_RETRIES, "retry_timeout": timedelta(seconds=60)}
        try:
            self._store: Any = from_url(url, client_options=options, retry_config=retries)
        except Exception as error:
            raise ConfigError(f"{key} ({url}) cannot be used: {_without_secrets(error)}") from None

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """See `Objects.read`."""
        with _as_os_errors(name):
            if stop is None:
                return bytes(self._obstore.get(self._store, name).bytes())[start:]
            return bytes(self._obstore.get_range(self._store, name, start=start, end=stop))

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        """See `Objects.write`."""
        with _as_os_errors(name):
            self._obstore.put(self._store, name, _joined(parts), chunk_size=PART_BYTES)

    def list_names(self, prefix: str) -> list[str]:
        """See `Objects.list_names`."""
        with _as_os_errors(prefix):
            listed = self._obstore.list(self._store, prefix=prefix)
            return [entry["path"] for page in listed for entry in page]

    def remove(self, names: Sequence[str]) -> None:
        """See `Objects.remove`."""
        with _as_os_errors("objects to remove"):
            for first in range(0, len(names), 1000):  # the most that one request may name
                with suppress(FileNotFoundError):
                    self._obstore.delete(self._store, list(names[first : first + 1000]))


def open_objects(config: WeightsConfig) -> Objects:
    """The place that `weights.location` names. Raises ConfigError, DependencyError."""
    assert config.location is not None  # the configuration has been checked
    return open_location(config.location, "weights.location")


def open_location(location: str, key: str) -> Objects:
    """A folder (a path, or a file:// URL) or a bucket, which `key` of the configuration names. Raises ConfigError,
    DependencyError."""
    path = location.removeprefix("file://")
    return FolderObjects(Path(path)) if path.startswith("/") else BucketObjects(location, key)


def check_location(config: WeightsConfig, name: str) -> str:
    """Write, read and remove a small object in the folder of the run `name`; says where. Raises ConfigError,
    DependencyError."""
    trial = f"{name}/.trial-{os.getpid()}"
    objects = open_objects(config)
    try:
        if config.transport == "shared_filesystem":
            shutil.disk_usage(str(config.location))  # a folder that is not mounted must not be made here
        objects.write(trial, [b"trial"])
        if objects.read(trial) != b"trial":
            raise OSError("another content was read than was written")
        objects.remove([trial])
    except OSError as error:
        fix = (
            "Mount a folder there that all machines see and this user may write to"
            if config.transport == "shared_filesystem"
            else "Check that the bucket exists, and AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
        raise ConfigError(f"weights.location ({config.location}) is not usable: {error}. {fix}") from error
    return f"{config.location} can be written to, read and listed"


def _joined(parts: Iterable[bytes | memoryview]) -> Iterator[bytes] | bytes:
    """One piece as it is, which one request writes; several as pieces of at least PART_BYTES."""
    held = bytearray()
    iterator = iter(parts)
    for part in iterator:
        held += part
        if len(held) >= PART_BYTES:
            return _pieces(held, iterator)
    return bytes(held)


def _pieces(held: bytearray, rest: Iterator[bytes | memoryview]) -> Iterator[bytes]:
    for part in rest:
        if len(held) >= PART_BYTES:
            yield bytes(held)
            held.clear()
        held += part
    yield bytes(held)


@contextmanager
def _as_os_errors(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # obstore's NotFoundError is a FileNotFoundError
        raise type(error)(f"{name}: {_without_secrets(error)}") from None
    except Exception as error:
        raise OSError(f"{name}: {type(error).__name__}: {_without_secrets(error)}") from None


def _without_secrets(error: Exception) -> str:
    """The first line of a store's message, which may quote the request."""
    text = str(error).partition("\n")[0][:300]
    for variable in _SECRETS:
        if secret := os.environ.get(variable):
            text = text.replace(secret, f"<{variable}>")
    return text
