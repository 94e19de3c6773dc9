"""Megatron-core on Ascend NPUs, through MindSpeed.

    torch --> torch_npu --> mindspeed.megatron_adaptor --> megatron      in this order, or Megatron keeps calling CUDA

The adaptor redirects `torch.cuda` calls to the NPU (`torch_npu.contrib.transfer_to_npu`) and patches functions of
Megatron. It parses the program's command line for its own arguments. We hide ours from it and pass the parallel sizes
through `repatch`, MindSpeed's call for programs that are configured by a file.

Written from the public interfaces of torch_npu and MindSpeed, and tested with replacements of them: it has not run on
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
from trainer.platform.base import Device, LayerRole, RunTool, import_package, run_tool
from trainer.platform.probes import check_torch_sees

ENVIRONMENT: Mapping[str, str] = {
    # Micro-batches differ in length. With fixed blocks the allocator fragments until memory runs out.
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
    # Prepare operators and submit them to the device in a second thread (level 2).
    "TASK_QUEUE_ENABLE": "2",
    # Pin host threads to the cores next to their NPU.
    "CPU_AFFINITY_CONF": "1",
    # Maximum seconds to connect all ranks. With the default, 120, ranks that load a large checkpoint come too late.
    "HCCL_CONNECT_TIMEOUT": "1800",
    # Maximum seconds per collective. Above the timeout of the process group, whose error names the missing ranks.
    "HCCL_EXEC_TIMEOUT": "7200",
    # Start kernels in the order in which they are launched: MindSpeed relies on it, as Megatron does.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}
"""Variables of every rank, unless the user's environment sets them."""

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
    """HCCL between devices and gloo between processes.

    Has no `stated_tflops`: devices with different peak FLOP/s have the same name.
    """

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
        """Return `ENVIRONMENT` for every parallel layout."""
        return ENVIRONMENT

    def list_devices(self, run: RunTool = run_tool) -> list[Device]:
        """Return the NPUs that `npu-smi info` lists."""
        return _parse_smi(run([self.tool, "info"]) or "")

    def package_probes(self) -> Sequence[Check]:
        """Check CANN, torch, torch_npu and MindSpeed."""
        return (
            check_cann,
            check_torch,
            check_torch_npu,
            partial(check_torch_sees, "npu", "torch_npu", "HCCL", _TORCH_FIX),
            check_mindspeed,
        )

    def activate(self, config: TrainerConfig) -> None:
        """Select the device as on every accelerator, then let MindSpeed patch Megatron for our parallel sizes.

        MindSpeed's `repatch` searches all loaded modules for the names that it patches. transformers loads its modules
        when they are accessed, so this would load all of it: transformers must not be imported yet.

        Also raises DependencyError for a torch_npu built for another torch, and for a MindSpeed without `repatch`.
        """
        finding = check_torch_npu()
        if installed("torch-npu") and not finding.ok:
            raise DependencyError(f"torch-npu {finding.found}. Run: {finding.fix}")
        super().activate(config)

        with empty_command_line():
            adaptor = import_package(self.name, "mindspeed.megatron_adaptor", INSTALL_MINDSPEED)
        if not hasattr(adaptor, "repatch"):
            raise DependencyError(
                "the installed MindSpeed has no megatron_adaptor.repatch, so the parallel sizes cannot be passed to "
                f"it: it is not from the branch {MINDSPEED_BRANCH}. Run: {INSTALL_MINDSPEED}"
            )
        with empty_command_line():
            adaptor.repatch(mindspeed_arguments(config))

    def background_stream(self) -> Any:
        """Return a stream whose operators are launched by the calling thread.

        torch_npu puts the operators of all other streams into one host queue. There a copy would wait for all training
        operators queued before it, up to a whole micro-batch.
        """
        return self._torch_device().SyncLaunchStream()

    def model_options(self, *, experts: bool) -> Mapping[str, Any]:
        """Enable Megatron's fused SwiGLU, which MindSpeed replaces by the NPU's, except for experts.

        For experts MindSpeed replaces it only together with grouped matrix products. Megatron would then use
        torch.compile, which does not support NPUs.
        """
        return {"bias_activation_fusion": not experts}

    def layer_replacements(self, config: Any) -> Mapping[LayerRole, type]:
        """Return MindSpeed's fused RMSNorm and the fused kernels of torch_npu."""
        from trainer.platform.fused_layers import NpuAttention, NpuRotation

        self.attention = "torch_npu's npu_fusion_attention"
        if config.context_parallel_size > 1:
            self.attention += ", over the keys of all ranks that share the sequences"

        basic = import_package(self.name, "mindspeed.core.megatron_basic.megatron_basic", INSTALL_MINDSPEED)
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
    """Return the arguments of MindSpeed's features, under Megatron's names. `get_mindspeed_args` returns them later."""
    return {
        "tensor_model_parallel_size": config.tensor_parallel,
        "pipeline_model_parallel_size": config.pipeline_parallel,
        "context_parallel_size": config.context_parallel,
        "expert_model_parallel_size": config.expert_parallel,
        "sequence_parallel": config.sequence_parallel,
        # `NpuAttention` gathers keys and values itself. This value leaves MindSpeed's context parallelism off.
        "context_parallel_algo": "megatron_cp_algo",
        "use_distributed_optimizer": True,
        "variable_seq_lengths": True,
    }


@contextlib.contextmanager
def empty_command_line() -> Iterator[None]:
    """Hide our arguments from MindSpeed, which parses sys.argv on import and passes unknown options to Megatron."""
    command_line = sys.argv
    sys.argv = command_line[:1]
    try:
        yield
    finally:
        sys.argv = command_line


def check_cann(environment: Mapping[str, str] = os.environ, folders: tuple[str, ...] = CANN_FOLDERS) -> Finding:
    """Check that CANN's environment is set in this shell, and that torch_npu is built for its version."""
    home = environment.get("ASCEND_HOME_PATH") or environment.get("ASCEND_TOOLKIT_HOME")
    if home is None:
        for folder in folders:
            if Path(folder).is_dir():
                state = f"installed in {folder}, but its environment is not set"
                return Finding("CANN", False, state, SOURCE_CANN)
        return Finding("CANN", False, "not installed", f"install CANN {CANN} (toolkit, kernels, NNAL)")

    version = _read_cann_version(Path(home))
    if version is None:
        return Finding("CANN", None, f"{home}, version unknown (written for {CANN})", SOURCE_CANN)
    fix = f"install CANN {CANN}, then {SOURCE_CANN}"
    if not version.startswith(CANN):
        return Finding("CANN", False, f"{version} in {home}, not {CANN}", fix)
    return Finding("CANN", True, f"{version} in {home}", fix)


def _read_cann_version(home: Path) -> str | None:
    for pattern in _CANN_VERSION_FILES:
        for file in sorted(home.glob(pattern)):
            match = _CANN_VERSION.search(file.read_text(errors="replace"))
            if match:
                return match.group(1)
    return None


def check_torch() -> Finding:
    """Check that torch has the release that torch_npu is built for."""
    version = installed("torch")
    if version is None:
        return Finding("PyTorch", False, "not installed", INSTALL_TORCH_NPU)
    if release(version) != TORCH_ASCEND:
        return Finding("PyTorch", False, f"{version}, not {TORCH_ASCEND}", INSTALL_TORCH_NPU)
    return Finding("PyTorch", True, version, INSTALL_TORCH_NPU)


def check_torch_npu() -> Finding:
    """Check that torch_npu has the same release as torch."""
    version = installed("torch-npu")
    if version is None:
        return Finding("torch_npu", False, "not installed", INSTALL_TORCH_NPU)
    torch_version = installed("torch")
    if torch_version is None or release(version) != release(torch_version):
        state = f"{version}, built for torch {release(version)}, but torch is {torch_version or 'not installed'}"
        return Finding("torch_npu", False, state, INSTALL_TORCH_NPU)
    state = version if version == TORCH_NPU else f"{version} (written for {TORCH_NPU})"
    return Finding("torch_npu", True, state, INSTALL_TORCH_NPU)


def check_mindspeed() -> Finding:
    """Check that MindSpeed is installed from the commit that this project is written for."""
    version = installed("mindspeed")
    if version is None:
        return Finding("MindSpeed", False, "not installed", INSTALL_MINDSPEED)
    commit = installed_commit("mindspeed")
    if commit != MINDSPEED_COMMIT:
        state = f"{version}, commit {commit or 'unknown'} (written for {MINDSPEED_COMMIT})"
        return Finding("MindSpeed", None, state, INSTALL_MINDSPEED)
    return Finding("MindSpeed", True, f"{version}, commit {commit}", INSTALL_MINDSPEED)


def _parse_smi(text: str) -> list[Device]:
    """Return the devices in the table of `npu-smi info`, which has at least two lines per NPU.

    The first line names the NPU. The second ends with the use of its HBM, `used / total` in MB. An NPU with two chips
    has two such lines, and counts as two devices, as it does for torch.
    """
    version = _DRIVER.search(text)
    driver = version.group(1) if version else "unknown"

    devices: list[Device] = []
    name = health = ""
    for line in text.splitlines():
        if chip := _CHIP.match(line):
            devices.append(Device(len(devices), f"Ascend{name}", float(chip["total"]) / 1024, driver, health))
        elif npu := _NPU.match(line):
            name = npu["name"]
            health = npu["health"]
    return devices
