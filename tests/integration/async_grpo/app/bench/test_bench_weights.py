"""`async-grpo bench weights`, as a smoke run: real processes, real sockets, no claim about speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from async_grpo.weights.shared_memory import SHARED_MEMORY

COMMAND = [sys.executable, "-m", "async_grpo.app.cli.main", "bench", "weights", "--quick"]
COMPARED = (
    "dense, 0.01 GB to one receiver, beside tcp",
    "dense, 0.01 GB to one receiver, beside gloo",
    "dense, 0.01 GB to one receiver, beside disk",
    "dense, 0.01 GB to one receiver, from manifest to commit",
    "dense, 0.01 GB to one receiver, processor time, both ends",
    "trainer's stall for one version",
    "AdamW, lr 1e-06: encoding, one core",
    "AdamW, lr 1e-06: decoding, one core",
    "AdamW, lr 1e-06: 0.01 GB to one receiver",
    "0.01 GB to 4 receivers, fanout 2: the trainer sends",
    "0.01 GB to 4 receivers, fanout 2: until all have it",
    "0.01 GB to 8 receivers, fanout 2: the trainer sends",
    "0.01 GB to 8 receivers, fanout 2: until all have it",
)


def test_a_quick_bench_measures_every_figure_and_leaves_nothing_behind(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    with tempfile.TemporaryDirectory() as temp:
        environment = {**os.environ, "TMPDIR": temp, "COLUMNS": "250"}
        command = [*COMMAND, "--json", str(file)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as bench:
            shown, _ = bench.communicate(timeout=240)
        assert bench.returncode == 0
        assert not list(Path(temp).glob("async-grpo-*"))
    assert not list(SHARED_MEMORY.glob(f"async-grpo-bench-{bench.pid}-*"))
    figures = json.loads(file.read_text())["figures"]
    by_name = {figure["name"]: figure for figure in figures}
    for name in COMPARED:
        assert by_name[name]["value"] > 0 and by_name[name]["baseline"] > 0 and by_name[name]["ratio"] > 0
    for figure in figures:
        assert figure["name"] in shown
    assert by_name["0.01 GB to 8 receivers, fanout 2: the trainer sends"]["value"] <= 2.1
    assert by_name["AdamW, lr 1e-06: patches are smaller than dense"]["value"] > 30
