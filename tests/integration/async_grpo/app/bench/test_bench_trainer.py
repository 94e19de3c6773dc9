"""`async-grpo bench trainer`, as a smoke run: real Megatron, the real Hugging Face model, no claim about speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "async_grpo.app.cli.main", "bench", "trainer", "--quick"]
QUESTIONS = [
    {"question": f"Tom has {n} apples and buys {n + 2}. How many?", "answer": f"#### {2 * n + 2}"} for n in range(9)
]


def bench(tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "figures.json"
    environment = {**os.environ, "TMPDIR": str(tmp_path), "COLUMNS": "300"}
    command = [*COMMAND, "--json", str(file), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert not list(tmp_path.glob("async-grpo-*"))
    return done


def test_a_quick_bench_measures_steps_that_come_to_the_same_loss(tmp_path: Path) -> None:
    done = bench(tmp_path)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert all(figure["name"] in done.stdout for figure in figures)
    speeds = [figure for figure in figures if figure["unit"] == "tokens/s"]
    kinds = ["as in TRL", "same room", "the best", "sorted by length", "one by one", "packed by hand"]
    assert all(kind in figure["baseline_name"] for kind, figure in zip(kinds, speeds, strict=True))
    assert all(min(figure["value"], figure["baseline"], figure["ratio"]) > 0 for figure in speeds)
    by_name = {figure["name"]: figure for figure in figures}
    for name in ("loss", "gradient norm"):
        assert by_name[name]["value"] == pytest.approx(by_name[name]["baseline"], rel=1e-4)
    packed = [figure for figure in figures if figure["name"].startswith("packing efficiency")]
    assert len(packed) == 2 and all(0 < figure[which] <= 1 for figure in packed for which in ("value", "baseline"))
    (streamed,) = (figure for figure in figures if "streamed" in figure["name"])
    assert streamed["baseline"] > 0 and streamed["ratio"] > 0


def test_a_bench_trains_on_the_prompts_of_a_file(tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    done = bench(tmp_path, "--data", str(data))
    assert done.returncode == 0, done.stderr


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    done = bench(tmp_path, "--data", str(tmp_path / "missing.jsonl"))
    assert done.returncode != 0 and "missing.jsonl" in done.stderr
