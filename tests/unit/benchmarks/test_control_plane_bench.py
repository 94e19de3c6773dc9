"""Control-plane benchmark: replayed engines, measurements, fitted costs."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from async_grpo.lab.bench.measure import Machine
from async_grpo.lab.simulate.timings import BufferTimings, Timings
from benchmarks.control_plane.bench import fit_costs, make_timings, measure_capacity, measure_round, render
from benchmarks.control_plane.node import NodeReport
from benchmarks.control_plane.replay import ReplayEngine, ReplayPlan, count_bare_groups, percentile, replay_config
from benchmarks.control_plane.round import Counters, RoundResult
from rollout_server.engines.base import GenerationRequest

PLAN = ReplayPlan(
    "bench-x", "/nowhere", "redis://127.0.0.1", servers=3, lengths=[2, 6], token_s=0.001, slots=4, group_size=2
)


def make_result(servers: int, groups_per_s: float, valkey_s: float, of_bare: float = 0.5) -> RoundResult:
    """A round of ten seconds in which Valkey worked for `valkey_s`."""
    before = Counters(100.0, 50, 1000, 5.0, 1.0, 12, servers)
    after = Counters(110.0, 50 + int(10 * groups_per_s), 3000, 5.0 + valkey_s, 1.5, 12, servers)
    report = NodeReport([0.001, 0.003], [0.002], [(7, 104.5), (8, 106.0)], [0.01], cpu_s=2.0)
    plan = ReplayPlan("bench-x", "/nowhere", "redis://127.0.0.1", servers, [4], 0.01)
    return RoundResult(plan, before, after, [report], {7: 104.0}, bare_per_s=groups_per_s / of_bare)


async def test_completions_have_recorded_lengths() -> None:
    engine = ReplayEngine(PLAN)
    await engine.start()
    made = [await engine.generate(GenerationRequest(str(seed), [1], max_tokens=9, seed=seed)) for seed in (0, 1, 2, 3)]
    assert [len(generation.tokens) for generation in made] == [2, 6, 2, 6]
    assert engine.load().generated_tokens == 16


async def test_bare_engines_do_not_exceed_their_slots() -> None:
    ideal = PLAN.groups_per_s
    assert ideal == pytest.approx(3 * 4 / 2 / 0.004)  # 3 servers with room for 2 groups of 4 tokens in the mean
    assert 0 < await count_bare_groups(PLAN, servers=3, warm_s=0.02, seconds=0.2) <= 1.1 * ideal * 0.2


def test_the_window_has_room_for_all_groups_in_flight() -> None:
    config = replay_config(PLAN)
    assert config.capacity_groups > 4 * PLAN.servers * PLAN.slots / PLAN.group_size
    assert config.rollout.max_concurrency == 4 and config.sampling.max_tokens == 6


def test_measurements_are_differences_of_two_counters() -> None:
    rows = {figure.name.partition(": ")[2]: figure for figure in measure_round(make_result(4, 20.0, 1.0), 1)}
    assert (rows["inserted"].value, rows["inserted"].ratio) == (20.0, 0.5)
    assert rows["commands to Valkey"].value == 200
    assert rows["CPU time of Valkey"].value == pytest.approx(1e3 * 1.0 / 200)
    assert rows["cores of all servers"].value == pytest.approx(0.2)
    assert rows["published to applied, p99"].value == pytest.approx(500)  # version 8 is not known to be published


def test_costs_are_fitted_to_rounds_with_different_servers_and_rates() -> None:
    sizes = ((10, 50.0), (100, 50.0), (10, 100.0))
    rounds = [make_result(n, rate, 10 * (0.002 * rate + 0.0001 * n), 0.95) for n, rate in sizes]
    rounds.append(make_result(1000, 30.0, 0.1, 0.4))  # the machine was too slow for it
    costs = fit_costs(rounds)
    assert (costs.exchange_s, costs.server_share) == (pytest.approx(0.001), pytest.approx(0.0001))
    group, server, carries = measure_capacity(costs, 1000)
    assert (group.value, server.value) == (pytest.approx(2.0), pytest.approx(0.1))
    assert carries.value == pytest.approx(0.9 / 0.002)


def test_timings_for_the_simulator_survive_their_file(tmp_path: Path) -> None:
    timings = make_timings([3, 5], 0.01, BufferTimings(exchange_s=0.001))
    timings.write(tmp_path / "timings.yaml")
    assert Timings.read(tmp_path / "timings.yaml") == timings


def test_rounds_are_columns_of_one_table() -> None:
    figures = [
        *measure_round(make_result(4, 20.0, 1.0), 1),
        *measure_round(make_result(8, 30.0, 1.0), 2),
        *measure_capacity(BufferTimings(), 8),
    ]
    screen = Console(file=StringIO(), width=120)
    screen.print(render("title", figures, Machine("x", 2, "3.11", "today", 0.0)))
    shown = screen.file.getvalue()
    (line,) = (line for line in shown.splitlines() if "inserted groups/s" in line)
    assert "20 (0.50)" in line and "30 (0.50)" in line
    assert "8 servers, tokens 2 times as fast" in shown and "one core of Valkey carries" in shown


def test_percentiles() -> None:
    assert [percentile([3.0, 1.0, 2.0], share) for share in (0.0, 0.5, 0.99)] == [1.0, 2.0, 3.0]
    assert percentile([], 0.5) == 0.0
