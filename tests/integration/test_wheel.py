"""The wheel as a user installs it: built through the sdist, in environments of its own, from an empty folder.

`installed` sees the packages of this environment through a .pth file, but not this project, which is linked here by a
.pth file of its own that is not read there. `bare` has what pip installs for the wheel without extras, and no more:
no torch, no vLLM, no Megatron-core, no Valkey.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support.whole_run import CONFIG

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    words = [sys.executable, "-m", "uv", "build", "--no-build-isolation", "--python", sys.executable]
    done = subprocess.run([*words, "--out-dir", str(out), str(ROOT)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(list(out.glob("*.tar.gz"))) == 1
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of an environment that has the wheel."""
    home = tmp_path_factory.mktemp("user") / "venv"
    venv.create(home, with_pip=True)
    pip = [home / "bin/python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(pip, check=True, timeout=300, env=without_the_checkout())
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    (site / "packages-of-this-environment.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin"


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of an environment with the wheel and its own dependencies, from pip's index."""
    home = tmp_path_factory.mktemp("bare") / "venv"
    venv.create(home, with_pip=True)
    pip = [home / "bin/python", "-m", "pip", "install", "--quiet", "--progress-bar=off", wheel]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=600, env=without_the_checkout())
    if "NewConnectionError" in done.stderr or "NameResolutionError" in done.stderr:
        pytest.skip("pip reaches no index")
    assert done.returncode == 0, done.stderr
    return home / "bin"


def without_the_checkout() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


def type_in(installed: Path, folder: Path, *words: str, code: int = 0) -> str:
    """What the command prints; it must end with `code`."""
    environment = without_the_checkout()
    environment |= {"COLUMNS": "160", "ASYNC_GRPO_CACHE": str(folder / "cache")}
    environment |= {"PATH": f"{installed}{os.pathsep}{environment['PATH']}"}
    done = subprocess.run(
        [installed / words[0], *words[1:]], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == code and "Traceback" not in done.stderr, f"{' '.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout + (done.stderr if code else "")


def test_wheel_and_sdist_are_what_an_index_takes(wheel: Path) -> None:
    words = [sys.executable, "-m", "twine", "check", "--strict", *wheel.parent.glob("async_grpo-*")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.count("PASSED") == 2, done.stdout


def test_the_wheel_has_every_file_that_is_no_python(wheel: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "async_grpo", "buffer", "rollout_server", "trainer", "configs"],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=60,
    ).stdout.split()  # fmt: skip
    wanted = {f"async_grpo/{name}" if name.startswith("configs/") else name for name in tracked}
    names = set(zipfile.ZipFile(wheel).namelist())
    assert wanted - names == {"async_grpo/configs", "async_grpo/deploy"}, (
        "package-data in pyproject.toml lacks a pattern"
    )
    installer = {name.removeprefix("async_grpo/deploy/") for name in names if name.startswith("async_grpo/deploy/")}
    stand_ins = {f"stand-ins/{name}/pyproject.toml" for name in ("torchaudio", "torchcodec", "torchvision", "triton")}
    assert installer == {"install", "locks/cpu.txt", "locks/cuda.txt", "locks/ascend.txt", *stand_ins}


def test_the_package_is_that_of_the_wheel(installed: Path, tmp_path: Path) -> None:
    code = "import async_grpo, buffer, rollout_server, trainer; print(async_grpo.__file__, trainer.__file__)"
    for file in type_in(installed, tmp_path, "python", "-c", code).split():
        assert Path(file).is_relative_to(installed.parent)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("--help", "import-config"),
        ("configs", "quickstart"),
        ("configs qwen2.5_7b_gsm8k_ascend --to mine", "mine/layers/ascend.yaml"),
        ("run quickstart --dry-run", "quickstart"),
        ("run configs/qwen2.5_7b_gsm8k_cuda.yaml --dry-run", "Qwen2.5-7B"),
        ("view --help", "runs"),
        ("sweep quickstart --grid max_staleness=0,2 --dry-run", "max_staleness"),
        ("doctor", "async-grpo doctor"),
    ],
)
def test_a_command_works_from_an_empty_folder(installed: Path, tmp_path: Path, words: str, shown: str) -> None:
    assert shown in type_in(installed, tmp_path, "async-grpo", *words.split())


def test_a_whole_run_works_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(CONFIG.format(steps=2, max_tokens=8))
    type_in(installed, tmp_path, "async-grpo", "run", "small.yaml")
    summary = json.loads((tmp_path / "runs/small/summary.json").read_text())
    assert summary["groups"]["trained"] == 8  # 2 steps of 4 groups
    assert (tmp_path / "runs/small/report.md").is_file()


@pytest.mark.parametrize(
    ("words", "code", "shown"),
    [
        ("--version", 0, "async-grpo "),
        ("--help", 0, "import-config"),
        ("run quickstart --dry-run", 0, "a start would be refused: a run needs torch, megatron, vllm"),
        ("run quickstart", 1, "Run: async-grpo install cpu"),
        ("doctor", 1, "PyTorch, Megatron-core, vLLM:\n  async-grpo install cpu\n"),
        ("install cpu --print", 0, "torch: pip install --no-deps --require-hashes torch=="),
        ("install ascend --only mindspeed --print", 0, "mindspeed: pip install"),
    ],
)
def test_the_wheel_alone_says_what_to_type(bare: Path, tmp_path: Path, words: str, code: int, shown: str) -> None:
    said = type_in(bare, tmp_path, "async-grpo", *words.split(), code=code)
    assert shown in said
    assert not re.search(r"\bmake [.a-z]+$|python deploy/|\./deploy", said, re.MULTILINE), "needs the source tree"


@pytest.mark.parametrize("name", [path.stem for path in sorted((ROOT / "configs").glob("*.yaml"))])
def test_every_shipped_configuration_is_planned_and_examined_by_the_wheel_alone(
    bare: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "train.jsonl").write_text('{"question": "1+1?", "answer": "#### 2"}\n' * 80)
    given = ("-o", "data.path=train.jsonl") if name == "gsm8k_tiny" else ()
    assert "dry run: nothing is started" in type_in(bare, tmp_path, "async-grpo", "run", name, *given, "--dry-run")
    found = json.loads(type_in(bare, tmp_path, "async-grpo", "doctor", name, *given, "--json", code=1))
    fixes = {each["name"]: each["fix"] for each in found["findings"] if each["ok"] is False}
    assert (
        fixes["vLLM"].startswith("async-grpo install ") and all(fixes.values()) and "see the left" not in fixes.values()
    )
