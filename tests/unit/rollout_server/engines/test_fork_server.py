"""Engine processes forked from a process that has only imported vLLM."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from async_grpo.config.rollout import VllmConfig
from async_grpo.utils.processes import uncollected
from rollout_server.engines.vllm import fork_server

PROGRAM = """
import fcntl, importlib, os
from async_grpo.config.rollout import VllmConfig
from rollout_server.engines.vllm import fork_server

def report(queue):
    queue.put((os.getppid(), os.environ["SET_LATER"], os.path.exists("/proc/self/fd/200")))

if __name__ == "__main__":
    fork_server._PRELOADED_MODULES, fork_server._ENGINE_STARTER_MODULE = ("colorsys",), "cmd"  # vLLM takes seconds
    fcntl.fcntl(1, fcntl.F_DUPFD, 200)
    fork_server.import_and_fork(VllmConfig())
    os.environ["SET_LATER"] = "seen"
    context = importlib.import_module("cmd").get_mp_context()
    queue = context.SimpleQueue()
    process = context.Process(target=report, args=(queue,))
    process.start()
    parent, value, is_open = queue.get()
    process.join(10)
    print(parent != os.getpid(), value, is_open, process.exitcode)
"""


def test_a_forked_process_gets_the_current_environment_and_no_open_files(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=30)
    assert (done.stdout, done.stderr) == ("True seen False 0\n", "")


@pytest.mark.parametrize("other", [{"platform": "cuda"}, {"tensor_parallel": 2}, {"multiprocessing": False}])
def test_other_engines_are_started_by_vllm_itself(other: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server.forkserver, "ensure_running", lambda: pytest.fail("forked"))
    fork_server.import_and_fork(VllmConfig.model_validate(other))


def test_imports_run_without_garbage_collection_and_are_then_frozen() -> None:
    try:
        with pytest.raises(ImportError), uncollected():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() and gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
