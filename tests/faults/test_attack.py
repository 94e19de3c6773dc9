"""A run under random SIGKILL and SIGSTOP of all its processes finishes, with its books in order and nothing left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("options", [["--seed", "1"], ["--seed", "2", "--last-seconds"]])
def test_an_attacked_run_finishes_balanced_and_leaves_nothing_behind(tmp_path: Path, options: list[str]) -> None:
    """By itself or by the same command. In a process of its own, which adopts what the run orphans."""
    fewer = ["--steps", "40", "--kills", "5", "--timeout-s", "900", "--folder", str(tmp_path)]
    command = [sys.executable, "-m", "tests.support.run_attack", *options, *fewer]
    attack = subprocess.run(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True, check=False)
    print(attack.stdout)
    assert attack.returncode == 0, attack.stdout
