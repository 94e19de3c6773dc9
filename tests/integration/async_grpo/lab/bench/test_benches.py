"""Smoke runs of `async-grpo bench NAME --quick` and `python -m benchmarks.NAME --quick`: real processes, servers and
engines, no claim about speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from async_grpo.app.launch.role_process import available_cores
from async_grpo.config.buffer import RedisConfig
from async_grpo.weights.folder.objects import open_location
from async_grpo.weights.shared_memory import SHARED_MEMORY
from buffer.redis.client import make_client
from buffer.redis.retrying import RetryingClient
from tests.support.s3_server import s3_server

TRANSITIONS = ("put_tasks", "admit", "heartbeat", "progress", "insert", "take", "release", "discard", "stats")
TO_ONE = [f"beside {way}" for way in ("tcp", "gloo", "disk")] + ["from manifest to commit", "processor time, both ends"]
COMPARED = [
    *(f"dense, 0.01 GB to one receiver, {what}" for what in TO_ONE),
    "one version into the store, in one thread",
    *(f"AdamW, lr 1e-06: {what}" for what in ("encoding, one core", "decoding, one core", "0.01 GB to one receiver")),
    *(
        f"0.01 GB through {place}, {how}"
        for place in ("a folder", "a bucket")
        for how in ("dense", "AdamW, lr 1e-06, as differences")
    ),
    *(
        f"an engine with 16 requests in flight, 2 MB: {what}"
        for what in (
            "update, from publish until it generates again",
            "of it, transfer",
            "of it, pause",
            "of the pause, load",
        )
    ),
    *(
        f"0.01 GB to {n} receivers, fanout 2: {what}"
        for n in (4, 8)
        for what in ("the trainer sends", "until all have it")
    ),
]
QUESTIONS = [
    {"question": f"Tom has {n} apples and buys {n + 2}. How many?", "answer": f"#### {2 * n + 2}"} for n in range(9)
]


NOT_INSTALLED = ("buffer", "control_plane", "data", "weights")


@dataclass(frozen=True)
class Finished:
    pid: int
    code: int
    shown: str
    error: str
    figures: list[dict[str, Any]]

    @property
    def by_name(self) -> dict[str, dict[str, Any]]:
        return {figure["name"]: figure for figure in self.figures}


def bench(name: str, tmp_path: Path, *options: str, timeout_s: float = 400) -> Finished:
    """Run the bench, which leaves nothing behind and shows every figure that it writes."""
    file = tmp_path / "figures.json"
    program = [f"benchmarks.{name}"] if name in NOT_INSTALLED else ["async_grpo.app.cli.main", "bench", name]
    command = [sys.executable, "-m", *program, "--quick", "--json", str(file), *options]
    with tempfile.TemporaryDirectory() as temp:  # tmp_path is too long for a socket
        environment = {**os.environ, "TMPDIR": temp, "COLUMNS": "300"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, env=environment, **pipes) as process:
            shown, error = process.communicate(timeout=timeout_s)
        assert not list(Path(temp).glob("async-grpo-*"))
    figures = json.loads(file.read_text())["figures"] if process.returncode == 0 else []
    return Finished(process.pid, process.returncode, shown, error, figures)


@pytest.mark.slow
def test_bench_buffer_measures_everything(tmp_path: Path) -> None:
    done = bench("buffer", tmp_path)
    assert done.code == 0, done.error
    for start in ("throughput, 1 producer", "throughput, 8 producers", "insert to take", *TRANSITIONS):
        assert any(name.startswith(start) for name in done.by_name), start
    for figure in done.figures:
        assert figure["value"] > 0 and figure["baseline"] > 0 and figure["ratio"] > 0
        assert figure["name"] in done.shown


@pytest.mark.slow
async def test_bench_buffer_leaves_no_key_on_a_given_server(redis_config: RedisConfig, tmp_path: Path) -> None:
    assert redis_config.url is not None
    done = bench("buffer", tmp_path, "--url", redis_config.url)
    assert done.code == 0, done.error
    link = RetryingClient(make_client(redis_config), 5.0)
    assert not [name async for name in link.client.scan_iter(match="agrpo:{bench-*")]
    await link.aclose()


@pytest.mark.slow
def test_bench_buffer_reports_an_unreachable_server(tmp_path: Path) -> None:
    done = bench("buffer", tmp_path, "--url", "unix:///nowhere/server.sock")
    assert done.code == 1
    assert "ServerLost" in done.error and "Traceback" not in done.error


@pytest.mark.slow
def test_bench_weights_measures_everything(tmp_path: Path) -> None:
    with s3_server() as bucket:
        done = bench("weights", tmp_path, "--bucket", f"{bucket}/bench")
        assert open_location(bucket, "bucket").list_names("") == []
    assert done.code == 0, done.error
    assert not list(SHARED_MEMORY.glob(f"async-grpo-bench-{done.pid}-*"))
    for name in COMPARED:
        figure = done.by_name[name]
        assert figure["value"] > 0 and figure["baseline"] > 0 and figure["ratio"] > 0
    update, transfer, pause, load = (
        done.by_name[name] for name in COMPARED if name.startswith("an engine with 16 requests in flight")
    )
    for which in ("value", "baseline"):  # one round, so these are the parts of one update and not medians
        assert load[which] < pause[which] and transfer[which] + pause[which] < update[which] * 1.001
    assert all(name in done.shown for name in done.by_name)
    assert done.by_name["0.01 GB to 8 receivers, fanout 2: the trainer sends"]["value"] <= 2.1
    assert done.by_name["AdamW, lr 1e-06: patches are smaller than dense"]["value"] > 30


@pytest.mark.slow
def test_bench_rollout_compares_the_same_work(tmp_path: Path) -> None:
    done = bench("rollout", tmp_path)
    assert done.code == 0, done.error
    assert not list(SHARED_MEMORY.glob("*bench-rollout-*"))
    assert all(figure["value"] > 0 and figure["name"] in done.shown for figure in done.figures)
    speeds = [figure for figure in done.figures if figure["unit"] == "tokens/s"]
    assert [figure["name"].split(",")[0] for figure in speeds] == ["whole server", "continuous dispatch"]
    assert all(figure["baseline"] > 0 and figure["ratio"] > 0 for figure in speeds)
    made = [figure for figure in done.figures if figure["unit"] == "tokens"]
    assert len(made) == 2 and all(figure["value"] == figure["baseline"] for figure in made)


@pytest.mark.slow
def test_bench_control_plane_loses_no_server(tmp_path: Path) -> None:
    timings = tmp_path / "timings.yaml"
    done = bench("control_plane", tmp_path, "--write-timings", str(timings))
    assert done.code == 0, done.error
    assert not list(SHARED_MEMORY.glob("*bench-*"))
    for servers in (2, 4):
        known, inserted = (
            done.by_name[f"{servers} servers: {what}"] for what in ("servers that the board knows", "inserted")
        )
        assert known["value"] == servers and inserted["value"] > 0 and inserted["baseline"] > 0
        assert done.by_name[f"{servers} servers: published to applied, median"]["value"] > 0
    assert "exchange_s" in timings.read_text()


@pytest.mark.slow
def test_bench_trainer_compares_steps_with_the_same_loss(tmp_path: Path) -> None:
    done = bench("trainer", tmp_path)
    assert done.code == 0, done.error
    assert all(name in done.shown for name in done.by_name)
    speeds = [figure for figure in done.figures if figure["unit"] == "tokens/s"]
    kinds = ["as in TRL", "same room", "the best", "sorted by length", "one by one", "packed by hand"]
    assert all(kind in figure["baseline_name"] for kind, figure in zip(kinds, speeds, strict=True))
    assert all(min(figure["value"], figure["baseline"], figure["ratio"]) > 0 for figure in speeds)
    for name in ("loss", "gradient norm"):
        assert done.by_name[name]["value"] == pytest.approx(done.by_name[name]["baseline"], rel=1e-4)
    packed = [figure for figure in done.figures if figure["name"].startswith("packing efficiency")]
    assert len(packed) == 2 and all(0 < figure[which] <= 1 for figure in packed for which in ("value", "baseline"))
    (streamed,) = (figure for figure in done.figures if "streamed" in figure["name"])
    assert streamed["baseline"] > 0 and streamed["ratio"] > 0


@pytest.mark.slow
def test_bench_trainer_reads_prompts_from_a_file(tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    missing = bench("trainer", tmp_path, "--data", str(data))
    assert missing.code != 0 and "train.jsonl" in missing.error
    data.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    done = bench("trainer", tmp_path, "--data", str(data))
    assert done.code == 0, done.error


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(len(available_cores()) < 2, reason="each side needs a core of its own")
def test_bench_pipeline_compares_every_staleness_with_the_synchronous_loop(tmp_path: Path) -> None:
    plot = tmp_path / "pipeline.png"
    done = bench("pipeline", tmp_path, "--plot", str(plot), timeout_s=1700)
    assert done.code == 0, done.error[-3000:]
    values = {name: figure["value"] for name, figure in done.by_name.items()}
    for staleness in (0, 2):
        name = f"S={staleness}"
        assert values[f"{name}: tokens/s"] > 0 and name in done.shown
        assert all(0 <= values[f"{name}: {side} idle"] <= 1 for side in ("trainer", "rollout"))
        assert values[f"{name}: age, largest"] <= staleness
    assert done.by_name["S=2: tokens/s"]["ratio"] > 0 and values["S=2: share of the overlap bound"] > 0
    assert 1 <= values["overlap bound, S=0"] <= 2
    assert values["T_gen, S=0"] > 0 and values["T_train, S=0"] > 0
    assert plot.read_bytes().startswith(b"\x89PNG")
