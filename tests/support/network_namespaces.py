"""Two machines as far as the network goes: namespaces of this one, joined by a cable (veth) and by nothing else."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

ADDRESSES = ("10.213.7.1", "10.213.7.2")

Prefix = list[str]
"""Words before a command that let it run on one of the machines."""


def can_be_made() -> bool:
    """Whether this user may make network namespaces and cables."""
    if shutil.which("ip") is None or shutil.which("nsenter") is None or os.geteuid() != 0:
        return False
    try:
        with two_machines():
            return True
    except subprocess.CalledProcessError:
        return False


@contextmanager
def two_machines() -> Iterator[list[Prefix]]:
    """Both machines, each with one of ADDRESSES and a loopback of its own; they see the same processes and files, but
    every command has a /dev/shm of its own."""
    names = [f"async-grpo-{os.getpid()}-{index}" for index in (0, 1)]
    with contextlib.ExitStack() as stack:
        for name in names:
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "delete", name)  # and its end of the cable
        _ip("-n", names[0], "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            for card in ("lo", "cable"):
                _ip("-n", name, "link", "set", card, "up")
        # `ip netns exec` would also mount another /sys, without the cgroups that slurmd looks for.
        own_memory = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]
        yield [["nsenter", f"--net=/run/netns/{name}", *own_memory] for name in names]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)
