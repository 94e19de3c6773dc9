"""Megatron-core on Ascend NPUs, through MindSpeed.

    torch --> torch_npu --> mindspeed.megatron_adaptor --> megatron      in this order, or Megatron keeps calling CUDA

The adaptor sends `torch.cuda` calls to the NPU (`torch_npu.contrib.transfer_to_npu`) and replaces functions of
Megatron. It reads the program's command line for its arguments, which are not ours: it sees an empty one, and is told
how the ranks are cut by `repatch`, the call that its own users with a configuration file make.

Written from the public interfaces of torch_npu and MindSpeed, and tested with stand-ins for them: it has not run on
an NPU yet (docs/platforms.md).
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from async_grpo.config.trainer import TrainerConfig
from async_grpo.errors import DependencyError
from async_grpo.utils.requirements import (
    CANN,
    INSTALL_MINDSPEED,
    INSTALL_TORCH_NPU,
    MINDSPEED_BRANCH,
    MINDSPEED_COMMIT,
    SOURCE_CANN,
    TORCH_ASCEND,
    TORCH_NPU,
    Check,
    Finding,
    installed,
    installed_commit,
    release,
)
from trainer.platform.accelerator import Accelerator
from trainer.platform.base import Device, LayerRole, Run, import_package, run_tool
from trainer.platform.probes import check_torch_sees

ENVIRONMENT: Mapping[str, str] = {
    # Micro-batches differ in length; without it the allocator's fixed blocks fragment until memory runs out.
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
    # Operators are handed to the device by a second thread, which also prepares them (level 2).
    "TASK_QUEUE_ENABLE": "2",
    # Host threads stay on the cores next to their NPU.
    "CPU_AFFINITY_CONF": "1",
    # Seconds for all ranks to meet: loading a large checkpoint takes longer on one than on another. Default: 120.
    "HCCL_CONNECT_TIMEOUT": "1800",
    # Seconds that a collective may take: above that of the process group, whose error says who was waited for.
    "HCCL_EXEC_TIMEOUT": "7200",
    # Kernels start in the order in which they are launched, which MindSpeed relies on as Megatron does.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}
"""Set only where the user's environment does not."""

CANN_FOLDERS = ("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann", "/usr/local/Ascend/latest")

_CANN_VERSION_FILES = (
    "version.cfg",
    "*/ascend_toolkit_install.info",
    "*/version.info",
    "version.info",
    "share/info/*/version.info",
)

_CANN_VERSION = re.compile(r"^\s*(?:version|Version|package_version)\s*=\s*[\"']?([0-9][0-9A-Za-z.]*)", re.MULTILINE)
_TORCH_FIX = f"python -c 'import torch, torch_npu' says why; {SOURCE_CANN}"
_NPU = re.compile(r"^\|\s*\d+\s+(?P<name>\S+)\s*\|\s*(?P<health>\w+)\s*\|.*$")
_CHIP = re.compile(r"^\|[\s\d]+\|\s*[0-9A-Fa-f]{4}:\S+\s*\|.*?\d+\s*/\s*(?P<total>\d+)\s*\|\s*$")
_DRIVER = re.compile(r"Version:\s*(\S+)")


class NpuPlatform(Accelerator):
    """HCCL between devices and gloo between processes. One device name stands for bins of different peak FLOP/s."""

    name = "npu"
    aliases = ("ascend",)
    device = "npu"
    backend = "cpu:gloo,npu:hccl"
    visible_variable = "ASCEND_RT_VISIBLE_DEVICES"
    network_variables = ("HCCL_SOCKET_IFNAME",)
    tool = "npu-smi"
    device_files = ("davinci[0-9]*",)
    packages = MappingProxyType({"torch": INSTALL_TORCH_NPU, "torch_npu": INSTALL_TORCH_NPU})
    unimported = "MindSpeed could not adapt it any more"
    driver_fix = (
        "install the Ascend driver and firmware; in a container: --device /dev/davinci0 (and the others) "
        "--device /dev/davinci_manager --device /dev/hisi_hdc -v /usr/local/dcmi:/usr/local/dcmi "
        "-v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi"
    )
    device_fix = f"Check npu-smi info and ASCEND_RT_VISIBLE_DEVICES, and that CANN's environment is set: {SOURCE_CANN}"

    def rank_environment(self, config: TrainerConfig) -> Mapping[str, str]:
        """The same for all layouts."""
        return ENVIRONMENT

    def devices(self, run: Run = run_tool) -> list[Device]:
        """The NPUs that `npu-smi info` lists."""
        return _parse_smi(run([self.tool, "info"]) or "")

    def package_probes(self) -> Sequence[Check]:
        """CANN, torch with torch_npu, and MindSpeed."""
        return (
            check_cann,
            check_torch,
            check_torch_npu,
            partial(check_torch_sees, "npu", "torch_npu", "HCCL", _TORCH_FIX),
            check_mindspeed,
        )

    def activate(self, config: TrainerConfig) -> None:
        """As on every accelerator; then adapt Megatron, by our arguments.

        MindSpeed's `repatch` looks for the names that it patches in every module. That would load all of transformers,
        whose modules are loaded when they are looked at, so transformers must not be imported yet.

        Raises DependencyError, too, for a torch_npu that is built for another torch, and for a MindSpeed without
        `repatch`.
        """
        pair = check_torch_npu()
        if installed("torch-npu") and not pair.ok:
            raise DependencyError(f"torch-npu {pair.found}. Run: {pair.fix}")
        super().activate(config)
        with empty_command_line():
            adaptor = import_package(self.name, "mindspeed.megatron_adaptor", INSTALL_MINDSPEED)
        if not hasattr(adaptor, "repatch"):
            raise DependencyError(
                "the installed MindSpeed has no megatron_adaptor.repatch, so it cannot be told how the ranks are cut: "
                f"it is not of the branch {MINDSPEED_BRANCH}. Run: {INSTALL_MINDSPEED}"
            )
        with empty_command_line():
            adaptor.repatch(mindspeed_arguments(config))

    def background_stream(self) -> Any:
        """A stream whose operators the calling thread launches itself.

        torch_npu queues the operators of all other streams in one queue of the host. A copy would wait there until the
        operators that the training has queued before it are launched, up to a whole micro-batch.
        """
        return self._torch().SyncLaunchStream()

    def model_options(self, *, experts: bool) -> Mapping[str, Any]:
        """Megatron's fused SwiGLU, which MindSpeed replaces by the NPU's. Its form for experts MindSpeed replaces only
        together with grouped matrix products, and torch.compile, which Megatron would use, has no NPU."""
        return {"bias_activation_fusion": not experts}

    def layer_replacements(self, config: Any) -> Mapping[LayerRole, type]:
        """MindSpeed's RMSNorm, which is fused, and the fused kernels of torch_npu."""
        from trainer.platform.fused_layers import NpuAttention, NpuRotation

        basic = import_package(self.name, "mindspeed.core.megatron_basic.megatron_basic", INSTALL_MINDSPEED)
        self.attention = "torch_npu's npu_fusion_attention"
        if config.context_parallel_size > 1:
            self.attention += ", over the keys of all ranks that share the sequences"
        layers: dict[LayerRole, type] = {
            LayerRole.norm: basic.PTNorm,
            LayerRole.rotation: NpuRotation,
            LayerRole.attention: NpuAttention,
        }
        if config.num_moe_experts:
            from trainer.platform.grouped_experts import NpuGroupedExperts

            self.experts = "torch_npu's npu_grouped_matmul"
            layers[LayerRole.experts] = NpuGroupedExperts
        return layers


def mindspeed_arguments(config: TrainerConfig) -> dict[str, Any]:
    """The arguments that MindSpeed's features read, under Megatron's names (`get_mindspeed_args` has them
    afterwards)."""
    return {
        "tensor_model_parallel_size": config.tensor_parallel,
        "pipeline_model_parallel_size": config.pipeline_parallel,
        "context_parallel_size": config.context_parallel,
        "expert_model_parallel_size": config.expert_parallel,
        "sequence_parallel": config.sequence_parallel,
        # Keys and values are gathered by `NpuAttention`: MindSpeed's schemes for it stay out of the way.
        "context_parallel_algo": "megatron_cp_algo",
        "use_distributed_optimizer": True,
        "variable_seq_lengths": True,
    }


@contextlib.contextmanager
def empty_command_line() -> Iterator[None]:
    """MindSpeed parses sys.argv when it is imported, and takes options that it does not know for Megatron's."""
    given, sys.argv = sys.argv, sys.argv[:1]
    try:
        yield
    finally:
        sys.argv = given


def check_cann(environment: Mapping[str, str] = os.environ, folders: tuple[str, ...] = CANN_FOLDERS) -> Finding:
    """Whether CANN's environment is set in this shell, and its version is the one that torch_npu is for."""
    home = environment.get("ASCEND_HOME_PATH") or environment.get("ASCEND_TOOLKIT_HOME")
    if home is None:
        there = [folder for folder in folders if Path(folder).is_dir()]
        found = f"installed in {there[0]}, but its environment is not set" if there else "not installed"
        return Finding("CANN", False, found, SOURCE_CANN if there else f"install CANN {CANN} (toolkit, kernels, NNAL)")
    files = (file for pattern in _CANN_VERSION_FILES for file in sorted(Path(home).glob(pattern)))
    matches = (_CANN_VERSION.search(file.read_text(errors="replace")) for file in files)
    version = next((match.group(1) for match in matches if match), None)
    if version is None:
        return Finding("CANN", None, f"{home}, version unknown (written for {CANN})", SOURCE_CANN)
    right = version.startswith(CANN)
    found = f"{version} in {home}" + ("" if right else f", not {CANN}")
    return Finding("CANN", right, found, f"install CANN {CANN}, then {SOURCE_CANN}")


def check_torch() -> Finding:
    """Whether torch has the release that torch_npu is built for."""
    version = installed("torch")
    right = version is not None and release(version) == TORCH_ASCEND
    found = f"{version}, not {TORCH_ASCEND}" if version and not right else version or "not installed"
    return Finding("PyTorch", right, found, INSTALL_TORCH_NPU)


def check_torch_npu() -> Finding:
    """Whether torch_npu has the same release as torch."""
    version, torch_version = installed("torch-npu"), installed("torch")
    if version is None:
        return Finding("torch_npu", False, "not installed", INSTALL_TORCH_NPU)
    if torch_version is None or release(version) != release(torch_version):
        found = f"{version}, built for torch {release(version)}, but torch is {torch_version or 'not installed'}"
        return Finding("torch_npu", False, found, INSTALL_TORCH_NPU)
    found = version if version == TORCH_NPU else f"{version} (written for {TORCH_NPU})"
    return Finding("torch_npu", True, found, INSTALL_TORCH_NPU)


def check_mindspeed() -> Finding:
    """Whether MindSpeed is there, from the commit that this project is written for."""
    version, commit = installed("mindspeed"), installed_commit("mindspeed")
    if version is None:
        return Finding("MindSpeed", False, "not installed", INSTALL_MINDSPEED)
    right = commit == MINDSPEED_COMMIT
    found = f"{version}, commit {commit or 'unknown'}" + ("" if right else f" (written for {MINDSPEED_COMMIT})")
    return Finding("MindSpeed", True if right else None, found, INSTALL_MINDSPEED)


def _parse_smi(text: str) -> list[Device]:
    """The devices of `npu-smi info`: a table with two lines per NPU.

    The first names the NPU; the second ends with the use of its HBM, `used / total` in MB. An NPU of two chips has two
    second lines, and counts as two devices, as it does for torch.
    """
    version = _DRIVER.search(text)
    driver, name, health = version.group(1) if version else "unknown", "", ""
    found: list[Device] = []
    for line in text.splitlines():
        if chip := _CHIP.match(line):
            found.append(Device(len(found), f"Ascend{name}", float(chip["total"]) / 1024, driver, health))
        elif npu := _NPU.match(line):
            name, health = npu["name"], npu["health"]
    return found
