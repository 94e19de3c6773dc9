"""deploy/install: its stages in their order, from locks that say what the code is written for. pip is imitated."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from async_grpo.utils import requirements
from tests.support.deploy_files import DEPLOY, ROOT, arguments_of

INSTALL = DEPLOY / "install"
PLATFORMS = ("cpu", "cuda", "ascend")
PIP = """
import json, os, sys
from pathlib import Path
read = {name: Path(name).read_text() for name in sys.argv if name.endswith("requirements.txt")}
told = ("VLLM_TARGET_DEVICE", "VLLM_VERSION_OVERRIDE")
environment = " ".join(os.environ[name] for name in told if name in os.environ)
assert not environment or os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0", "torch would load torch_npu"
with open(os.environ["CALLS"], "a") as file:
    print(json.dumps([sys.argv[1:], "".join(read.values()), environment]), file=file)
failing = os.environ.get("FAILING", "none")
sys.exit(any(failing in text for text in read.values()) and "--extra-index-url" not in sys.argv)
"""


class Calls(list[tuple[list[str], str, str]]):
    """What pip was asked: its arguments, the requirements, VLLM_TARGET_DEVICE and VLLM_VERSION_OVERRIDE."""

    def distributions(self) -> list[list[str]]:
        return [re.findall(r"^([a-z0-9][a-z0-9.-]*)", text, flags=re.MULTILINE) for _, text, _ in self]


def install(folder: Path, *arguments: str, code: int = 0, said: str = "", **environment: str) -> Calls:
    """Run the script with a pip that notes its calls, installs nothing, and fails for what FAILING names."""
    (folder / "pip").mkdir(exist_ok=True)
    (folder / "pip" / "__main__.py").write_text(PIP)
    (folder / "pip" / "__init__.py").write_text("import pkgutil\n__path__ = pkgutil.extend_path(__path__, __name__)\n")
    environment = {**os.environ, "PYTHONPATH": str(folder), "CALLS": str(folder / "calls"), **environment}
    command = [sys.executable, str(INSTALL), *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == code and said in ended.stderr, ended.stderr
    lines = (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []
    return Calls(tuple(json.loads(line)) for line in lines)


def pins(platform: str) -> dict[str, str]:
    """Distribution -> version or source, of a lock."""
    text = (DEPLOY / "locks" / f"{platform}.txt").read_text()
    return dict(re.findall(r"^([a-z0-9-]+)(?:==| @ )([^ \n]+)", text, flags=re.MULTILINE))


def test_ascend_is_installed_in_stages_none_of_which_lets_pip_resolve(tmp_path: Path) -> None:
    calls = install(tmp_path, "ascend", code=1, said="torch-npu (not installed), torch==2.10.0 (")
    _torch, packages, vllm, triton, mindspeed, project = calls
    assert all("--no-deps" in arguments for arguments, _, _ in calls)
    assert calls.distributions()[0] == ["torch", "torch"]
    assert {"torch-npu", "vllm-ascend", "megatron-core", "setuptools-scm", "setuptools-rust"} <= set(
        calls.distributions()[1]
    )
    assert not {"torch", "vllm", "mindspeed", "numpy<=1.26"} & set(calls.distributions()[1])
    assert (vllm[2], packages[2]) == (f"empty {requirements.VLLM_ASCEND}", "")
    assert {"--no-build-isolation", "--no-binary=vllm", "--require-hashes"} <= set(vllm[0])
    assert mindspeed[1] == f"mindspeed @ {requirements.MINDSPEED_SOURCE}\n"
    assert triton[1] == f"triton-ascend=={requirements.TRITON_ASCEND}\n"
    assert project[0] == ["install", "--no-deps", str(ROOT)]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_entry_of_a_lock_is_installed_once_and_each_file_is_known_by_its_hash(
    tmp_path: Path, platform: str
) -> None:
    stages = ("torch", "packages", "vllm", "triton-ascend", "mindspeed", "transformer-engine")
    known = {"cpu": stages[:2], "cuda": (stages[1], stages[5]), "ascend": stages[:5]}
    calls = install(tmp_path, platform, "--only", *known[platform])
    text = "".join(text for _, text, _ in calls)
    lock = (DEPLOY / "locks" / f"{platform}.txt").read_text()
    assert sorted(re.findall(r"^[a-z0-9].*", text, flags=re.M)) == sorted(re.findall(r"^[a-z0-9].*", lock, flags=re.M))
    unhashed = {entry for entry in re.findall(r"^[a-z0-9].*$", lock, flags=re.MULTILINE) if not entry.endswith(" \\")}
    assert {re.split("[= ]", entry)[0] for entry in unhashed} == (
        {"mindspeed", "triton-ascend"} if platform == "ascend" else set()
    )


def test_an_own_index_is_asked_only_where_the_others_lack_it(tmp_path: Path) -> None:
    calls = install(tmp_path, "cpu", "--only", "torch", "packages", FAILING="torch==")
    assert [("--extra-index-url" in arguments, len(text) > 1000) for arguments, text, _ in calls] == [
        (False, False),
        (True, False),
        (False, True),
    ]
    assert all("--require-hashes" in arguments for arguments, _, _ in calls)


def test_what_fails_ends_the_installation_and_an_unknown_stage_is_refused(tmp_path: Path) -> None:
    assert len(install(tmp_path, "cuda", code=1, FAILING="vllm==")) == 1
    (tmp_path / "calls").unlink()
    assert not install(tmp_path, "cpu", "--only", "mindspeed", code=2)


def test_what_an_image_has_is_kept(tmp_path: Path) -> None:
    for name in ("torch", "vllm", "triton-ascend", "redis"):
        folder = tmp_path / f"{name.replace('-', '_')}-9.9.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: 9.9\n")
    calls = install(tmp_path, "ascend", "--keep", "--only", "torch", "packages", "vllm", "triton-ascend", "mindspeed")
    packages, mindspeed = calls.distributions()
    assert mindspeed == ["mindspeed"]
    assert "redis" not in packages and "torch-npu" in packages


def test_the_installed_project_is_left_as_it_is_and_what_it_still_lacks_is_named(tmp_path: Path) -> None:
    calls = install(tmp_path, "ascend", "--installed", code=1, said="torch-npu (not installed), torch==2.10.0 (")
    assert len(calls) == 5 and not [arguments for arguments, _, _ in calls if str(ROOT) in arguments]


def test_stand_ins_are_built_from_copies_because_a_build_writes_beside_its_sources(tmp_path: Path) -> None:
    ((arguments, _, _),) = install(tmp_path, "cpu", "--only", "stand-ins")
    folders = [Path(each) for each in arguments[2:]]
    assert [folder.name for folder in folders] == ["torchaudio", "torchcodec", "torchvision", "triton"]
    assert not any(folder.is_relative_to(ROOT) for folder in folders)


def test_mindspeed_may_come_from_a_folder_or_a_mirror(tmp_path: Path) -> None:
    (call,) = install(tmp_path, "ascend", "--only", "mindspeed", MINDSPEED_SOURCE="/opt/MindSpeed")
    assert call[1] == "/opt/MindSpeed\n"


def test_locks_are_of_the_versions_that_the_code_is_written_for() -> None:
    cpu, cuda, ascend = map(pins, PLATFORMS)
    assert {lock["megatron-core"] for lock in (cpu, cuda, ascend)} == {requirements.MEGATRON_CORE}
    assert all("async-timeout" in lock for lock in (cpu, cuda, ascend)), "redis needs it on Python 3.11.2, of Debian 12"
    assert cuda["transformer-engine"] == cuda["transformer-engine-torch"] == requirements.TRANSFORMER_ENGINE
    assert arguments_of(DEPLOY / "cuda.Dockerfile")["VLLM_IMAGE"] == f"vllm/vllm-openai:v{cuda['vllm']}"
    assert ascend["vllm"] == ascend["vllm-ascend"] == requirements.VLLM_ASCEND
    assert ascend["torch-npu"] == requirements.TORCH_NPU
    assert ascend["torch"].partition("+")[0] == requirements.TORCH_ASCEND
    assert ascend["mindspeed"].endswith(f"@{requirements.MINDSPEED_COMMIT}")
    assert ascend["triton-ascend"] == requirements.TRITON_ASCEND


def test_commands_that_doctor_and_docs_name_are_commands_of_the_script(tmp_path: Path) -> None:
    texts = [value for name, value in vars(requirements).items() if name.startswith("INSTALL_")]
    texts += [page.read_text() for page in (*(ROOT / "docs").glob("*.md"), *DEPLOY.glob("*Dockerfile"))]
    found = {
        each.strip()
        for text in texts
        for each in re.findall(r"(?:deploy/|async-grpo )install ((?:cpu|cuda|ascend)[a-z -]*)", text)
    }
    assert {"cpu", "cuda", "ascend", "ascend --only mindspeed"} <= found
    for command in found:
        assert install(tmp_path, *command.split(" first")[0].split(), "--print") == []
    assert not re.search(r"pip install -e '\.\[|git clone.*MindSpeed", "".join(texts)), "a second way to install"
