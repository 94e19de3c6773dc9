"""Two machines as far as the network goes: namespaces of this one, joined by a cable (veth) and by nothing else."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

ADDRESSES = ("10.213.7.1", "10.213.7.2")
CABLE = "cable"
"""Name of the cable's end in each namespace."""

Prefix = list[str]
"""Words before a command that let it run on one of the machines."""


class NotPermitted(Exception):
    """This machine, or this user, has no network namespaces; says which command failed and how."""


def can_be_made() -> bool:
    """True if this user may make network namespaces and cables."""
    if shutil.which("nsenter") is None:
        return False
    try:
        with two_machines():
            return True
    except NotPermitted:
        return False


@contextmanager
def two_machines() -> Iterator[list[Prefix]]:
    """Both machines; they see the same processes and files, but every command has a /dev/shm of its own.

    Raises NotPermitted.
    """
    with joined_namespaces() as names:
        # `ip netns exec` would also mount another /sys, without the cgroups that slurmd looks for.
        own_memory = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]
        yield [["nsenter", f"--net=/run/netns/{name}", *own_memory] for name in names]


@contextmanager
def joined_namespaces() -> Iterator[tuple[str, str]]:
    """Names of two namespaces until the block ends, each with one of ADDRESSES and a loopback. Raises NotPermitted."""
    near, far = names = (f"async-grpo-{os.getpid()}-0", f"async-grpo-{os.getpid()}-1")
    with contextlib.ExitStack() as stack:
        for name in names:
            run("ip", "netns", "add", name)
            delete = ["ip", "netns", "delete", name]  # with its end of the cable
            stack.callback(subprocess.run, delete, check=True, capture_output=True)
        run("ip", "-n", near, "link", "add", CABLE, "type", "veth", "peer", "name", CABLE, "netns", far)
        for name, address in zip(names, ADDRESSES, strict=True):
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", CABLE)
            for card in ("lo", CABLE):
                run("ip", "-n", name, "link", "set", card, "up")
        yield names


def run(*command: str) -> str:
    """The output of a command. Raises NotPermitted."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    except FileNotFoundError as error:
        raise NotPermitted(f"{command[0]} is not installed") from error
    except subprocess.CalledProcessError as error:
        raise NotPermitted(f"{' '.join(command)}: {error.stderr.strip()}") from error
