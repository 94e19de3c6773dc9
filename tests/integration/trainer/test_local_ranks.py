"""Which ranks fill the store of rank 0 in place: those of its machine, whatever a killed trainer left elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_grpo.utils.child_process import child_argv
from async_grpo.weights.shared_memory import remove_stores
from tests.support.trainer_programs.launching import ROOT
from tests.support.trainer_programs.local_ranks import STALE_STORE

RUN = f"test-local-ranks-{os.getpid()}"
OWN_MEMORY = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
OWN_MEMORY += ['mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]


@pytest.fixture(autouse=True)
def _no_stores_are_left() -> Iterator[None]:
    yield
    remove_stores(RUN)


def can_have_own_memory() -> bool:
    return shutil.which("unshare") is not None and not subprocess.run([*OWN_MEMORY, "true"], check=False).returncode


def find_local_ranks(folder: Path, prefix: list[str], environment: dict[str, str]) -> list[dict[str, list[str]]]:
    """What both ranks wrote down; rank 1 is started with the prefix and in that environment."""
    program = [sys.executable, "-m", "tests.support.trainer_programs.local_ranks"]
    first = child_argv([*program, "0", str(folder), RUN])
    second = child_argv([*prefix, *program, "1", str(folder), RUN])
    ranks = [
        subprocess.Popen(first, cwd=ROOT),
        subprocess.Popen(second, cwd=ROOT, env={**os.environ, **environment}),
    ]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in (0, 1)]


def test_ranks_of_one_machine_find_each_other_and_leave_only_the_store(tmp_path: Path) -> None:
    found = find_local_ranks(tmp_path, [], {})
    assert found == [{"local": [0, 1], "left": ["trainer.weights"]}, {"local": [0, 1], "left": []}]


@pytest.mark.skipif(not can_have_own_memory(), reason="needs user namespaces")
def test_a_stale_store_on_another_machine_makes_no_rank_there_a_local_one(tmp_path: Path) -> None:
    found = find_local_ranks(tmp_path, OWN_MEMORY, {STALE_STORE: "1"})
    assert [each["local"] for each in found] == [[0], [0]]
