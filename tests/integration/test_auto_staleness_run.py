"""A run with `max_staleness: auto`: real Valkey, real vLLM, real Megatron-core."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_grpo.telemetry.jsonl import read_rows
from async_grpo.telemetry.rows import rows_of_kind
from tests.support.whole_run import WholeRun

LARGEST, STEPS = 3, 24


@pytest.mark.slow
def test_the_s_in_force_follows_the_decisions_and_ages_keep_the_bound(tmp_path: Path) -> None:
    auto = (
        "max_staleness=auto",
        f"auto_staleness.max={LARGEST}",
        "auto_staleness.start=0",
        "auto_staleness.patience=2",
    )
    run = WholeRun(tmp_path, steps=STEPS, overrides=auto)
    run.start()
    try:
        assert run.wait() == 0, run.printed[-3000:]
    finally:
        run.close()
    rows = run.steps()
    decisions = rows_of_kind(read_rows(run.run_dir / "metrics.jsonl"), "staleness")
    assert decisions
    force, expected = 0, []
    for step in range(1, STEPS + 1):
        expected.append(force)
        for decision in decisions:
            if decision["step"] == step:
                assert decision["staleness_before"] == force
                force = decision["staleness"]
    assert [row["staleness"] for row in rows] == expected
    assert max(row["age_max"] for row in rows) <= LARGEST
    assert run.summary()["balanced"]
    assert decisions[0]["reason"] in (run.run_dir / "report.md").read_text()
