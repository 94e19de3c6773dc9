"""Batches go from rank 0 to the other ranks, whatever their size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from async_grpo.utils.child_process import child_argv
from tests.support.trainer_programs.launching import ROOT


def test_a_batch_that_is_larger_than_a_record_may_be_reaches_every_rank(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tests.support.trainer_programs.batch_taken"]
    ranks = [subprocess.Popen(child_argv([*program, str(rank), str(tmp_path)]), cwd=ROOT) for rank in (0, 1)]
    assert [rank.wait(60) for rank in ranks] == [0, 0]
    leader, follower = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1))
    version, sequences, _ = leader[0]
    assert (version, sequences) == (0, [0, 1, 2])
    assert follower == leader
    assert leader[1] is None
