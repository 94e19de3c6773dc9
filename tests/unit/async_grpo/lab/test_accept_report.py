"""What `async-grpo accept` makes of stages that are right, wrong, too slow or impossible; the stages are made up."""

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
from async_grpo.lab.accept.lab import Lab, Programs, chosen_devices
from async_grpo.lab.accept.scale import SIZES_4B, SIZES_8B, asynchrony, scaled_config, update_seconds
from async_grpo.lab.accept.stages import STAGES, Figure, Stage, bounded, collectives, confirmed, reaching
from async_grpo.lab.simulate.lengths import LengthModel
from async_grpo.lab.simulate.timings import EngineTimings, SyncTimings, Timings
from tests.support.recorded_runs import recorded_run
from trainer.platform import select_platform
from trainer.platform.base import Device


async def right(lab: Lab) -> list[Figure]:
    return [bounded("error", 1e-7, 1e-5)]


async def wrong(lab: Lab) -> list[Figure]:
    return [bounded("error", 0.5, 1e-5, "mend the figure"), confirmed("it is there", False)]


async def broken(lab: Lab) -> list[Figure]:
    raise RoleFailed(f"{lab.work}/x of redis://me:secret@host failed")


async def endless(lab: Lab) -> list[Figure]:
    await asyncio.Event().wait()
    return []


def report_of(monkeypatch: pytest.MonkeyPatch, out: Path, *stages: Stage) -> AcceptReport:
    monkeypatch.setattr(command, "STAGES", {stage.name: stage for stage in stages})
    return asyncio.run(accept("cpu", out))


@pytest.mark.parametrize("value", [2.0, math.nan, math.inf, "RuntimeError: no such collective"])
def test_a_figure_above_its_limit_is_wrong_and_so_is_one_that_is_no_number(value: float | str) -> None:
    assert not bounded("error", value, 1.0).ok
    assert bounded("error", 1.0, 1.0).ok


def test_a_failed_stage_stops_none_that_does_not_need_what_it_could_not_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    later = Stage(right, 5.0, "", needs=("broken",))
    found = report_of(monkeypatch, tmp_path, Stage(wrong, 5.0, ""), Stage(broken, 5.0, "mend it"), later)
    assert [(stage.name, stage.ok, stage.skipped) for stage in found.stages] == [
        ("wrong", False, ""),
        ("broken", False, ""),
        ("right", False, "it needs broken"),
    ]
    found = report_of(monkeypatch, tmp_path, Stage(wrong, 5.0, ""), Stage(right, 5.0, "", needs=("wrong",)))
    assert [stage.ok for stage in found.stages] == [False, True]


def test_the_advice_is_that_of_the_wrong_figures_else_of_the_stage(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (stage,) = report_of(monkeypatch, tmp_path, Stage(wrong, 5.0, "mend the stage")).stages
    assert stage.advice == "mend the figure; mend the stage"
    assert stage.line == "error 0.5 (at most 1e-05); it is there NO"


def test_a_stage_ends_at_its_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (stage,) = report_of(monkeypatch, tmp_path, Stage(endless, 0.05, "look at the logs")).stages
    assert "0.05 s" in stage.error and stage.advice == "look at the logs"


def test_the_report_has_versions_and_advice_but_no_secret_and_no_folder_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = report_of(monkeypatch, tmp_path, Stage(right, 5.0, ""), Stage(broken, 5.0, "mend it"))
    text, content = (tmp_path / "report.txt").read_text(), json.loads((tmp_path / "report.json").read_text())
    assert not found.ok and content["ok"] is False
    assert content["versions"]["async-grpo"] and content["stages"][0]["figures"][0]["at_most"] == 1e-5
    assert "WORK/x" in text and "redis://me:***@host" in text and "mend it" in text
    assert "secret" not in text and str(tmp_path) not in text + json.dumps(content)


def test_without_a_device_it_ends_at_once_as_a_fault_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(select_platform("npu")), "devices", lambda self: [])
    done = CliRunner().invoke(app, ["accept", "--platform", "npu"])
    assert done.exit_code == 78
    assert "no npu device" in done.output and "async-grpo doctor --platform npu" in done.output


def test_devices_are_the_visible_ones_or_those_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = select_platform("cuda")
    monkeypatch.setattr(type(platform), "devices", lambda self: [Device(i, "GPU", 24.0, "550") for i in range(4)])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    assert chosen_devices(platform, None) == ["1", "3"]
    assert chosen_devices(platform, "3") == ["3"]
    with pytest.raises(ConfigError, match="--devices names 0"):
        chosen_devices(platform, "0,1")


def test_an_unknown_stage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--stage numbres: .*doctor, collectives, numbers"):
        asyncio.run(accept("cpu", tmp_path, stages=["numbres"]))


@pytest.mark.parametrize("platform", ["cuda", "npu"])
@pytest.mark.parametrize("devices", [["0"], ["0", "1", "2", "3"]])
def test_the_configurations_for_devices_are_valid(platform: str, devices: list[str], tmp_path: Path) -> None:
    lab = Lab(select_platform(platform), devices, tmp_path, tmp_path, Programs())
    config = lab.config("ten-steps", ranks=max(1, len(devices) // 2))
    assert config.sampling.temperature == 0.8
    assert not config.rollout.vllm.is_eager
    assert config.launch.share_devices == ("split" if len(devices) == 1 else "off")


def test_a_stage_needs_only_stages_before_it() -> None:
    names = [*STAGES]
    assert all(names.index(needed) < names.index(stage.name) for stage in STAGES.values() for needed in stage.needs)


@pytest.mark.parametrize(("platform", "is_known"), [("cpu", False), ("cuda", False), ("npu", True)])
def test_only_under_mindspeed_may_float64_be_dropped(
    platform: str, is_known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def write(lab: Lab, *_: object, **__: object) -> None:
        for rank, error in enumerate([0.0, 2.0]):
            found = {"all_reduce float64 on the host": error, "broadcast float32 on the host": 0.0}
            (tmp_path / f"rank-{rank}.json").write_text(json.dumps(found))

    async def folder(lab: Lab) -> Path:
        return tmp_path

    monkeypatch.setattr(Lab, "run_program", write)
    monkeypatch.setattr(Lab, "model", folder)
    devices = [] if platform == "cpu" else ["0", "1"]
    figures = asyncio.run(collectives(Lab(select_platform(platform), devices, tmp_path, tmp_path, Programs())))
    assert [figure.ok for figure in figures] == [True, is_known, True]
    assert figures[1].value == 2.0


@pytest.mark.parametrize("platform", ["cuda", "npu"])
def test_the_configurations_of_models_of_ordinary_size_are_valid(platform: str, tmp_path: Path) -> None:
    lab = Lab(select_platform(platform), [*"01234567"], tmp_path, tmp_path, Programs())
    four = scaled_config(lab, "asynchrony-s2", SIZES_4B, 2, 2)
    assert (four.trainer.processes, four.rollout.servers, four.max_staleness) == (2, 2, 2)
    eight = scaled_config(lab, "throughput", SIZES_8B, 4, 2)
    assert (eight.trainer.tensor_parallel, eight.trainer.recompute) == (4, "full")
    assert eight.sampling.max_tokens == 2048


def test_models_of_ordinary_size_are_refused_on_too_few_devices(tmp_path: Path) -> None:
    lab = Lab(select_platform("npu"), ["0", "1"], tmp_path, tmp_path, Programs())
    with pytest.raises(ConfigError, match=r"4 devices.* 2\b"):
        asyncio.run(asynchrony(lab))


def test_a_figure_below_its_least_value_is_wrong() -> None:
    assert reaching("gain", 1.72, 1.7).ok
    assert not reaching("gain", 1.69, 1.7).ok
    assert not reaching("gain", math.nan, 1.7).ok
    assert "at least 1.7" in str(reaching("gain", 1.69, 1.7))


def test_a_weight_update_lasts_until_the_last_server_has_loaded_it(tmp_path: Path) -> None:
    timings = Timings(
        lengths=LengthModel(mean=20),
        engine=EngineTimings(step_s=0.01),
        sync=SyncTimings(stall_s=0.5, transfer_s=1.0, load_s=0.25),
    )
    assert update_seconds(recorded_run(tmp_path, 2, timings)) >= 1.75
