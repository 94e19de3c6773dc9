"""Messages while the roles of a run start, and after one has died."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from async_grpo.app.launch.first_policy import _format_progress
from async_grpo.app.launch.role_process import RoleProcess, RoleSpec, StartTimes
from async_grpo.config import RunConfig

CONFIG = RunConfig.model_validate({"name": "demo", "model": {"random": {}}})


def ended(tmp_path: Path, name: str, program: str) -> tuple[str, str]:
    """The stage of a role that has run the program, and the explanation of its end."""

    async def run() -> tuple[str, str]:
        role = await RoleProcess.start(RoleSpec(name, [sys.executable, "-c", program], tmp_path / "log", 0), "demo")
        code = await role.wait()
        return role.stage(), role.explain(code)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("role", "printed", "stage"),
    [
        ("trainer", "", "importing Megatron-core"),
        ("trainer", "01:00:19.6 info trainer http  address=http://127.0.0.1:1", "building the model"),
        ("trainer", '{"event": "http", "address": "http://127.0.0.1:1"}', "building the model"),
        ("rollout-1", "see https://docs.vllm.ai", "importing the engine"),
        ("rollout-1", "http  address=x\nthe engine runs  requests_at_once=208", "checking its log-probabilities"),
    ],
)
def test_the_log_of_a_role_shows_the_stage_of_its_start(tmp_path: Path, role: str, printed: str, stage: str) -> None:
    assert ended(tmp_path, role, f"print({printed!r})")[0] == stage


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (
            "import os; print('no memory left for tensor x', flush=True); os.abort()",
            "was killed by SIGABRT: no memory left for",
        ),
        ("print('gave up\\x1b[2J'); raise SystemExit(3)", "ended with exit code 3: gave up[2J ("),
        ("import os; print('at work', flush=True); os.kill(os.getpid(), 9)", "by SIGKILL: the kernel does this when"),
    ],
)
def test_the_reason_for_an_exit_is_the_last_line_without_an_error(tmp_path: Path, program: str, said: str) -> None:
    assert said in ended(tmp_path, "trainer", program)[1]


def test_start_times_are_stored_by_kind_of_role_and_a_damaged_file_is_ignored(tmp_path: Path) -> None:
    file = tmp_path / "cache" / "starts.json"
    StartTimes(CONFIG, file).record_start("rollout-3", 14.04)
    other = CONFIG.model_copy(update={"model": CONFIG.model.model_copy(update={"path": Path("/m")})})
    StartTimes(CONFIG, file).record_start("rollout-0", 0.2)
    assert StartTimes(CONFIG, file).usual_s("rollout-0") == 14.0
    assert (StartTimes(CONFIG, file).usual_s("trainer"), StartTimes(other, file).usual_s("rollout-0")) == (None, None)
    file.write_text("{")
    assert StartTimes(CONFIG, file).usual_s("rollout-0") is None


def test_progress_of_a_generated_policy_includes_the_time_left() -> None:
    line = json.dumps({"step": 100, "loss": 0.5, "elapsed_s": 20.0})
    assert _format_progress(line, 400).endswith("(step 100 of at most 400: 60 s left)")
    assert _format_progress("no JSON\n", 400) == "no JSON"
    assert _format_progress(json.dumps({"step": 1}), None) == "first policy: step 1"
