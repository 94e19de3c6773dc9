"""The CPU image is built and its containers are started: steps are trained, servers come and go, roles are killed, and
the books balance at the end. `make test-deploy`; without it, or without an engine, it is skipped.

Images that cannot be pulled may be stood in for by local ones:

- REDIS_IMAGE       redis-server and redis-cli on the path; /data belongs to user 999
- PROMETHEUS_IMAGE  /bin/prometheus and /bin/promtool; /prometheus belongs to user 65534
- PYTHON_IMAGE      Python 3.11 with venv, CA certificates; libnuma1, or a way to the distribution's mirror

PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, EXTRA_CA_CERT, BUILD_NETWORK and deploy/wheels say where packages come from.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.ports import free_port

DEPLOY = Path(__file__).parents[2] / "deploy"
STEPS = 1000
GROUPS_PER_STEP = 8
MAX_STALENESS = 2
"""Small steps, and enough of them that the run outlasts the start of several engines."""
CONFIG = {
    "base": ["/app/deploy/configs/cpu.yaml"],
    "name": "deploy-test",
    "steps": STEPS,
    "max_staleness": MAX_STALENESS,
    "group_size": 8,
    "groups_per_step": GROUPS_PER_STEP,
    "rollout": {"lease_s": 60, "progress_interval_s": 1},
    "trainer": {"take_timeout_s": 3600, "checkpoint": {"every_steps": 5}},
    "eval": {"prompts": 16, "samples": 1, "every_steps": 0, "timeout_s": 1800},
    "redis": {"timeout_s": 60},
    "launch": {"ready_timeout_s": 3600},
}
PROJECT = "async-grpo-test"
FILES = ("compose.yaml", "compose.monitoring.yaml")
BUILD_S = 7200.0
START_S = 3600.0
EVENT_S = 1800.0
RUN_S = 7200.0


def docker(*arguments: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=timeout_s)


def compose_command() -> list[str] | None:
    if docker("compose", "version").returncode == 0:
        return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") else None


def why_not() -> str:
    """Return why the test cannot run; "" if it can."""
    if not os.environ.get("ASYNC_GRPO_TEST_DEPLOY"):
        return "builds images and takes half an hour: make test-deploy"
    if not shutil.which("docker"):
        return "there is no docker"
    if docker("info").returncode:
        return "no docker engine answers"
    if compose_command() is None:
        return "there is no docker compose"
    text = "".join((DEPLOY / file).read_text() for file in FILES)
    for variable, default in re.findall(r"\$\{((?:REDIS|PROMETHEUS|PYTHON)_IMAGE):-([^}]+)\}", text):
        image = os.environ.get(variable) or default
        if docker("image", "inspect", image).returncode and docker("pull", image, timeout_s=600).returncode:
            return f"{image} is not here and cannot be pulled; set {variable} to an image that can stand in for it"
    return ""


class Stack:
    """The containers of one project; `close` leaves nothing behind but images."""

    def __init__(self, folder: Path) -> None:
        self._prometheus = free_port()
        view = free_port()
        (folder / "config").mkdir()
        (folder / "config" / "test.yaml").write_text(yaml.safe_dump(CONFIG))
        mounted = {"volumes": [f"{folder / 'config'}:/config:ro"]}
        services: dict[str, object] = dict.fromkeys(("init", "report", "trainer", "rollout"), mounted)
        services["grafana"] = {"profiles": ["unused"]}
        (folder / "test.yaml").write_text(yaml.safe_dump({"services": services}))
        command = compose_command()
        assert command is not None
        files = [word for file in FILES for word in ("-f", str(DEPLOY / file))]
        self._compose = [*command, *files, "-f", str(folder / "test.yaml"), "-p", PROJECT]
        self._environment = {**os.environ, "CONFIG": "/config/test.yaml", "PROMETHEUS_PORT": str(self._prometheus)}
        self._environment["VIEW_PORT"] = str(view)

    def compose(self, *arguments: str, timeout_s: float = EVENT_S) -> str:
        command = [*self._compose, *arguments]
        ended = subprocess.run(command, env=self._environment, capture_output=True, text=True, timeout=timeout_s)
        assert ended.returncode == 0, f"{' '.join(arguments)}: {(ended.stdout + ended.stderr)[-4000:]}"
        return ended.stdout

    def containers(self, service: str) -> list[str]:
        """Return the containers of a service, in any state."""
        found = docker("ps", "-aq", *self._labelled(service)).stdout
        return found.split()

    def inspect(self, container: str) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads(docker("inspect", container).stdout)[0]
        return facts

    def restarts(self, service: str) -> int:
        (container,) = self.containers(service)
        return int(self.inspect(container)["RestartCount"])

    def kill(self, service: str) -> None:
        """Kill all processes of a container but its init process, which then ends too.

        Docker restarts such a container. It does not restart one that `docker kill` has ended.
        """
        (container,) = self.containers(service)
        docker("exec", container, "sh", "-c", "kill -s KILL -- -1")

    def query(self, expression: str) -> float | None:
        """Return the value of a PromQL expression; None without a value, or while Prometheus does not answer."""
        arguments = urllib.parse.urlencode({"query": expression})
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self._prometheus}/api/v1/query?{arguments}", timeout=10
            ) as r:
                result = json.load(r)["data"]["result"]
        except OSError:
            return None
        return float(result[0]["value"][1]) if result else None

    def version(self) -> float:
        """Return the newest version that an engine generates with."""
        return self.query("max(async_grpo_policy_version)") or 0.0

    def trained(self) -> float:
        """Return the newest version that the trainer has made."""
        return self.query("max(async_grpo_trainer_version)") or 0.0

    def logs(self) -> str:
        return self.compose("logs", "--no-color", "--tail", "60")

    def close(self) -> None:
        self.compose("down", "-v", "--remove-orphans", "--timeout", "30")

    def _labelled(self, service: str) -> list[str]:
        labels = {"project": PROJECT, "service": service, "oneoff": "False"}
        return [word for name, value in labels.items() for word in ("-f", f"label=com.docker.compose.{name}={value}")]


pytestmark = [pytest.mark.faults, pytest.mark.timeout(BUILD_S + START_S + 6 * EVENT_S + RUN_S)]


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    if reason := why_not():
        pytest.skip(reason)
    made = Stack(tmp_path)
    try:
        yield made
        print(made.logs())
    finally:
        made.close()


def until(holds: Callable[[], bool], what: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"no {what} within {timeout_s:g} s"
        time.sleep(2)


def goes_on(stack: Stack, after: str) -> None:
    """Wait until three more steps are trained and servers generate with them; check the staleness bound."""
    before = max(stack.version(), stack.trained())
    what = f"three more steps after {after} (version {before:g})"
    until(lambda: min(stack.version(), stack.trained()) >= before + 3, what, EVENT_S)
    active = stack.query("max(async_grpo_run_active_groups)")
    print(f"{after}: version {before:g} -> {stack.version():g}, {active} groups active")
    assert active is not None and active <= (MAX_STALENESS + 1) * GROUPS_PER_STEP


def is_within(stack: Stack) -> None:
    """Check users, published addresses and environments of the containers."""
    for service in ("trainer", "rollout", "report", "view", "redis", "prometheus"):
        (container,) = stack.containers(service)
        facts = stack.inspect(container)
        bound = [each["HostIp"] for ports in facts["NetworkSettings"]["Ports"].values() for each in ports or []]
        assert set(bound) <= {"127.0.0.1"}, service
        assert docker("exec", container, "id", "-u").stdout.strip() != "0", service
        assert "ASYNC_GRPO_REDIS_PASSWORD" not in str(facts["Config"]["Env"]), service
    (server,) = stack.containers("redis")
    assert "NOAUTH" in docker("exec", server, "redis-cli", "ping").stdout


def has_ended(stack: Stack) -> bool:
    states = [
        stack.inspect(each)["State"]
        for each in stack.containers("trainer") + stack.containers("rollout") + stack.containers("report")
    ]
    return all(state["Status"] == "exited" and state["ExitCode"] == 0 for state in states)


def test_containers_train_scale_and_survive_kills_and_the_books_balance(stack: Stack) -> None:
    stack.compose("build", timeout_s=BUILD_S)
    stack.compose("up", "-d", timeout_s=START_S)
    until(lambda: min(stack.version(), stack.trained()) >= 3, "three steps", START_S)
    is_within(stack)

    stack.compose("up", "-d", "--no-recreate", "--scale", "rollout=3")
    until(lambda: stack.query("count(async_grpo_ready == 1)") == 3, "three servers that are ready", EVENT_S)
    until(lambda: stack.query("count(async_grpo_generated_tokens_total > 0)") == 3, "tokens of all three", EVENT_S)
    goes_on(stack, "1 -> 3 servers")

    stack.compose("up", "-d", "--no-recreate", "--scale", "rollout=1")
    until(lambda: stack.query('count(up{job="rollout"} == 1)') == 1, "single server", EVENT_S)
    assert len(stack.containers("rollout")) == 1
    goes_on(stack, "3 -> 1 servers")

    epoch = stack.query("max(async_grpo_trainer_epoch)") or 0.0
    stack.kill("trainer")
    until(lambda: (stack.query("max(async_grpo_trainer_epoch)") or 0.0) > epoch, "epoch of a new trainer", EVENT_S)
    assert stack.restarts("trainer") == 1
    goes_on(stack, "trainer killed")

    stack.kill("rollout")
    until(lambda: stack.restarts("rollout") == 1, "rollout server that was started again", EVENT_S)
    goes_on(stack, "rollout server killed")

    stack.kill("redis")
    until(lambda: stack.restarts("redis") == 1, "server that was started again", EVENT_S)
    goes_on(stack, "redis killed")

    until(lambda: has_ended(stack), "end of the run", RUN_S)
    command = ("async-grpo", "buffer", "stats", "/config/test.yaml", "--json")
    printed = stack.compose("run", "--rm", "--no-deps", "-T", "trainer", *command)
    stats = json.loads(printed[printed.index("{") :])["stats"]
    print({name: stats[name] for name in ("version", "admitted", "released", "active", "balanced")})
    assert stats["balanced"] and stats["active"] == 0 and stats["ended"]
    assert stats["version"] == STEPS
    assert stats["admitted"] == sum(stats["released"].values())
    assert stats["released"]["trained"] == STEPS * GROUPS_PER_STEP
    reported = docker("exec", *stack.containers("view"), "cat", "/runs/deploy-test/summary.json").stdout
    summary = json.loads(reported)
    restarts = {"trainer": 1, f"rollout-{stack.containers('rollout')[0][:12]}": 1}
    assert (summary["steps"], summary["balanced"], summary["restarts"]) == (STEPS, True, restarts)
    listed = json.loads(
        docker("exec", *stack.containers("view"), "async-grpo", "runs", "list", "/runs", "--json").stdout
    )
    assert [row["state"] for row in listed] == ["finished"]
    assert stack.restarts("trainer") == 1, "nothing but the kill may have ended the trainer"

    stack.compose("up", "-d")
    until(lambda: has_ended(stack), "second end of the finished run", EVENT_S)
