"""The versions that this project is written for, the commands that install them, and checks of the installation.

`async-grpo doctor` and the trainer's platforms share them: the doctor checks what each platform needs.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass

MEGATRON_CORE = "0.16.1"
"""Exactly this version: layer specs, checkpoints and the CPU platform use its internals."""
MINDSPEED_BRANCH = "core_r0.16.0"
TORCH_ASCEND = "2.10.0"
TORCH_NPU = "2.10.0.post4"
CANN = "9.1.0"
VLLM_ASCEND = "0.23.0"
"""Version of vllm-ascend, and of the vllm that it extends."""
STAND_IN = "0.99.0"
"""Version of the empty distributions in deploy/stand-ins."""
INSTALL_MEGATRON = f"pip install megatron-core=={MEGATRON_CORE}"
INSTALL_CPU = "make .venv, or: pip install ./deploy/stand-ins/* -e '.[cpu]'"
INSTALL_CUDA = "pip install -e '.[cuda]'"
INSTALL_ASCEND = "pip install -e '.[ascend]'"
INSTALL_TORCH_NPU = f"pip install torch=={TORCH_ASCEND} torch-npu=={TORCH_NPU}"
INSTALL_MINDSPEED = (
    f"git clone -b {MINDSPEED_BRANCH} https://gitcode.com/Ascend/MindSpeed.git && pip install -e MindSpeed"
)
INSTALL_TRANSFORMER_ENGINE = "pip install --no-build-isolation 'transformer-engine[pytorch]'"
SOURCE_CANN = "source /usr/local/Ascend/ascend-toolkit/set_env.sh"


def installed(distribution: str) -> str | None:
    """The installed version of a distribution; None if there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


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
    found = version or "not installed"
    return Finding(name, version == wanted, found if version == wanted else f"{found}, not {wanted}", fix)


def present(name: str, distribution: str, fix: str) -> Finding:
    """Check a package of which any version that pip accepted is right."""
    version = installed(distribution)
    return Finding(name, version is not None, version or "not installed", fix)


def optional(name: str, distribution: str, fix: str) -> Finding:
    """Check a package that is useful but not needed."""
    version = installed(distribution)
    return Finding(name, True if version else None, version or "not installed", fix)
