"""The engine on vLLM's model runner V2, the default of vLLM 0.32 on CUDA, while a CPU has V1.

V2 needs Triton. Triton has no CPU backend on the index, but an interpreter of its kernels: with it, and with a backend
that exists in name only, vLLM's CPU worker runs V2's own model runner, sampler and kernels.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
TRITON = "3.9.0"
DOWNLOAD_TIMEOUT_S = 300.0
RUN_TIMEOUT_S = 1500.0
BACKEND = """
from triton.backends.{module} import {base}

def _missing(*arguments, **named):
    raise NotImplementedError("only the interpreter runs here")

Cpu = type("Cpu", ({base},), dict.fromkeys({base}.__abstractmethods__, _missing) | {more})
"""


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Triton and a backend `cpu` without content. Skips if the index cannot be reached."""
    folder = tmp_path_factory.mktemp("triton")
    words = ["install", "--quiet", "--no-deps", "--only-binary", ":all:", "--target", str(folder), f"triton=={TRITON}"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words], capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S
    )
    if done.returncode:
        pytest.skip(f"triton {TRITON} cannot be downloaded: {done.stderr[-300:]}")
    backend = folder / "triton" / "backends" / "cpu"
    backend.mkdir()
    (backend / "__init__.py").touch()
    (backend / "compiler.py").write_text(BACKEND.format(module="compiler", base="BaseBackend", more={}))
    active = "{'__init__': lambda self: None, 'is_active': staticmethod(lambda: True)}"
    (backend / "driver.py").write_text(BACKEND.format(module="driver", base="DriverBase", more=active))
    return folder


@pytest.mark.parametrize(
    ("file", "tests"),
    [
        ("tests/contract/test_engines.py", "vllm"),
        ("tests/integration/rollout_server/test_vllm_truncation.py", "reported_tokens"),
    ],
)
def test_the_engine_keeps_its_contract_on_model_runner_v2(interpreter: Path, file: str, tests: str) -> None:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(interpreter), str(ROOT)]),
        "TRITON_BACKENDS_IN_TREE": "1",
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",  # vLLM refuses to start if it cannot
    }
    words = ["-q", "-p", "no:cacheprovider", "-k", tests, file]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout[-6000:]
