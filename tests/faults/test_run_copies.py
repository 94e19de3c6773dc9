"""A machine is lost in the middle of a run: the same command on a bare one goes on from the bucket."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.s3_server import s3_server
from tests.support.whole_run import COMMAND, WholeRun, check_books

STEPS = 8

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]


def test_a_run_whose_machine_is_lost_finishes_on_a_bare_one_and_can_be_pulled(tmp_path: Path) -> None:
    lost, bare, desk = (tmp_path / name for name in ("lost", "bare", "desk"))
    for folder in (lost, bare, desk):
        folder.mkdir()
    with s3_server() as url:
        override = f"runs_store={url}/runs"
        first = WholeRun(lost, steps=STEPS, overrides=(override,))
        first.start()
        try:
            first.wait_for_step(5)
        finally:
            for process in [*first.list_processes(), psutil.Process(first.process.pid)]:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
            first.wait()
        shutil.rmtree(lost)
        second = WholeRun(bare, steps=STEPS, overrides=(override,))
        second.start()
        try:
            assert second.wait(400) == 0, second.printed[-3000:]
        finally:
            second.close()
        assert re.search(r"fetching version [24] from", second.printed)  # 2: killed while 4 was copied
        check_books(second.summary(), steps=STEPS)
        assert [row["step"] for row in second.steps()][-1] == STEPS
        pulled = subprocess.run(
            [*COMMAND, "runs", "pull", f"{url}/runs/small"], cwd=desk, capture_output=True, text=True
        )
        assert pulled.returncode == 0, pulled.stderr
        for words in (("list", "runs"), ("report", "runs/small"), ("show", "runs/small", "--json")):
            shown = subprocess.run([*COMMAND, "runs", *words], cwd=desk, capture_output=True, text=True)
            assert shown.returncode == 0, shown.stderr
        facts = json.loads(shown.stdout)
        assert (facts["state"], facts["steps"]) == ("finished", STEPS)
