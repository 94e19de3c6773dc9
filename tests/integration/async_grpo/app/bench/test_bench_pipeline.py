"""`async-grpo bench pipeline`, as a smoke run: real runs of the whole loop, no claim about speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from async_grpo.app.launch.role_process import cores_here

COMMAND = [sys.executable, "-m", "async_grpo.app.cli.main", "bench", "pipeline", "--quick"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(len(cores_here()) < 2, reason="each side needs a core of its own"),
]


def test_a_quick_bench_measures_every_figure_and_leaves_nothing_behind(tmp_path: Path) -> None:
    file, plot = tmp_path / "figures.json", tmp_path / "pipeline.png"
    with tempfile.TemporaryDirectory() as temp:  # tmp_path is too long for a socket
        environment = {**os.environ, "TMPDIR": temp, "COLUMNS": "300"}
        command = [*COMMAND, "--json", str(file), "--plot", str(plot)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1700)
        assert done.returncode == 0, done.stderr[-3000:]
        assert not list(Path(temp).glob("async-grpo-*"))
    figures = {figure["name"]: figure for figure in json.loads(file.read_text())["figures"]}
    for staleness in (0, 2):
        assert figures[f"S={staleness}: tokens/s"]["value"] > 0 and f"S={staleness}" in done.stdout
        for side in ("trainer idle", "rollout idle"):
            assert 0 <= figures[f"S={staleness}: {side}"]["value"] <= 1
        assert figures[f"S={staleness}: age, largest"]["value"] <= staleness
    assert figures["S=0: age, largest"]["value"] == 0
    assert figures["S=2: tokens/s"]["ratio"] > 0 and figures["S=2: share of the overlap bound"]["value"] > 0
    assert 1 <= figures["overlap bound, S=0"]["value"] <= 2
    assert figures["T_gen, S=0"]["value"] > 0 and figures["T_train, S=0"]["value"] > 0
    assert plot.read_bytes().startswith(b"\x89PNG")
