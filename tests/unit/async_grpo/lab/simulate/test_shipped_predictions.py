"""The numbers in the comments of shipped configurations are those of `simulate` and `--dry-run`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from async_grpo.app.launch.memory_plan import plan_devices
from async_grpo.app.launch.plan import plan_run
from async_grpo.config import RunConfig
from async_grpo.lab.simulate.devices import estimate_timings
from async_grpo.lab.simulate.prediction import predict
from async_grpo.lab.simulate.timings import Timings
from async_grpo.lab.tune.goals import Goal
from async_grpo.lab.tune.search import TuningSearch
from async_grpo.lab.tune.space import SPLIT, Overrides, TuningAxis, build_axes
from async_grpo.utils.text import GIB

CONFIGS = Path(__file__).parents[5] / "configs"
PREDICTED = re.compile(
    r"# Predicted, not measured: (?P<speed>[\d,]+) tokens/s, trainer idle (?P<trainer>\d+)%, servers idle "
    r"(?P<servers>\d+)%, mean age (?P<age>[\d.]+)\n"
    r"# \(async-grpo simulate configs/(?P<file>\S+) --device (?P<device>\w+)\)"
)
MEMORY = re.compile(
    r"# Device memory \(--dry-run\): trainer (?P<trainer>[\d.]+), engine (?P<engine>[\d.]+) of (?P<all>\d+) GiB\. "
    r"Host memory: (?P<host>[\d.]+) GiB(?: on node 0, (?P<other>[\d.]+) on node 1)?\."
)
FILES = sorted(path.name for path in CONFIGS.glob("qwen*.yaml"))
WITH_OWN_DEVICES = [name for name in FILES if "one_" not in name]
near = partial(pytest.approx, rel=0.05)


def planned(name: str) -> RunConfig:
    return plan_run(CONFIGS / name, [], download=False).config


def stated(name: str, pattern: re.Pattern[str]) -> re.Match[str]:
    match = pattern.search((CONFIGS / name).read_text())
    assert match is not None, f"configs/{name} does not state it"
    return match


@pytest.mark.parametrize("name", FILES)
def test_the_memory_in_the_comment_matches_the_plan(name: str) -> None:
    comment, plan = stated(name, MEMORY), plan_devices(planned(name))
    assert plan is not None and plan.trainer is not None and plan.engine is not None and plan.engine_gib is not None
    assert float(comment["trainer"]) == near(plan.trainer.total / GIB)
    assert float(comment["engine"]) == near(plan.engine.max_bytes(plan.engine_gib * GIB) / GIB)
    assert float(comment["all"]) == plan.engine_gib
    hosts = [float(size) for size in comment.group("host", "other") if size]
    assert hosts == near([host.total / GIB for host in plan.hosts])


@pytest.mark.parametrize("page", ["docs/platforms.md", "docs/zh/platforms.md"])
def test_the_table_of_predictions_matches_the_configurations(page: str) -> None:
    rows = re.findall(r"^\| `(qwen[^`]*)` \| ([-\d].*) \|$", (CONFIGS.parent / page).read_text(), re.MULTILINE)
    expected = []
    for name in FILES:
        memory, predicted = stated(name, MEMORY), PREDICTED.search((CONFIGS / name).read_text())
        speed = ["-"] * 4
        if predicted is not None:
            speed = [predicted["speed"], f"{predicted['trainer']}%", f"{predicted['servers']}%", predicted["age"]]
        device = ", ".join(memory[key] for key in ("trainer", "engine", "all"))
        expected.append((name.removesuffix(".yaml"), " | ".join([*speed, device, memory["host"]])))
    assert rows == expected


@pytest.mark.parametrize("name", WITH_OWN_DEVICES)
def test_every_prediction_states_its_command(name: str) -> None:
    comment = stated(name, PREDICTED)
    assert comment["file"] == name
    assert comment["device"] == ("h100" if "cuda" in name else "910c")


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_OWN_DEVICES)
def test_the_speed_in_the_comment_matches_a_simulation(name: str) -> None:
    comment = stated(name, PREDICTED)
    timings = estimate_timings(planned(name), comment["device"])
    metrics = predict(CONFIGS / name, [], [], timings, steps=None, seed=1)[0].metrics
    assert float(comment["speed"].replace(",", "")) == near(metrics.tokens_per_s)
    assert float(comment["trainer"]) / 100 == pytest.approx(metrics.trainer_idle, abs=0.03)
    assert float(comment["servers"]) / 100 == pytest.approx(metrics.rollout_idle, abs=0.03)
    assert float(comment["age"]) == near(metrics.age_mean)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", WITH_OWN_DEVICES)
def test_tune_keeps_the_split_of_the_devices(name: str) -> None:
    config = planned(name)
    axes = [axis for axis in build_axes(config, [], []) if axis.name == SPLIT]
    if axes:
        timings = estimate_timings(config, stated(name, PREDICTED)["device"])
        assert chosen_split(name, axes, timings) == axes[0].choices[0]


@pytest.mark.slow
def test_tune_moves_npus_to_the_side_that_needs_them() -> None:
    name, halves = "qwen2.5_7b_gsm8k_ascend.yaml", ["trainer.processes=8", "rollout.servers=2"]
    config = plan_run(CONFIGS / name, halves, download=False).config
    axes = [axis for axis in build_axes(config, [], []) if axis.name == SPLIT]
    best = chosen_split(name, axes, estimate_timings(config, "910c"), halves)
    assert best == {"trainer.processes": "12", "rollout.servers": "1"}


def chosen_split(name: str, axes: list[TuningAxis], timings: Timings, overrides: Sequence[str] = ()) -> Overrides:
    search = TuningSearch(CONFIGS / name, overrides, axes, timings, Goal(), 1)
    search.explore(50)
    return search.find_best().overrides
