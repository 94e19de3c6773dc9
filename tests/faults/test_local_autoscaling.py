"""A real run gets as many rollout servers as it can use, and no more, while it goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.whole_run import WholeRun, check_books

STEPS = 80
SLOW_S = 10.0
"""Seconds of a slow step: longer than one server takes for the groups of a step, also on a slow processor."""
LOSS = """\
import pathlib, time, torch
from async_grpo.algorithms.losses import TokenLoss

def sluggish(tokens, config):
    if pathlib.Path({switch!r}).exists():
        time.sleep({slow_s})
    loss_N = -tokens.log_r_N.exp() * tokens.advantages_N
    return TokenLoss(loss_N, torch.zeros_like(loss_N, dtype=torch.bool))
"""
SCALED = (
    "launch.autoscale.max_servers=2",
    "launch.autoscale.after_s=4",
    "rollout.max_concurrency=4",
    "trainer.objective.preset=grpo",
    "trainer.objective.loss=own_loss:sluggish",
)

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]


def test_a_run_grows_while_servers_are_the_bottleneck_and_shrinks_when_the_trainer_is(
    start: Callable[..., WholeRun], tmp_path: Path
) -> None:
    switch = tmp_path / "slow"
    (tmp_path / "own_loss.py").write_text(LOSS.format(switch=str(switch), slow_s=SLOW_S))
    run = start(*SCALED, steps=STEPS, max_tokens=200)
    run.wait_for_step(1)
    assert "rollout-1" not in run.printed
    run.until(lambda: "rollout-1 joins" in run.printed, "second server", 200)
    run.until(
        lambda: '"rollout-1"' in "".join(p.read_text() for p in run.run_dir.glob("samples/*.jsonl")), "its work", 120
    )
    switch.touch()  # from now on every step takes seconds, and one server is more than enough
    run.until(lambda: "rollout-1 leaves" in run.printed, "one server less", 200)
    switch.unlink()
    assert run.wait(400) == 0, run.printed[-3000:]
    assert "restart" not in run.printed
    check_books(run.summary(), steps=STEPS)
