"""/metrics of the trainer beside a real buffer: what it says, to whom it listens, and that it harms nobody."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_grpo.config import RunConfig, validate
from async_grpo.config.buffer import RedisConfig
from async_grpo.telemetry.jsonl import read_rows
from async_grpo.telemetry.metrics import METRICS
from async_grpo.telemetry.rows import rows_of_kind
from async_grpo.wire import Group, ReleaseReason
from async_grpo.wire.board import ServerBeat
from buffer import EmbeddedServer, open_run, run_exists, wipe_run
from tests.support.trainer_programs.batches import make_sample, make_task
from trainer.metrics_server import MetricsServer
from trainer.run_logger import TrainerLogger

DOCS = Path(__file__).parents[3] / "docs" / "http.md"
P, G = 2, 3


def config_of(redis: RedisConfig, name: str = "shown", **http: Any) -> RunConfig:
    return validate(
        {
            "name": name,
            "steps": 7,
            "max_staleness": 1,
            "group_size": G,
            "groups_per_step": P,
            "model": {"random": {}},
            "redis": redis.model_dump(),
            "telemetry": {"http": http},
        },
        "test",
    )


def row(step: int, **facts: Any) -> dict[str, Any]:
    """As `step_row` makes it, without what nobody shows."""
    spent = {"wait_s": 0.25, "train_s": 2.0, "publish_s": 0.5}
    fixed = {"step": step, "epoch": 1, "time_s": 1.5e9, "replayed": False, "groups": P, "skipped_steps": 0, "lr": 0.1}
    return {**fixed, "trained_tokens": 100, "age_mean": 0.5, "age_max": 1, "loss": -0.25, **spent, **facts}


@pytest.fixture
def config(redis_config: RedisConfig) -> Iterator[RunConfig]:
    made = config_of(redis_config)
    yield made
    asyncio.run(wipe_run(redis_config, made.name))


@pytest.fixture
def shown(config: RunConfig) -> Iterator[tuple[MetricsServer, str]]:
    """(exposition, its address)."""
    made = MetricsServer(config)
    yield made, made.start()
    made.close()


def get(address: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(address, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def figures(address: str) -> dict[str, float]:
    """By name and labels."""
    status, text = get(f"{address}/metrics")
    assert status == 200
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def fill(config: RunConfig) -> None:
    """Four groups are admitted: one is finished, one given up."""

    async def filling() -> None:
        random = np.random.default_rng(1)
        buffer = await open_run(config)
        await buffer.put_tasks([make_task(random, index, 4) for index in range(8)])
        first, second, *_ = await buffer.admit_groups(8, holder="test", timeout_s=30.0)
        samples = [make_sample(random, 0) for _ in range(G)]
        await buffer.insert_group(first, Group(seq=first.seq, attempt=first.attempt, task=first.task, samples=samples))
        await buffer.discard_group(second, ReleaseReason.FILTERED)
        await buffer.aclose()

    asyncio.run(filling())


def test_a_trainer_is_alive_at_once_and_ready_with_its_weights_and_a_scrape_writes_nothing(
    shown: tuple[MetricsServer, str], config: RunConfig
) -> None:
    exposed, address = shown
    assert get(f"{address}/healthz")[0] == 200
    assert get(f"{address}/readyz") == (503, '{"status":"not ready","reason":"no weights are served yet"}')
    exposed.mark_joined(1, 0)
    assert get(f"{address}/readyz")[0] == 503, "it may have to replay steps first"
    assert figures(address)["async_grpo_trainer_buffer_up"] == 0, "nobody has opened the run"
    assert not asyncio.run(run_exists(config.redis, config.name)), "a scrape writes nothing"
    exposed.mark_ready()
    assert get(f"{address}/readyz")[0] == 200


def test_steps_are_added_up_and_the_last_one_is_described(shown: tuple[MetricsServer, str]) -> None:
    exposed, address = shown
    exposed.mark_joined(1, 3)
    exposed.mark_ready()
    exposed.record_step(row(4, reward_mean=0.25, replayed=True))
    exposed.record_step(row(5, reward_mean=0.75, skipped_steps=1, reward_by_function={"right": 0.5}))
    found = figures(address)
    wanted = {
        "version": 5,
        "epoch": 1,
        "target_version": 7,
        "ready": 1,
        "steps_total": 2,
        "skipped_steps_total": 1,
        "replayed_steps_total": 1,
        "groups_total": 2 * P,
        "samples_total": 2 * P * G,
        "trained_tokens_total": 200,
        'phase_seconds_total{phase="wait"}': 0.5,
        'phase_seconds_total{phase="train"}': 4,
        'phase_seconds_total{phase="prox"}': 0,
        "reward_mean": 0.75,
        'reward_by_function{function="right"}': 0.5,
        "age_max_steps": 1,
        "age_mean_steps": 0.5,
        "age_bound_steps": 1,
        "last_step_timestamp_seconds": 1.5e9,
        'info{run="shown"}': 1,
    }
    assert {name: found[f"async_grpo_trainer_{name}"] for name in wanted} == wanted
    assert "async_grpo_trainer_logprob_gap_mean" not in found, "it was not measured"


def test_groups_of_the_run_are_counted_as_the_buffer_counts_them(
    shown: tuple[MetricsServer, str], config: RunConfig
) -> None:
    exposed, address = shown
    fill(config)
    assert figures(address)["async_grpo_trainer_buffer_up"] == 0, "nobody has taken over the run"
    exposed.mark_joined(1, 0)
    found = figures(address)
    assert found["async_grpo_trainer_buffer_up"] == 1
    run = {name.removeprefix("async_grpo_run_"): value for name, value in found.items() if "_run_" in name}
    released = {name: value for name, value in run.items() if name.startswith("released")}
    assert run["admitted_groups_total"] == 4
    assert run["active_groups"] == run["admitted_groups_total"] - sum(released.values()) == 3
    assert run["ready_groups"] == 1
    assert {name: value for name, value in released.items() if value} == {'released_groups_total{reason="filtered"}': 1}
    assert len(released) == len(ReleaseReason)


def test_a_buffer_that_is_gone_is_told_and_nothing_else_changes(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "server", RedisConfig())
    config = config_of(RedisConfig(url=server.start(), timeout_s=5.0))
    fill(config)
    exposed = MetricsServer(config)
    try:
        address = exposed.start()
        exposed.mark_joined(1, 0)
        assert figures(address)["async_grpo_trainer_buffer_up"] == 1
        server.stop()
        exposed.record_step(row(1))
        deadline = time.monotonic() + 60
        while (found := figures(address))["async_grpo_trainer_buffer_up"] and time.monotonic() < deadline:
            time.sleep(0.1)  # an answer is good for a second
        assert found["async_grpo_trainer_buffer_up"] == 0
        assert found["async_grpo_trainer_version"] == 1
        assert "async_grpo_run_active_groups" not in found
    finally:
        exposed.close()
        server.stop()


def teach(exposed: MetricsServer) -> None:
    """Heartbeats of a server that makes 1,000 tokens a second with 8 samples, whatever its number."""
    for second in range(20):
        beat = ServerBeat(name="rollout-0", pid=1, version=0, running=8, tokens_per_s=1000.0, time_s=float(second))
        exposed.demand.add_heartbeats([beat])


def test_wanted_servers_are_shown_once_enough_was_measured(shown: tuple[MetricsServer, str], config: RunConfig) -> None:
    exposed, address = shown
    teach(exposed)
    fill(config)
    exposed.mark_joined(1, 0)
    exposed.record_step(row(1, step_s=9.0, completion_tokens_mean=100.0, completion_tokens_max=200))
    assert "async_grpo_trainer_servers_wanted" not in figures(address), "one step says little"
    for step in (2, 3):
        exposed.record_step(row(step, step_s=9.0, completion_tokens_mean=100.0, completion_tokens_max=200))
    deadline = time.monotonic() + 30
    while (found := figures(address).get("async_grpo_trainer_servers_wanted")) is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert found == 1, "600 tokens take a server less than the 8.75 s for which the trainer computes"


def test_the_documented_metrics_are_the_metrics(shown: tuple[MetricsServer, str], config: RunConfig) -> None:
    exposed, address = shown
    teach(exposed)
    fill(config)
    exposed.mark_joined(1, 0)
    for step in (1, 2, 3):
        facts = {"step_s": 9.0, "completion_tokens_max": 1, **{each.key: 0.5 for each in METRICS if each.gauge}}
        exposed.record_step(row(step, **facts))
    served = set(re.findall(r"^# HELP (async_grpo_\w+)", get(f"{address}/metrics")[1], re.MULTILINE))
    _, chapter = DOCS.read_text().split("\n## The trainer\n")
    assert served == set(re.findall(r"^\| `(async_grpo_\w+)", chapter, re.MULTILINE))


@pytest.mark.parametrize(
    ("request_line", "status"),
    [("POST /metrics", 405), ("GET /../etc/passwd", 404), ("GET /", 404), ("nonsense", 400), ("GET /healthz?x=1", 200)],
)
def test_only_what_is_there_is_answered(shown: tuple[MetricsServer, str], request_line: str, status: int) -> None:
    with connected(shown[1]) as client:
        client.sendall(f"{request_line} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert client.recv(1000).startswith(f"HTTP/1.1 {status} ".encode())


def test_clients_that_never_end_their_headers_keep_nobody_from_health_and_metrics(
    shown: tuple[MetricsServer, str],
) -> None:
    with contextlib.ExitStack() as open_ones:
        for _ in range(300):
            open_ones.enter_context(connected(shown[1])).sendall(b"GET ")
        assert [get(f"{shown[1]}/{page}")[0] for page in ("healthz", "metrics")] == [200, 200]


@pytest.mark.parametrize("port", [None, -1])
def test_it_may_be_off(redis_config: RedisConfig, port: int | None) -> None:
    exposed = MetricsServer(config_of(redis_config, port=port))
    assert exposed.start() is None
    exposed.mark_joined(1, 0)
    exposed.record_step(row(1))
    exposed.close()


def test_a_port_that_is_taken_is_no_reason_not_to_train(
    redis_config: RedisConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.run_logger.is_rank_zero", lambda: True)
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as other:
        config = config_of(redis_config, port=other.getsockname()[1])
        logger = TrainerLogger(config)
        logger.log_step(row(1))
        logger.close()
    (warning,) = rows_of_kind(read_rows(config.run_dir / "metrics.jsonl"), "warning")
    assert "telemetry.http" in warning["message"], "the terminal, the report and the page show it"


def test_nobody_listens_after_the_end(config: RunConfig) -> None:
    exposed = MetricsServer(config)
    address = exposed.start()
    exposed.close()
    with pytest.raises(urllib.error.URLError):
        get(f"{address}/healthz")


def connected(address: str) -> socket.socket:
    host, _, port = address.removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60)
