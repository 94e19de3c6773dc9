"""`async-grpo bench rollout`, as a smoke run: real vLLM, a real server, real verifiers, no claim about speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

COMMAND = [sys.executable, "-m", "async_grpo.app.cli.main", "bench", "rollout", "--quick"]


def test_a_quick_bench_measures_every_figure_and_leaves_nothing_behind(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    with tempfile.TemporaryDirectory() as temp:  # tmp_path is too long for a socket
        environment = {**os.environ, "TMPDIR": temp, "COLUMNS": "300"}
        command = [*COMMAND, "--json", str(file)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stderr
        assert not list(Path(temp).glob("async-grpo-*"))
    assert not list(Path("/dev/shm").glob("*bench-rollout-*"))
    figures = json.loads(file.read_text())["figures"]
    for figure in figures:
        assert figure["value"] > 0 and figure["name"] in done.stdout
    speeds = [figure for figure in figures if figure["unit"] == "tokens/s"]
    assert [figure["name"].split(",")[0] for figure in speeds] == ["whole server", "continuous dispatch"]
    assert all(figure["baseline"] > 0 and figure["ratio"] > 0 for figure in speeds)
    made = [figure for figure in figures if figure["unit"] == "tokens"]
    assert len(made) == 2 and all(figure["value"] == figure["baseline"] for figure in made)
