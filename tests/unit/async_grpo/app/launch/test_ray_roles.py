"""What `async-grpo launch ray` asks of Ray, when it refuses to start, and one role as its actor runs it."""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from async_grpo.app.launch.clusters.ray import launch_run, plan_bundles
from async_grpo.app.launch.clusters.ray_role import RayRole
from async_grpo.app.launch.role_process import RoleSpec
from async_grpo.config import RunConfig, validate
from async_grpo.errors import ConfigError

READY = "import time; print('ready', flush=True); time.sleep(60)"
OBEYS = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); " + READY
REFUSES = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + READY


def config(**changes: Any) -> RunConfig:
    raw = {"name": "one", "model": {"path": "any"}, "redis": {"url": "redis://127.0.0.1:6379"}}
    return validate(raw | changes, "test")


@pytest.mark.parametrize(("trains", "generates", "resource"), [("cuda", "cuda", "GPU"), ("npu", "ascend", "NPU")])
def test_every_node_of_the_trainer_and_every_server_is_a_bundle_with_its_devices(
    trains: str, generates: str, resource: str
) -> None:
    trainer = {"platform": trains, "nodes": 2, "processes": 16}
    rollout = {"servers": 2, "vllm": {"platform": generates, "tensor_parallel": 2}}
    asked = {"launch": {"ray": {"trainer": {"CPU": 32}, "rollout": {"CPU": 8}}}}
    assert plan_bundles(config(trainer=trainer, rollout=rollout, **asked), 2) == {
        "trainer": [{resource: 8, "CPU": 32}] * 2,
        "rollout-0": [{resource: 2, "CPU": 8}],
        "rollout-1": [{resource: 2, "CPU": 8}],
    }


def test_what_the_site_asks_for_replaces_the_count_of_the_configuration() -> None:
    asked = {"launch": {"ray": {"trainer": {"CPU": 1, "NPU": 0, "ascend": 4}}}}
    found = plan_bundles(config(trainer={"platform": "npu", "processes": 4}, **asked), 0)
    assert found["trainer"] == [{"CPU": 1, "NPU": 0, "ascend": 4}]


def test_a_run_that_no_cluster_is_named_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match=r"launch\.ray\.address"):
        launch_run(config(), None, print)
    with pytest.raises(ConfigError, match=r"redis\.url"):
        launch_run(config(redis={}), None, print)


@pytest.mark.parametrize(
    ("program", "code", "words"),
    [(OBEYS, 0, "ended with exit code 0"), (REFUSES, -signal.SIGKILL, "was killed by SIGKILL")],
)
def test_a_role_is_stopped_from_another_thread_and_killed_if_it_stays(
    tmp_path: Path, program: str, code: int, words: str
) -> None:
    role, log = RayRole(), tmp_path / "rollout-0.log"

    def stop() -> None:
        while not log.exists() or "ready" not in log.read_text():
            time.sleep(0.05)
        role.stop(1.0)

    stopping = threading.Thread(target=stop)
    stopping.start()
    found, said = role.run(RoleSpec("rollout-0", [sys.executable, "-c", program], log, 0), f"ray-{tmp_path.name}")
    stopping.join()
    assert found == code
    assert f"rollout-0 {words}" in said
