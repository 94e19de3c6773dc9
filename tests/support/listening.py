"""Which TCP sockets a process and all that it starts listen on."""

from __future__ import annotations

import ipaddress
import shutil
import socket
import subprocess
import threading
from collections.abc import Sequence

import psutil

_EVERY_S = 0.05


class ListenerWatch:
    """Looks again and again, as long as the `with` block lasts, at a process and its descendants."""

    def __init__(self, process_id: int) -> None:
        self.found: dict[tuple[str, int], str] = {}
        """Who listened there, by address and port."""
        self._root = psutil.Process(process_id)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> ListenerWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def beyond_loopback(self) -> dict[tuple[str, int], str]:
        """What others than this machine could connect to."""
        return {place: command for place, command in self.found.items() if not _is_loopback(place[0])}

    def _watch(self) -> None:
        while not self._over.wait(_EVERY_S):
            try:
                family = [self._root, *self._root.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            for process in family:
                self._look_at(process)

    def _look_at(self, process: psutil.Process) -> None:
        try:
            for found in process.net_connections("tcp"):
                if found.status == psutil.CONN_LISTEN and found.laddr[:2] not in self.found:
                    self.found[found.laddr[:2]] = " ".join(process.cmdline())
        except psutil.Error:
            return


def in_exposed_machine(argv: Sequence[str]) -> list[str]:
    """The command, where the machine's own name leads to a network: what listens where the name leads is found out,
    though the name of the machine of the tests may lead to its loopback."""
    return ["unshare", "--map-root-user", "--uts", "sh", "-c", f'hostname {own_address()}; exec "$@"', "sh", *argv]


def own_address() -> str | None:
    """An address of this machine that is not on the loopback."""
    found = [entry for card in psutil.net_if_addrs().values() for entry in card if entry.family == socket.AF_INET]
    return next((entry.address for entry in found if not _is_loopback(entry.address)), None)


def can_be_exposed() -> bool:
    """Whether this machine has a network, and lets a command have a name of its own."""
    if own_address() is None or shutil.which("unshare") is None or shutil.which("hostname") is None:
        return False
    return subprocess.run(in_exposed_machine(["true"]), capture_output=True, check=False).returncode == 0


def _is_loopback(address: str) -> bool:
    found = ipaddress.ip_address(address)
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback
