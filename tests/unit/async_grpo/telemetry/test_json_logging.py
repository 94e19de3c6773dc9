"""ASYNC_GRPO_LOG_FORMAT=json: whatever a process writes about itself is a dated JSON object, without secrets."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from async_grpo.telemetry.logging import configure_logging, fatal_events

PROGRAM = '''
import json, logging, logging.config, os, subprocess, sys, threading, warnings
from pathlib import Path
from async_grpo.errors import ConfigError
from async_grpo.telemetry.logging import bind_process, configure_logging, report_fatal
log = configure_logging("rollout-0")
bind_process(role="rollout", replica="rollout-0", run="small")
log.info("step trained", step=3, version=2, loss=float("nan"), where=Path("/a"), text="a\\nb redis://me:hunter2@host")
logging.getLogger("library").warning("slow %d", 5)
warnings.warn("old")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start(); thread.join()
subprocess.run([sys.executable, "-c", """
import json, logging.config, os
logging.config.dictConfig(json.load(open(os.environ["VLLM_LOGGING_CONFIG_PATH"])))
logging.getLogger("vllm.engine").info("loaded")
"""], check=True)
report_fatal(ConfigError("password=hunter2 is wrong"))
raise ValueError("the end")
'''
COPY = """
from pathlib import Path
from async_grpo.telemetry.logging import copy_log
copy_log(Path({copy!r}))
"""


def lines_of(program: str) -> list[dict[str, Any]]:
    environment = {**os.environ, "ASYNC_GRPO_LOG_FORMAT": "json"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert "hunter2" not in done.stderr
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_every_line_of_a_process_and_its_libraries_is_a_dated_object() -> None:
    step, slow, warning, thread, engine, fatal, end = lines_of(PROGRAM)
    for line in (step, slow, warning, thread, engine, fatal, end):
        assert (line["run"], line["role"], line["replica"]) == ("small", "rollout", "rollout-0")
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d", line["time"])
    assert step.items() >= {"level": "info", "event": "step trained", "step": 3, "version": 2, "loss": "nan"}.items()
    assert (step["where"], step["text"]) == ("/a", "a\nb redis://me:***@host")
    assert (slow["level"], slow["logger"], slow["event"]) == ("warning", "library", "slow 5")
    assert warning["logger"] == "py.warnings" and "UserWarning: old" in warning["event"]
    assert thread["event"].startswith("ZeroDivisionError") and "Traceback" in thread["exception"]
    assert (engine["logger"], engine["event"]) == ("vllm.engine", "loaded")
    assert (fatal["level"], fatal["event"]) == ("critical", "ConfigError: password=*** is wrong")
    assert end["event"] == "ValueError: the end" and "Traceback" in end["exception"]


def test_a_role_that_is_started_separately_copies_every_line_to_its_file(tmp_path: Path) -> None:
    copy = tmp_path / "logs" / "trainer-0.log"
    lines = lines_of(COPY.format(copy=str(copy)) + PROGRAM)
    assert len(lines) == 7
    assert [json.loads(line) for line in copy.read_text().splitlines()] == lines


def test_a_copy_that_cannot_be_written_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNC_GRPO_LOG_COPY", str(tmp_path))
    assert len(lines_of(PROGRAM)) == 7


def test_the_error_that_ended_a_process_is_found_in_its_log() -> None:
    text = 'text\n{"level": "info", "event": "a"}\n{"level": "critical", "event": "E: b"}\n{"level": "critical", "ev\n'
    assert fatal_events(text) == ["E: b"]
    assert fatal_events("ValueError: no JSON") == []


def test_a_line_for_people_has_the_date(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("trainer").info("step trained")
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} info    trainer ", capsys.readouterr().err)
