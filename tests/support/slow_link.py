"""Two network namespaces, joined by one link of limited bandwidth that can be cut. Needs root."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

NEAR_HOST, FAR_HOST = "10.213.7.1", "10.213.7.2"


class NotPermitted(Exception):
    """This machine, or this user, has no network namespaces; says which command failed and how."""


@dataclass(frozen=True)
class SlowLink:
    """`near` and `far` are the names of the namespaces, and of the end of the link in each."""

    near: str
    far: str

    def command(self, namespace: str, *arguments: str) -> list[str]:
        """The command line that runs `arguments` in one of the two."""
        return ["ip", "netns", "exec", namespace, *arguments]

    def cut(self) -> None:
        _ip("-n", self.near, "link", "set", self.near, "down")

    def mend(self) -> None:
        _ip("-n", self.near, "link", "set", self.near, "up")

    def sent_bytes(self) -> int:
        """From near to far since the link was made."""
        counter = f"/sys/class/net/{self.near}/statistics/tx_bytes"
        return int(_run(*self.command(self.near, "cat", counter)))


@contextmanager
def slow_link(rate: str = "100mbit") -> Iterator[SlowLink]:
    """Gone after the block. Raises NotPermitted."""
    link = SlowLink(f"agn{os.getpid()}", f"agf{os.getpid()}")
    ends = ((link.near, NEAR_HOST), (link.far, FAR_HOST))
    try:
        for name, _ in ends:
            _ip("netns", "add", name)
        _ip("link", "add", link.near, "netns", link.near, "type", "veth", "peer", link.far, "netns", link.far)
        for name, host in ends:
            _ip("-n", name, "address", "add", f"{host}/30", "dev", name)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", name, "up")
            shaping = ("rate", rate, "burst", "128kb", "latency", "50ms")
            _run("tc", "-n", name, "qdisc", "add", "dev", name, "root", "tbf", *shaping)
        yield link
    finally:
        for name, _ in ends:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
    except FileNotFoundError as error:
        raise NotPermitted(f"{command[0]} is not installed") from error
    except subprocess.CalledProcessError as error:
        raise NotPermitted(f"{' '.join(command)}: {error.stderr.strip()}") from error
