"""The gauge of wanted servers against simulations of the same workload."""

from __future__ import annotations

import pytest

from async_grpo.telemetry.bottleneck import WORTHWHILE
from benchmarks.autoscaling import (
    MAX_SERVERS,
    WORKLOADS,
    ScaledWorkload,
    estimate_servers,
    fewest_sufficient,
    random_workloads,
    simulate_workload,
)

LOSS = 0.12
"""Accepted loss of speed. Where load slows engines, an estimate from heartbeats ends a tenth below the fastest."""


@pytest.mark.parametrize("workload", WORKLOADS, ids=[workload.name for workload in WORKLOADS])
def test_the_estimate_is_close_to_the_simulated_optimum(workload: ScaledWorkload) -> None:
    estimate = estimate_servers(workload, 1)
    assert estimate is not None
    fast = simulate_workload(workload, MAX_SERVERS).step_s
    assert simulate_workload(workload, estimate + 1).step_s <= (1 + LOSS) * fast  # one more is enough,
    if estimate > 2:  # and two fewer are not
        assert simulate_workload(workload, estimate - 2).step_s > (1 + WORTHWHILE) * fast


@pytest.mark.slow
def test_estimates_for_random_workloads_are_close_to_the_optimum() -> None:
    off, losses = [], []
    for workload in random_workloads(12, seed=3):
        results = [simulate_workload(workload, servers) for servers in range(1, MAX_SERVERS + 1)]
        estimate = estimate_servers(workload, 1) or 1
        off.append(abs(estimate - fewest_sufficient(results)))
        losses.append(results[estimate - 1].step_s / results[-1].step_s - 1)
    assert sum(off) / len(off) <= 2 and sum(losses) / len(losses) <= 0.05, (off, losses)
