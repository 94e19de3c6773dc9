"""The versions that this project is written for, the commands that install them (stages of deploy/install), and checks.

`async-grpo doctor` and the trainer's platforms share them: the doctor checks what each platform needs.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from dataclasses import dataclass

MEGATRON_CORE = "0.16.1"
"""Exactly this version: layer specs, checkpoints and the CPU platform use its internals."""
MINDSPEED_BRANCH = "core_r0.16.0"
MINDSPEED_COMMIT = "e4772499f7eb9fa9a68919dd1eaddef00e915b2d"
"""Of that branch, of 10 July 2026: the sources that tests/upstream reads."""
MINDSPEED_SOURCE = f"git+https://gitcode.com/Ascend/MindSpeed.git@{MINDSPEED_COMMIT}"
TORCH_ASCEND = "2.10.0"
TORCH_NPU = "2.10.0.post4"
TRITON_ASCEND = "3.2.2"
CANN = "9.1.0"
VLLM_ASCEND = "0.23.0"
"""Version of vllm-ascend, and of the vllm that it extends."""
TRANSFORMER_ENGINE = "2.18.0"
STAND_IN = "0.99.0"
"""Version of the empty distributions in deploy/stand-ins."""
INSTALL_CPU = "async-grpo install cpu"
INSTALL_STAND_INS = "async-grpo install cpu --only stand-ins"
INSTALL_CUDA = "async-grpo install cuda"
INSTALL_TRANSFORMER_ENGINE = "async-grpo install cuda --only transformer-engine"
INSTALL_ASCEND = "async-grpo install ascend --only packages --only vllm --only triton-ascend"
INSTALL_TORCH_NPU = "async-grpo install ascend --only torch --only packages"
INSTALL_MINDSPEED = "async-grpo install ascend --only mindspeed"
INSTALL = {"cpu": INSTALL_CPU, "cuda": INSTALL_CUDA, "npu": "async-grpo install ascend"}
"""By the trainer's platform."""
SOURCE_CANN = "source /usr/local/Ascend/ascend-toolkit/set_env.sh"


def installed(distribution: str) -> str | None:
    """The installed version of a distribution; None if there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed_commit(distribution: str) -> str | None:
    """The commit that pip installed a distribution from; None if it came from elsewhere, or is not installed."""
    try:
        origin = importlib.metadata.distribution(distribution).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return None
    return json.loads(origin or "{}").get("vcs_info", {}).get("commit_id")


def release(version: str) -> str:
    """`2.10.0.post4+cpu` -> `2.10.0`: the part that must agree between packages that are built for each other."""
    parts = version.partition("+")[0].split(".")
    return ".".join(part for part in parts[:3] if part.isdigit())


def numbers(version: str) -> tuple[int, ...]:
    """`0.32.0+cpu` -> (0, 32, 0), to compare releases."""
    return tuple(int(part) for part in release(version).split("."))


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `ok` is None for what is optional and missing; `fix` is the command that helps."""

    name: str
    ok: bool | None
    found: str
    fix: str = ""


Check = Callable[[], Finding]


def exactly(name: str, distribution: str, wanted: str, fix: str) -> Finding:
    """Check a package of which only one version is right."""
    version = installed(distribution)
    found = f"{version}, not {wanted}" if version not in (None, wanted) else version or "not installed"
    return Finding(name, version == wanted, found, fix)


def present(name: str, distribution: str, fix: str) -> Finding:
    """Check a package of which any version that pip accepted is right."""
    version = installed(distribution)
    return Finding(name, version is not None, version or "not installed", fix)


def optional(name: str, distribution: str, fix: str, wanted: str | None = None) -> Finding:
    """Check a package that is useful but not needed; of `wanted`, if only one version was tried or read."""
    version = installed(distribution)
    if version and wanted not in (None, version):
        return Finding(name, None, f"{version} (written for {wanted})", fix)
    return Finding(name, True if version else None, version or "not installed", fix)
