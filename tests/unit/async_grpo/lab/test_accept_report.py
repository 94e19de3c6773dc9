"""Reports of `async-grpo accept` for fake stages that pass, fail, raise or exceed their limit."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from async_grpo.app.cli.main import app
from async_grpo.errors import ConfigError, RoleFailed
from async_grpo.lab.accept import accept as command
from async_grpo.lab.accept.accept import AcceptReport, accept
from async_grpo.lab.accept.context import Programs, StageContext, select_devices
from async_grpo.lab.accept.scale import SIZES_4B, SIZES_8B, asynchrony, scaled_config, update_seconds
from async_grpo.lab.accept.stages import (
    STAGES,
    Stage,
    StageMetric,
    collectives,
    require_at_least,
    require_at_most,
    require_true,
)
from async_grpo.lab.simulate.lengths import LengthModel
from async_grpo.lab.simulate.timings import EngineTimings, SyncTimings, Timings
from tests.support.recorded_runs import recorded_run
from trainer.platform import select_platform
from trainer.platform.base import Device


async def passing(context: StageContext) -> list[StageMetric]:
    return [require_at_most("error", 1e-7, 1e-5)]


async def failing(context: StageContext) -> list[StageMetric]:
    return [require_at_most("error", 0.5, 1e-5, "fix the metric"), require_true("it is there", False)]


async def raising(context: StageContext) -> list[StageMetric]:
    raise RoleFailed(f"{context.work}/x of redis://me:secret@host failed")


async def endless(context: StageContext) -> list[StageMetric]:
    await asyncio.Event().wait()
    return []


def run_stages(monkeypatch: pytest.MonkeyPatch, out: Path, *stages: Stage) -> AcceptReport:
    monkeypatch.setattr(command, "STAGES", {stage.name: stage for stage in stages})
    return asyncio.run(accept("cpu", out))


@pytest.mark.parametrize("value", [2.0, math.nan, math.inf, "RuntimeError: no such collective"])
def test_a_metric_above_its_limit_fails_and_so_does_an_error_instead_of_a_number(value: float | str) -> None:
    assert not require_at_most("error", value, 1.0).ok
    assert require_at_most("error", 1.0, 1.0).ok


def test_a_stage_is_skipped_only_if_one_that_it_needs_ended_without_metrics(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    later = Stage(passing, 5.0, "", needs=("raising",))
    report = run_stages(monkeypatch, tmp_path, Stage(failing, 5.0, ""), Stage(raising, 5.0, "fix it"), later)
    assert [(stage.name, stage.ok, stage.skipped) for stage in report.stages] == [
        ("failing", False, ""),
        ("raising", False, ""),
        ("passing", False, "needs raising, which failed"),
    ]
    report = run_stages(monkeypatch, tmp_path, Stage(failing, 5.0, ""), Stage(passing, 5.0, "", needs=("failing",)))
    assert [stage.ok for stage in report.stages] == [False, True]


def test_the_advice_of_a_failed_metric_replaces_that_of_the_stage(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (stage,) = run_stages(monkeypatch, tmp_path, Stage(failing, 5.0, "fix the stage")).stages
    assert stage.advice == "fix the metric; fix the stage"
    assert stage.summary == "error 0.5 (at most 1e-05); it is there NO"


def test_a_stage_ends_at_its_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (stage,) = run_stages(monkeypatch, tmp_path, Stage(endless, 0.05, "look at the logs")).stages
    assert "0.05 s" in stage.error and stage.advice == "look at the logs"


def test_the_report_has_versions_and_advice_but_no_secrets_or_folders(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = run_stages(monkeypatch, tmp_path, Stage(passing, 5.0, ""), Stage(raising, 5.0, "fix it"))
    text, content = (tmp_path / "report.txt").read_text(), json.loads((tmp_path / "report.json").read_text())
    assert not report.ok and content["ok"] is False
    assert content["versions"]["async-grpo"] and content["stages"][0]["figures"][0]["at_most"] == 1e-5
    assert "WORK/x" in text and "redis://me:***@host" in text and "fix it" in text
    assert "secret" not in text and str(tmp_path) not in text + json.dumps(content)


def test_a_missing_device_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(select_platform("npu")), "list_devices", lambda self: [])
    result = CliRunner().invoke(app, ["accept", "--platform", "npu"])
    assert result.exit_code == 78
    assert "no usable npu device" in result.output and "async-grpo doctor --platform npu" in result.output


def test_devices_are_the_visible_ones_or_the_requested_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = select_platform("cuda")
    monkeypatch.setattr(type(platform), "list_devices", lambda self: [Device(i, "GPU", 24.0, "550") for i in range(4)])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    assert select_devices(platform, None) == ["1", "3"]
    assert select_devices(platform, "3") == ["3"]
    with pytest.raises(ConfigError, match="--devices names 0"):
        select_devices(platform, "0,1")


def test_an_unknown_stage_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--stage numbres: .*doctor, collectives, numbers"):
        asyncio.run(accept("cpu", tmp_path, stages=["numbres"]))


@pytest.mark.parametrize("platform", ["cuda", "npu"])
@pytest.mark.parametrize("devices", [["0"], ["0", "1", "2", "3"]])
def test_the_configurations_for_devices_are_valid(platform: str, devices: list[str], tmp_path: Path) -> None:
    context = StageContext(select_platform(platform), devices, tmp_path, tmp_path, Programs())
    config = context.build_config("ten-steps", ranks=max(1, len(devices) // 2))
    assert config.sampling.temperature == 0.8
    assert not config.rollout.vllm.is_eager
    assert config.launch.share_devices == ("split" if len(devices) == 1 else "off")


def test_a_stage_needs_only_earlier_stages() -> None:
    names = [*STAGES]
    assert all(names.index(needed) < names.index(stage.name) for stage in STAGES.values() for needed in stage.needs)


@pytest.mark.parametrize(("platform", "is_known"), [("cpu", False), ("cuda", False), ("npu", True)])
def test_dropped_float64_passes_only_under_mindspeed(
    platform: str, is_known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def write(context: StageContext, *_: object, **__: object) -> None:
        for rank, error in enumerate([0.0, 2.0]):
            errors = {"all_reduce float64 on the host": error, "broadcast float32 on the host": 0.0}
            (tmp_path / f"rank-{rank}.json").write_text(json.dumps(errors))

    async def folder(context: StageContext) -> Path:
        return tmp_path

    monkeypatch.setattr(StageContext, "run_program", write)
    monkeypatch.setattr(StageContext, "load_model", folder)
    devices = [] if platform == "cpu" else ["0", "1"]
    metrics = asyncio.run(collectives(StageContext(select_platform(platform), devices, tmp_path, tmp_path, Programs())))
    assert [metric.ok for metric in metrics] == [True, is_known, True]
    assert metrics[1].value == 2.0


@pytest.mark.parametrize("platform", ["cuda", "npu"])
def test_the_configurations_of_large_models_are_valid(platform: str, tmp_path: Path) -> None:
    context = StageContext(select_platform(platform), [*"01234567"], tmp_path, tmp_path, Programs())
    four = scaled_config(context, "asynchrony-s2", SIZES_4B, 2, 2)
    assert (four.trainer.processes, four.rollout.servers, four.max_staleness) == (2, 2, 2)
    eight = scaled_config(context, "throughput", SIZES_8B, 4, 2)
    assert (eight.trainer.tensor_parallel, eight.trainer.recompute) == (4, "full")
    assert eight.sampling.max_tokens == 2048


def test_large_models_are_rejected_on_too_few_devices(tmp_path: Path) -> None:
    context = StageContext(select_platform("npu"), ["0", "1"], tmp_path, tmp_path, Programs())
    with pytest.raises(ConfigError, match=r"4 devices.* 2\b"):
        asyncio.run(asynchrony(context))


def test_a_metric_below_its_minimum_fails() -> None:
    assert require_at_least("gain", 1.72, 1.7).ok
    assert not require_at_least("gain", 1.69, 1.7).ok
    assert not require_at_least("gain", math.nan, 1.7).ok
    assert "at least 1.7" in str(require_at_least("gain", 1.69, 1.7))


def test_a_weight_update_lasts_until_the_last_server_has_loaded_it(tmp_path: Path) -> None:
    timings = Timings(
        lengths=LengthModel(mean=20),
        engine=EngineTimings(step_s=0.01),
        sync=SyncTimings(stall_s=0.5, transfer_s=1.0, load_s=0.25),
    )
    assert update_seconds(recorded_run(tmp_path, 2, timings)) >= 1.75
