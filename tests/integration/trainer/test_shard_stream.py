"""Shards of another node come whole through small buffers; a sender that dies is named, and not waited for."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

from async_grpo.utils.child_process import child_argv
from tests.support.trainer_programs.launching import ROOT


def test_tensors_come_in_pieces_and_a_dead_sender_is_named(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tests.support.trainer_programs.streamed_shards"]
    ranks = [subprocess.Popen(child_argv([*program, str(rank), str(tmp_path)]), cwd=ROOT) for rank in (0, 1)]
    assert [rank.wait(60) for rank in ranks] == [0, -signal.SIGKILL]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["equal"] == [True] * 4
    assert found["end"].startswith("the transfer of weights between rank 1 and rank 0 failed")
