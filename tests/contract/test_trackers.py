"""What every tracker promises (`async_grpo.telemetry.trackers`), and what `Trackers` makes of one that fails.

A tracker is one entry of READERS: how what it wrote is read back, without a network. A tracker whose package
is not installed is skipped; `make test-trackers` installs all.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import structlog

from async_grpo.config import RunConfig, validate
from async_grpo.errors import DependencyError
from async_grpo.telemetry.trackers import MODULES, TrackedRun, Tracker, Trackers, _open, check_trackers, make_trackers
from async_grpo.wire.board import Estimate, EvalMetrics, Evaluation

Points = dict[str, list[tuple[int, float]]]


@dataclass
class Written:
    """What can be read back of a tracker's run."""

    points: Points = field(default_factory=dict)
    settings: Mapping[str, Any] | str = field(default_factory=dict)
    report: str = ""

    def add(self, tag: str, step: int, value: float) -> None:
        self.points.setdefault(tag, []).append((step, value))


@dataclass
class Counting:
    """The in-memory twin; fails at every step of `fails_at`, and at close if there is any."""

    written: Written = field(default_factory=Written)
    fails_at: tuple[int, ...] = ()
    closed: int = 0

    def log(self, step: int, scalars: Mapping[str, float], at_s: float) -> None:
        if step in self.fails_at:
            raise OSError("the tracker's server is gone")
        for tag, value in scalars.items():
            self.written.add(tag, step, value)

    def attach(self, file: Path) -> None:
        self.written.report = file.read_text()

    def close(self) -> None:
        self.closed += 1
        if self.fails_at:
            raise OSError("the tracker's server is gone")


def read_tensorboard(run: TrackedRun) -> Written:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.config.run_dir / "tensorboard"))
    events.Reload()

    def text(tag: str) -> str:
        return str(events.Tensors(tag)[0].tensor_proto.string_val[0].decode())

    points = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    texts = events.Tags()["tensors"]
    return Written(points, text("config"), text("report.md") if "report.md" in texts else "")


def read_wandb(run: TrackedRun) -> Written:
    from swanlab.converter.wb.wbdatastore import WBDataStoreReader
    from wandb.proto.wandb_internal_pb2 import Record

    written = Written({}, {})
    for file in sorted(run.config.run_dir.glob(f"wandb/offline-run-*-{run.id}/run-{run.id}.wandb")):
        with WBDataStoreReader() as records:
            records.open(file)
            while raw := records.scan():
                record = Record.FromString(raw)
                row = {item.nested_key[0] if item.nested_key else item.key: item for item in record.history.item}
                step = json.loads(row.pop("step").value_json) if row else 0
                for tag in (tag for tag in row if "/" in tag):
                    written.add(tag, step, json.loads(row[tag].value_json))
                written.settings |= {item.key: json.loads(item.value_json) for item in record.config.update if item.key}
        for report in file.parent.glob("files/report.md"):
            written.report = report.read_text()
    return written


def read_mlflow(run: TrackedRun) -> Written:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run.config.run_dir.parent.resolve()}/mlflow.db")
    experiment = client.get_experiment_by_name(run.config.telemetry.project)
    (found,) = client.search_runs([experiment.experiment_id])
    points = {
        tag.replace("_at_", "@"): [(m.step, m.value) for m in client.get_metric_history(found.info.run_id, tag)]
        for tag in found.data.metrics
    }
    report = Path(found.info.artifact_uri.removeprefix("file://")) / "report.md"
    return Written(points, found.data.params, report.read_text() if report.exists() else "")


def read_swanlab(run: TrackedRun) -> Written:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    written = Written()
    for folder in sorted((run.config.run_dir / "swanlab").glob("run-*")):
        records = DataStoreReader()
        (file,) = folder.glob("*.swanlab")
        records.open(file)
        for record in map(Record.FromString, records):
            if record.HasField("scalar"):
                written.add(record.scalar.key, record.scalar.step, record.scalar.value.number)
        records.close()
        written.settings = (folder / "files" / "config.yaml").read_text()
        for report in folder.glob("media/text/*"):
            written.report = report.read_text()
    return written


def read_trackio(run: TrackedRun) -> Written:
    from trackio.sqlite_storage import SQLiteStorage

    written = Written()
    for row in SQLiteStorage.get_logs(run.config.telemetry.project, run.id):
        for tag, value in row.items():
            if "/" in tag:
                written.add(tag, row["step"], value)
        written.report = row.get("report.md", {"_value": written.report})["_value"]
    written.settings = SQLiteStorage.get_run_config(run.config.telemetry.project, run.id)
    return written


READERS: dict[str, Callable[[TrackedRun], Written]] = {
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
    "mlflow": read_mlflow,
    "swanlab": read_swanlab,
    "trackio": read_trackio,
}


def config_of(folder: Path, *trackers: str) -> RunConfig:
    raw = {"name": "tracked", "runs_dir": str(folder), "model": {"random": {}}, "telemetry": {"trackers": trackers}}
    return validate(raw, "test")


@pytest.fixture(params=READERS)
def opened(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    """A tracker without a network."""
    pytest.importorskip(request.param)
    for variable, value in {"WANDB_MODE": "offline", "SWANLAB_MODE": "offline"}.items():
        monkeypatch.setenv(variable, value)
    yield Opened(request.param, config_of(tmp_path, request.param))


@dataclass
class Opened:
    """A tracker that can be opened again, and what reads it back."""

    name: str
    config: RunConfig

    def trackers(self) -> Trackers:
        return Trackers({self.name: self.tracker})

    def tracker(self) -> Tracker:
        return _open(self.name, self.config)

    def read(self, points: int) -> Written:
        """Read it back once it has this many points, or what there is after ten seconds: wandb's service writes the
        end of its file after `finish` has returned."""
        run = TrackedRun(self.config, (self.config.run_dir / "tracker_id").read_text())
        deadline = time.monotonic() + 10
        while True:
            written = READERS[self.name](run)
            if sum(map(len, written.points.values())) >= points or time.monotonic() > deadline:
                return written
            time.sleep(0.02)


def test_a_run_is_resumed_under_its_id_with_points_by_tag_its_configuration_and_its_report(opened: Opened) -> None:
    """What is not finite is left out. Evaluations come when the trainer has closed its trackers."""
    trackers = opened.trackers()
    facts = {"loss": 0.25, "wait_s": 1.5, "lr": math.nan, "novel": 2, "reward_by_function": {"right": 0.5}}
    facts["released_groups"] = {"stale": 3}
    trackers.log_step({"kind": "step", "step": 7, "time_s": 1.7e9, **facts})
    trackers.close()
    figures = EvalMetrics(prompts=4, completions=8, pass_at={"2": Estimate(0.75, 0.5, 1.0)})
    report = opened.config.run_dir / "report.md"
    report.write_text("# It learned\n")
    trackers = opened.trackers()
    trackers.log_evaluation(Evaluation(version=8, prompts=4, samples=2, sampled_accuracy=0.5, figures=figures))
    trackers.attach_files([report])
    trackers.close()
    written = opened.read(7)
    assert written.points == {
        "train/loss": [(7, 0.25)],
        "time/wait_s": [(7, 1.5)],
        "other/novel": [(7, 2)],
        "reward_by_function/right": [(7, 0.5)],
        "released_groups/stale": [(7, 3)],
        "eval/sampled_accuracy": [(8, 0.5)],
        "eval/pass@2": [(8, 0.75)],
        "eval_low/pass@2": [(8, 0.5)],
        "eval_high/pass@2": [(8, 1.0)],
    }
    assert "max_staleness" in written.settings
    assert written.report == "# It learned\n"


def test_a_tracker_may_be_closed_twice(opened: Opened) -> None:
    tracker = opened.tracker()
    for step in (1, 2):
        tracker.log(step, {"train/loss": 0.5}, 1.7e9)
    tracker.close()
    tracker.close()
    assert opened.read(2).points == {"train/loss": [(1, 0.5), (2, 0.5)]}


def test_a_tracker_that_fails_is_warned_about_once_and_the_others_go_on() -> None:
    failing = Counting(fails_at=(2, 3))
    other = Counting()
    with structlog.testing.capture_logs() as lines:
        trackers = Trackers({"failing": lambda: failing, "other": lambda: other})
        for step in (1, 2, 3):
            trackers.log_step({"step": step, "loss": 0.5})
        trackers.close()
    assert [(line["log_level"], line["tracker"]) for line in lines] == [("warning", "failing")]
    assert failing.written.points == {"train/loss": [(1, 0.5)]}
    assert other.written.points == {"train/loss": [(step, 0.5) for step in (1, 2, 3)]}
    assert (failing.closed, other.closed) == (1, 1)


def test_a_tracker_that_cannot_be_opened_or_hangs_is_warned_about_and_ends_nothing() -> None:
    def no_key() -> Tracker:
        raise RuntimeError("no API key")

    entered = Event()
    never = Event()

    class Hanging(Counting):
        def log(self, step: int, scalars: Mapping[str, float], at_s: float) -> None:
            entered.set()
            never.wait(60)

    with structlog.testing.capture_logs() as lines:
        trackers = Trackers({"closed": no_key, "hanging": Hanging}, close_timeout_s=0.1)
        for step in range(1, 1003):
            trackers.log_step({"step": step, "loss": 0.5})
            assert entered.wait(60)
        trackers.close()
    never.set()
    assert {(line["tracker"], line.get("error")) for line in lines} == {
        ("closed", "no API key"),
        ("hanging", "it does not keep up"),
        ("hanging", None),
    }


def test_no_trackers_write_nothing_and_a_former_key_still_reads(tmp_path: Path) -> None:
    raw = {"name": "off", "runs_dir": str(tmp_path), "model": {"random": {}}, "telemetry": {"tensorboard": False}}
    config = validate(raw, "test")
    assert config.telemetry.trackers == []
    trackers = make_trackers(config)
    trackers.log_step({"step": 1, "loss": 0.5})
    trackers.close()
    assert list(tmp_path.iterdir()) == []
    assert validate({**raw, "telemetry": {"tensorboard": True}}, "test").telemetry.trackers == ["tensorboard"]


def test_a_tracker_that_is_not_installed_is_refused_before_the_run(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DependencyError, match="install wandb"):
        check_trackers(config_of(tmp_path, "wandb"))
    assert MODULES.keys() == READERS.keys()
