"""The gauge of wanted servers against simulations of the same workload."""

from __future__ import annotations

import pytest

from async_grpo.telemetry.bottleneck import WORTHWHILE
from benchmarks.autoscaling import MOST, WORKLOADS, ScaledWorkload, enough, gauge, random_workloads, simulated

LOSS = 0.12
"""Of the speed. The gauge sees heartbeats only: where load slows engines, it stops a tenth below the fastest."""


@pytest.mark.parametrize("workload", WORKLOADS, ids=[workload.name for workload in WORKLOADS])
def test_the_gauge_is_close_to_what_simulations_find_enough(workload: ScaledWorkload) -> None:
    said = gauge(workload, 1)
    assert said is not None
    fast = simulated(workload, MOST).step_s
    assert simulated(workload, said + 1).step_s <= (1 + LOSS) * fast  # one more is surely enough,
    if said > 2:  # and two fewer are not
        assert simulated(workload, said - 2).step_s > (1 + WORTHWHILE) * fast


@pytest.mark.slow
def test_random_workloads_get_about_what_they_can_use() -> None:
    off, losses = [], []
    for workload in random_workloads(12, seed=3):
        figures = [simulated(workload, servers) for servers in range(1, MOST + 1)]
        said = gauge(workload, 1) or 1
        off.append(abs(said - enough(figures)))
        losses.append(figures[said - 1].step_s / figures[-1].step_s - 1)
    assert sum(off) / len(off) <= 2 and sum(losses) / len(losses) <= 0.05, (off, losses)
