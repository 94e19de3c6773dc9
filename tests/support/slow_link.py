"""Two network namespaces, joined by one link of limited bandwidth that can be cut. Needs root."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.support.network_namespaces import CABLE, joined_namespaces, run


@dataclass(frozen=True)
class SlowLink:
    """`near` and `far` are the names of the namespaces; they have the addresses of `network_namespaces`."""

    near: str
    far: str

    def command(self, namespace: str, *arguments: str) -> list[str]:
        """The command line that runs `arguments` in one of the two."""
        return ["ip", "netns", "exec", namespace, *arguments]

    def cut(self) -> None:
        run("ip", "-n", self.near, "link", "set", CABLE, "down")

    def mend(self) -> None:
        run("ip", "-n", self.near, "link", "set", CABLE, "up")

    def sent_bytes(self) -> int:
        """From near to far since the link was made."""
        return int(run(*self.command(self.near, "cat", f"/sys/class/net/{CABLE}/statistics/tx_bytes")))


@contextmanager
def slow_link(rate: str = "100mbit") -> Iterator[SlowLink]:
    """Gone after the block. Raises NotPermitted."""
    with joined_namespaces() as names:
        for name in names:
            shaping = ("rate", rate, "burst", "128kb", "latency", "50ms")
            run("tc", "-n", name, "qdisc", "add", "dev", CABLE, "root", "tbf", *shaping)
        yield SlowLink(*names)
