"""`async-grpo accept` on the CPU: the command as a user runs it, and planted faults that its stages must report."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from async_grpo.lab.accept.accept import StageResult, accept
from async_grpo.lab.accept.context import Programs
from async_grpo.lab.accept.stages import DROPPED_FLOAT64, RAW_LOGPROBS, STAGES, STALE_WEIGHTS
from async_grpo.utils.child_process import child_argv

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]  # three minutes on two idle cores
COMMAND = [sys.executable, "-m", "async_grpo.app.cli.main", "accept", "--platform", "cpu"]
FAULTS = "tests.support.accept_faults"


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASYNC_GRPO_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@contextmanager
def started(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    command = child_argv([*COMMAND, "--out", str(folder), *words])
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as running:
        try:
            yield running
        finally:
            running.kill()


def test_every_stage_passes_on_a_cpu(tmp_path: Path) -> None:
    words = [word for name in STAGES if name != "doctor" for word in ("--stage", name)]  # tests run on any machine
    with started(tmp_path, *words, "--json", str(tmp_path / "copy.json")) as running:
        printed, _ = running.communicate(timeout=1400)
    report = json.loads((tmp_path / "copy.json").read_text())
    assert running.returncode == 0, printed + (tmp_path / "report.txt").read_text()
    assert [stage["name"] for stage in report["stages"]] == [name for name in STAGES if name != "doctor"]
    assert str(tmp_path) not in (tmp_path / "report.txt").read_text()
    figures = {figure["name"]: figure["value"] for stage in report["stages"] for figure in stage["figures"]}
    assert figures["the next step is the same bit for bit"] == "yes"
    assert figures["bytes"] > 1_000_000 and figures["tokens of the gap"] > 0


def run_with_fault(tmp_path: Path, stage: str, **programs: str) -> StageResult:
    (result,) = asyncio.run(accept("cpu", tmp_path, stages=[stage], programs=Programs(**programs))).stages
    return result


def failed_metrics(result: StageResult) -> list[str]:
    return [metric.name for metric in result.failed_metrics]


def test_an_all_reduce_that_drops_float64_is_reported(tmp_path: Path) -> None:
    result = run_with_fault(tmp_path, "collectives", rank=f"{FAULTS} dropped_float64")
    assert failed_metrics(result) == ["all_reduce float64 on the host"]
    assert result.advice == DROPPED_FLOAT64


def test_log_probabilities_of_another_temperature_are_reported(tmp_path: Path) -> None:
    result = run_with_fault(tmp_path, "behaviour", engine=f"{FAULTS} raw_logprobs")
    assert "LogprobsWrong" in result.error
    assert result.advice == RAW_LOGPROBS


def test_a_check_that_misses_stale_graphs_is_reported(tmp_path: Path) -> None:
    result = run_with_fault(tmp_path, "graphs", engine=f"{FAULTS} blind_check")
    assert failed_metrics(result) == ["a planted stale layer is detected"]


def test_a_stale_output_layer_is_reported(tmp_path: Path) -> None:
    result = run_with_fault(tmp_path, "weights", engine=f"{FAULTS} stale_head")
    assert any("lm_head.weight" in name for name in failed_metrics(result))
    assert "gap at T = 0.8, version 1, mean" in failed_metrics(result)
    assert result.advice == STALE_WEIGHTS


def test_ctrl_c_leaves_a_report_and_no_process(tmp_path: Path) -> None:
    with started(tmp_path, "--stage", "collectives") as running:
        root, deadline = psutil.Process(running.pid), time.monotonic() + 300
        while len(family := root.children(recursive=True)) < 3:  # the node and its two ranks
            assert time.monotonic() < deadline and running.poll() is None
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        printed, _ = running.communicate(timeout=120)
    assert running.returncode == 130, printed
    assert not psutil.wait_procs(family, timeout=10)[1]
    assert json.loads((tmp_path / "report.json").read_text())["stages"] == []


def test_scale_stages_run_on_a_cpu_without_being_checked(tmp_path: Path) -> None:
    with started(tmp_path, "--scale", "--json", str(tmp_path / "copy.json")) as running:
        printed, _ = running.communicate(timeout=1400)
    assert running.returncode == 0, printed
    stages = json.loads((tmp_path / "copy.json").read_text())["stages"]
    assert [stage["name"] for stage in stages] == ["asynchrony", "throughput"]
    figures = {figure["name"]: figure["value"] for stage in stages for figure in stage["figures"]}
    assert figures["tokens of the gap"] > 0
    assert any("S = 2 over S = 0" in name and "1.7" in name for name in figures)
