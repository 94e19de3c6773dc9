"""Object storage for versions: a folder, or a bucket through `obstore`. Objects are written atomically.

In both, a missing object raises FileNotFoundError. Every other failure raises an OSError, without credentials.
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
"""Part size of multipart uploads."""
_SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


class Objects(Protocol):
    """Objects by name, where names are paths with `/`. Safe to use from several threads."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes [start, stop) of the object, fewer at its end. Raises FileNotFoundError, OSError."""
        ...

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        """Create or replace the object, atomically. Raises OSError."""
        ...

    def list_names(self, prefix: str) -> list[str]:
        """Names of all objects below the folder `prefix`. Raises OSError."""
        ...

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects. Missing ones are ignored. Raises OSError."""
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
        """See `Objects.write`. A file written shortly before a power failure may be damaged and fail its hash."""
        path = self._root / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with atomic_file(path) as file:
            for part in parts:
                file.write(part)

    def list_names(self, prefix: str) -> list[str]:
        """See `Objects.list_names`. Leaves out temporary files of unfinished writes."""
        names: list[str] = []
        for path in (self._root / prefix).rglob("*"):
            if not path.name.startswith(".") and path.is_file():
                names.append(path.relative_to(self._root).as_posix())
        return names

    def remove(self, names: Sequence[str]) -> None:
        """See `Objects.remove`. Also removes folders that become empty."""
        for name in names:
            (self._root / name).unlink(missing_ok=True)
        for folder in {(self._root / name).parent for name in names}:
            with suppress(OSError):  # not empty
                while folder != self._root:
                    folder.rmdir()
                    folder = folder.parent


class BucketObjects:
    """Objects in an S3-compatible bucket (also gs:// and az://), through the package `obstore`."""

    def __init__(self, url: str, key: str) -> None:
        """Prepare access; connects on first use. `key` is the configuration key of `url`, for error messages.

        Credentials and endpoint come from the environment (AWS_...). Raises DependencyError, ConfigError.
        """
        try:
            import obstore
            from obstore.store import from_url
        except ImportError as error:
            raise DependencyError(
                f"{key} ({url}) needs the package obstore. pip install 'async-grpo[object-store]'"
            ) from error
        self._obstore: Any = obstore
        options: Any = {"timeout": "60s", "connect_timeout": "5s"}
        if os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://"):
            options["allow_http"] = True
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
            self._obstore.put(self._store, name, _upload_parts(parts), chunk_size=PART_BYTES)

    def list_names(self, prefix: str) -> list[str]:
        """See `Objects.list_names`."""
        with _as_os_errors(prefix):
            listed = self._obstore.list(self._store, prefix=prefix)
            return [entry["path"] for page in listed for entry in page]

    def remove(self, names: Sequence[str]) -> None:
        """See `Objects.remove`."""
        with _as_os_errors("objects to remove"):
            for first in range(0, len(names), 1000):  # S3's limit per request
                with suppress(FileNotFoundError):
                    self._obstore.delete(self._store, list(names[first : first + 1000]))


def open_objects(config: WeightsConfig) -> Objects:
    """Open `weights.location`. Raises ConfigError, DependencyError."""
    assert config.location is not None  # checked when the configuration was loaded
    return open_location(config.location, "weights.location")


def open_location(location: str, key: str) -> Objects:
    """Open a folder (a path or a file:// URL) or a bucket (any other URL), the value of configuration key `key`.

    Raises ConfigError, DependencyError.
    """
    path = location.removeprefix("file://")
    if path.startswith("/"):
        return FolderObjects(Path(path))
    return BucketObjects(location, key)


def check_location(config: WeightsConfig, name: str) -> str:
    """Write, read and remove a small object in the folder of run `name`. Returns a sentence for the report.

    Raises ConfigError, DependencyError.
    """
    trial = f"{name}/.trial-{os.getpid()}"
    objects = open_objects(config)
    try:
        if config.transport == "shared_filesystem":
            shutil.disk_usage(str(config.location))  # raises if the folder is not mounted; writing would create it
        objects.write(trial, [b"trial"])
        if objects.read(trial) != b"trial":
            raise OSError("the content read differs from the content written")
        objects.remove([trial])
    except OSError as error:
        fix = "Check that the bucket exists, and AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        if config.transport == "shared_filesystem":
            fix = "Mount a folder there that all machines share and this user can write to"
        raise ConfigError(f"weights.location ({config.location}) is not usable: {error}. {fix}") from error
    return f"{config.location} can be written to, read and listed"


def _upload_parts(parts: Iterable[bytes | memoryview]) -> Iterator[bytes] | bytes:
    """Join small parts: one `bytes` below PART_BYTES, which one request writes, or parts of at least PART_BYTES."""
    buffer = bytearray()
    remaining = iter(parts)
    for part in remaining:
        buffer += part
        if len(buffer) >= PART_BYTES:
            return _join_to_part_size(buffer, remaining)
    return bytes(buffer)


def _join_to_part_size(buffer: bytearray, remaining: Iterator[bytes | memoryview]) -> Iterator[bytes]:
    for part in remaining:
        if len(buffer) >= PART_BYTES:
            yield bytes(buffer)
            buffer.clear()
        buffer += part
    yield bytes(buffer)


@contextmanager
def _as_os_errors(name: str) -> Iterator[None]:
    """Turn obstore's errors into OSErrors that name the object and contain no credentials."""
    try:
        yield
    except OSError as error:  # obstore's NotFoundError is a FileNotFoundError
        raise type(error)(f"{name}: {_without_secrets(error)}") from None
    except Exception as error:
        raise OSError(f"{name}: {type(error).__name__}: {_without_secrets(error)}") from None


def _without_secrets(error: Exception) -> str:
    """Return the first line of an error, with credentials replaced: a store's message may quote the request."""
    text = str(error).partition("\n")[0][:300]
    for variable in _SECRETS:
        secret = os.environ.get(variable)
        if secret:
            text = text.replace(secret, f"<{variable}>")
    return text
