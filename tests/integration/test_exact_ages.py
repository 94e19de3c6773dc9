"""A run with `exact_age`: real Valkey, real vLLM, real Megatron-core."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.whole_run import WholeRun

S, STEPS = 3, 9


@pytest.mark.slow
def test_every_token_of_a_real_run_is_exactly_s_steps_old(tmp_path: Path) -> None:
    run = WholeRun(tmp_path, steps=STEPS, overrides=(f"max_staleness={S}", "buffer.selector.kind=exact_age"))
    run.start()
    try:
        assert run.wait() == 0, run.printed[-3000:]
    finally:
        run.close()
    rows = run.steps()
    assert [row["age_histogram"] for row in rows] == [
        {str(min(version, S)): row["trained_tokens"]} for version, row in enumerate(rows)
    ]
    assert len(rows) == STEPS
