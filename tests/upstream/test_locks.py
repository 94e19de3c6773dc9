"""The locks of deploy/ asked of the index, for both machines: they resolve, their files are there, and the Python of
the Ascend image is built from them. Skipped without uv or an index."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.deploy_files import DEPLOY, ROOT, each_platform
from tests.support.mindspeed import unpacked_source

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
MACHINES = ("x86_64", "aarch64")
each_machine = pytest.mark.parametrize("machine", MACHINES)
NOT_ON_PYPI = ("mindspeed @", "triton-ascend==", "torch==2.13.0+cpu", "torch==2.10.0+cpu")
BUILT_ON_ITS_MACHINE = ("transformer-engine-torch==",)


def load_lock() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lock", DEPLOY / "lock.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["lock"] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


lock = load_lock()


def uv(*arguments: str | Path, limit_s: float = 600.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [lock.find_uv(), "pip", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=limit_s
    )


@pytest.fixture(scope="module", autouse=True)
def index(tmp_path_factory: pytest.TempPathFactory) -> None:
    asked = tmp_path_factory.mktemp("index") / "asked.in"
    asked.write_text("pip\n")
    try:
        said = uv("compile", "--quiet", "--no-cache", asked, limit_s=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"uv does not answer ({error}); pip install uv")
    if said.returncode:
        pytest.skip(f"no package index answers: {said.stderr[-200:]}")


@each_platform
def test_a_lock_is_one_set_of_files_that_the_index_still_has(platform: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert lock.main(["--check", platform]) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    left_out = [*lock.LOCKS[platform].left_out, *lock.LOCKS[platform].elsewhere]
    assert said.startswith(f"{platform}: ") and all(name.partition(" @ ")[0] in said for name in left_out)


@each_platform
@each_machine
def test_an_extra_states_a_set_that_exists(platform: str, machine: str, tmp_path: Path) -> None:
    """PyPI has no CPU builds of torch for it, so where one is wanted torch is overridden by the same release."""
    wanted = lock.LOCKS[platform]
    (tmp_path / "overrides.txt").write_text("\n".join(wanted.overrides) if machine in wanted.cpu_torch else "")
    arguments = ("--extra", platform, "--python-version", "3.11", "--python-platform", f"{machine}-manylinux_2_34")
    said = uv("compile", "--quiet", "pyproject.toml", "--override", tmp_path / "overrides.txt", *arguments)
    assert said.returncode == 0, said.stderr


def reachable(platform: str, folder: Path) -> Path:
    """The entries of a lock that PyPI has as wheels, as a file of requirements."""
    text = (DEPLOY / "locks" / f"{platform}.txt").read_text()
    vllm = ("vllm==",) if platform == "ascend" else ()
    entries = [entry for entry in re.split(r"\n(?=\w)", text) if not entry.startswith("#")]
    kept = [entry for entry in entries if not entry.startswith((*NOT_ON_PYPI, *BUILT_ON_ITS_MACHINE, *vllm))]
    assert 0 < len(entries) - len(kept) <= 4
    (folder / "requirements.txt").write_text("\n".join(kept))
    return folder / "requirements.txt"


@each_platform
@each_machine
def test_nothing_has_to_be_compiled_but_what_says_so(platform: str, machine: str, tmp_path: Path) -> None:
    arguments = ("--dry-run", "--target", tmp_path / "layer", "--no-deps", "--no-build", "--require-hashes")
    target = ("--python-version", "3.11", "--python-platform", f"{machine}-manylinux_2_34")
    said = uv("install", *arguments, *target, "-r", reachable(platform, tmp_path))
    assert said.returncode == 0, said.stderr


def layer_for(machine: str, folder: Path) -> Path:
    """The Python of the Ascend image, as far as it is on PyPI, for another machine or this one."""
    target = ("--python-version", "3.11", "--python-platform", f"{machine}-manylinux_2_34")
    arguments = ("--target", folder / "layer", "--no-deps", "--no-build", "--require-hashes", *target)
    said = uv("install", "--quiet", *arguments, "-r", reachable("ascend", folder), limit_s=1500)
    assert said.returncode == 0, said.stderr
    return folder / "layer"


def test_the_python_of_the_ascend_image_is_built_for_aarch64(tmp_path: Path) -> None:
    layer = layer_for("aarch64", tmp_path)
    for name in ("torch", "torch_npu", "vllm_ascend", "megatron"):
        assert (layer / name).is_dir(), name
    assert not list(layer.glob("nvidia*")), "torch's build for CPUs"


@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="torch's CPU build is in the layer of aarch64, not of x86-64"
)
def test_the_sources_of_ascend_are_built_in_the_image_of_x86_64(tmp_path: Path) -> None:
    """By the script and pip, without CANN. torch is this environment's, because PyPI has no CPU build for x86-64."""
    layer = layer_for("x86_64", tmp_path)
    sources = unpacked_source(tmp_path / "mindspeed")
    given = {"PIP_TARGET": str(layer), "PYTHONPATH": str(layer), "MINDSPEED_SOURCE": str(sources)}
    command = [sys.executable, str(DEPLOY / "install"), "ascend", "--only", "vllm", "mindspeed"]
    ended = subprocess.run(command, env={**os.environ, **given}, capture_output=True, text=True, timeout=1500)
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = {path.name.removesuffix(".dist-info") for path in layer.glob("*.dist-info")}
    assert {"vllm-0.23.0", "vllm_ascend-0.23.0", "mindspeed-0.16.0", "megatron_core-0.16.1"} <= found
