"""A trainer that dies in the middle of an upload goes on elsewhere, from the bucket alone, as if it had not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from async_grpo.config import dump, validate
from tests.support.s3_server import s3_server
from tests.support.trainer_programs.copied_checkpoints import LAST, SAVED
from tests.support.trainer_programs.models import make_model

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.slow


def test_killed_in_the_middle_of_an_upload_it_goes_on_in_an_empty_folder_bit_for_bit(tmp_path: Path) -> None:
    raw: dict[str, Any] = {
        "name": "copied",
        "runs_dir": str(tmp_path),
        "model": {"random": {}},
        "rollout": {"vllm": {"max_model_len": 110}},
        "trainer": {"micro_batch_tokens": 110, "optimizer": {"lr": 1e-3, "weight_decay": 0.1}},
    }
    config, model, out = tmp_path / "config.yaml", make_model(tmp_path, "qwen2-untied"), tmp_path / "facts.json"
    config.write_text(dump(validate(raw, "test")))
    with s3_server() as url:
        words = ["-m", "tests.support.trainer_programs.copied_checkpoints", config, model, url, out]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, *map(str, words)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    facts = json.loads(out.read_text())
    assert facts["death"] == signal.SIGKILL
    assert facts["left"] == [SAVED, SAVED * 2], "no part of the torn one has come to the bucket"
    assert facts["resumed"] == SAVED
    straight, elsewhere = facts["last"]["straight"], facts["last"]["elsewhere"]
    assert elsewhere["steps"] == {step: found for step, found in straight["steps"].items() if int(step) > SAVED}
    assert elsewhere["files"] == straight["files"] != {}
    assert facts["stored"][-1] == [LAST, 2]
