"""The commands of deploy/compose.yaml, started in its order without an engine: a run ends with its report, its page is
there, and nothing that the containers print holds a secret."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest
import yaml

from async_grpo.utils import process_tree
from async_grpo.utils.child_process import child_argv
from buffer.server import find_server
from tests.support.deploy_files import DEPLOY, ROOT, SCRIPTS, SECRETS, SERVICES
from tests.support.ports import free_port
from tests.support.whole_run import CONFIG, check_books

STEPS = 24
"""So many that Prometheus, which asks every second, sees each server more than once."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Containers:
    """Services of the profile cpu as processes of this machine, with the entrypoint of the images."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.page = free_port()
        self._redis = free_port()
        self.ports = {"rollout": free_port(), "trainer": free_port(), "prometheus": free_port()}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.closing: list[Prometheus] = []
        for place in ("bin", "redis", "runs", "logs", *(f"secrets/{name}" for name in SECRETS.values())):
            (folder / place).mkdir(parents=True, exist_ok=True)
        (folder / "bin" / "redis-server").symlink_to(shutil.which(find_server()) or find_server())
        command = folder / "bin" / "async-grpo"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m async_grpo.app.cli.main "$@"\n')
        command.chmod(0o755)
        self._config = folder / "run.yaml"
        self._config.write_text(yaml.safe_dump(self._settings()))

    def _settings(self) -> dict[str, object]:
        small = yaml.safe_load(CONFIG.format(steps=STEPS, max_tokens=24))
        small |= {"max_staleness": 0}  # on-policy, so that the log-probability gap is measured at every step
        small["model"]["warmup"] = None
        return small | {
            "base": [str(DEPLOY / "configs" / "cpu.yaml")],
            "runs_dir": str(self.folder / "runs"),
            "redis": {"url": f"redis://127.0.0.1:{self._redis}", "timeout_s": 10},
            "weights": {bind: f"tcp://127.0.0.1:{free_port()}" for bind in ("bind", "relay_bind")},
            "rollout": small["rollout"] | {"http": {"host": "127.0.0.1", "port": self.ports["rollout"]}},
            "telemetry": {"http": {"host": "127.0.0.1", "port": self.ports["trainer"]}},
            "rewards": {"functions": [{"name": "answer_tag"}]},
        }

    def start(self, name: str) -> None:
        service = SERVICES[name]
        words = [*service.get("entrypoint", ["sh", str(SCRIPTS / "entrypoint.sh")]), *service["command"]]
        if name == "redis":
            words += ["--port", str(self._redis), "--bind", "127.0.0.1"]
        environment = {**os.environ, **service.get("environment", {}), "HOSTNAME": "container"}
        environment |= {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "SECRETS_DIR": str(self._secrets_of(service)),
            "CONFIG": str(self._config),
            "ASYNC_GRPO_LOG_FORMAT": "json",  # as the images have it
        }
        with self.log(name).open("ab") as log:
            self._processes[name] = subprocess.Popen(
                child_argv([self._here(word) for word in words]),
                cwd=self.folder,
                env=environment,
                stdout=log,
                stderr=log,
            )

    def _secrets_of(self, service: dict[str, Any]) -> Path:
        """Return a folder with links to the secrets that the service mounts, and to no others."""
        folders = [
            volume.split(":")[0].removeprefix("secrets-") for volume in service["volumes"] if "secrets-" in volume
        ]
        mounted = self.folder / "mounted" / "-".join(folders)
        mounted.mkdir(parents=True, exist_ok=True)
        for folder in folders:
            if not (mounted / folder).exists():
                (mounted / folder).symlink_to(self.folder / "secrets" / folder)
        return mounted

    def _here(self, word: str) -> str:
        """A word of a command with places of this machine for those of the container."""
        places = {"/usr/local/bin/": f"{SCRIPTS}/", "/secrets": str(self.folder / "secrets")}
        places |= {"/run/secrets": str(self.folder / "secrets" / "redis")}
        places |= {"/data": str(self.folder / "redis"), "/runs": str(self.folder / "runs")}
        places |= {"0.0.0.0": "127.0.0.1", "8765": str(self.page)}
        for there, here in places.items():
            word = word.replace(there, here) if word.startswith(there) else word
        return word

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def wait(self, name: str, timeout_s: float = 300.0) -> int:
        return self._processes[name].wait(timeout_s)

    def stop(self, name: str) -> int:
        self._processes[name].send_signal(signal.SIGTERM)
        return self.wait(name, 60)

    def kill(self, name: str) -> None:
        """Kill the entrypoint and all processes below it, as the end of a container does."""
        entrypoint = self._processes[name].pid
        for process in (entrypoint, *process_tree.descendants(entrypoint, process_tree.parents())):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._processes[name].wait()

    def until(self, holds: Callable[[], bool], what: str, timeout_s: float = 200.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not holds():
            ended = {name: process.poll() for name, process in self._processes.items() if process.poll()}
            assert not ended, f"{ended} before {what}: {[self.log(name).read_text()[-2000:] for name in ended]}"
            assert time.monotonic() < deadline, f"no {what}"
            time.sleep(0.2)

    def close(self) -> None:
        for prometheus in self.closing:
            prometheus.close()
        for name, process in self._processes.items():
            if process.poll() is None:
                self.kill(name)


class Prometheus:
    """The shipped configuration and rules, with targets of this machine; scrapes every second."""

    def __init__(self, folder: Path, ports: dict[str, int]) -> None:
        shutil.copytree(DEPLOY / "prometheus", folder)
        settings = yaml.safe_load((folder / "prometheus.yml").read_text())
        settings["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
        for job in settings["scrape_configs"]:
            job.pop("dns_sd_configs", None)
            job["static_configs"] = [{"targets": [f"127.0.0.1:{ports[job['job_name']]}"]}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
        self.address = f"http://127.0.0.1:{ports['prometheus']}"
        words = ["--config.file=prometheus.yml", "--storage.tsdb.path=data"]
        words.append(f"--web.listen-address={urlsplit(self.address).netloc}")
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                child_argv([shutil.which("prometheus") or "", *words]), cwd=folder, stdout=log, stderr=log
            )

    def ask(self, what: str, **arguments: str) -> Any:
        """The data of an answer of its API. Raises HTTPError for a query that it refuses."""
        with urllib.request.urlopen(f"{self.address}/api/v1/{what}?{urlencode(arguments)}", timeout=20) as answer:
            return json.load(answer)["data"]

    def ever(self, query: str, since_s: float) -> list[Any]:
        """The series that the query has had since then."""
        times = {"start": f"{since_s:.0f}", "end": f"{time.time():.0f}", "step": "1"}
        found: list[Any] = self.ask("query_range", query=query, **times)["result"]
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def containers(tmp_path: Path) -> Iterator[Containers]:
    made = Containers(tmp_path)
    try:
        yield made
    finally:
        made.close()


FOREIGN = re.compile(r"\[?[WIE]\d{4} |.*resource_tracker")
"""Lines of torch's native parts, and of Python's resource tracker, a process that outlives the engine's server."""


def check_lines(containers: Containers) -> None:
    """Every line of the roles, except for FOREIGN ones, is a dated object with its role."""
    for name, role in {"init": "init", "trainer": "trainer", "rollout": "rollout", "report": "report"}.items():
        text = containers.log(name).read_text()
        lines = [line for line in text.splitlines() if not FOREIGN.match(line)]
        assert lines and not [line for line in lines if not line.startswith('{"time": ')], name
        assert {json.loads(line)["role"] for line in lines} >= {role}


def answer(port: int, host: str) -> int:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/api/runs", headers={"Host": host})
    try:
        with urllib.request.urlopen(request, timeout=20) as found:
            return int(found.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


EMPTY = {
    "async_grpo_trainer_kl": "there is no reference model",
    "60 * sum by (kind) (rate(async_grpo_reward_failures_total[5m]))": "every completion could be judged",
    '60 * sum by (outcome) (rate(async_grpo_groups_total{outcome!="inserted"}[5m]))': "every group was inserted",
    "ALERTS": "nothing was wrong",
}
"""Queries of the dashboard that may have no result in this run, and why."""


def queries() -> list[str]:
    panels = json.loads((DEPLOY / "grafana" / "dashboards" / "async-grpo.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def check_queries(prometheus: Prometheus, since_s: float) -> None:
    """Every query of the dashboard has had a result, and Prometheus evaluates every rule without an error."""
    asked = queries()
    assert len(asked) > 40
    without = {query for query in asked if not prometheus.ever(query, since_s)}
    assert without <= EMPTY.keys(), without - EMPTY.keys()
    (group,) = prometheus.ask("rules")["groups"]
    assert len(group["rules"]) == 14
    assert all(rule["health"] == "ok" and not rule.get("lastError") for rule in group["rules"])
    for rule in group["rules"]:  # what a rule compares, without the comparisons, has values
        for part in re.findall(r"async_grpo_\w+", rule["query"]):
            if "failures" not in part:
                assert prometheus.ever(part, since_s), part


def test_the_commands_of_the_containers_end_with_a_report_and_show_the_page(containers: Containers) -> None:
    began_s = time.time()
    containers.start("secrets")
    assert containers.wait("secrets") == 0
    containers.start("redis")
    containers.start("init")
    assert containers.wait("init") == 0, containers.log("init").read_text()
    for name in ("report", "trainer", "view", "rollout"):
        containers.start(name)
    if prometheus := shutil.which("prometheus") and Prometheus(containers.folder / "prometheus", containers.ports):
        containers.closing.append(prometheus)
    report = containers.log("report")
    containers.until(lambda: "following" in report.read_text(), "run that the report follows")
    assert containers.stop("report") == 75, report.read_text()
    containers.start("report")  # as the engine does after a restart of the machine
    folder = containers.folder / "runs" / "small"
    containers.until(lambda: (folder / "roles" / "rollout-container.jsonl").exists(), "rollout server")
    containers.kill("rollout")
    containers.start("rollout")
    containers.until(lambda: answer(containers.page, "localhost:8765") == 200, "page")
    assert answer(containers.page, "evil.example") == 403

    assert containers.wait("report") == 0, report.read_text()[-3000:]
    assert (containers.wait("trainer"), containers.wait("rollout")) == (0, 0)
    if prometheus:
        check_queries(prometheus, began_s)
    summary, state = (json.loads((folder / file).read_text()) for file in ("summary.json", "run.json"))
    check_books(summary, steps=STEPS)
    assert [row["version"] for row in summary["evaluations"]] == [0, STEPS]
    assert state["finished_steps"] == STEPS and 0 < summary["steps_s"] < state["wall_s"] == summary["wall_s"]
    assert "balanced: yes" in report.read_text()
    assert summary["restarts"] == state["restarts"] == {"trainer": 0, "rollout-container": 1} and not state["failure"]
    logs = (f"logs/{role}.log" for role in ("trainer-0", "rollout-container", "report"))  # for the page
    for file in ("report.md", "timeline.json", "plots/reward.png", *logs):
        assert (folder / file).stat().st_size > 0, file

    check_lines(containers)
    containers.start("report")
    assert containers.wait("report") == 0 and "is finished" in report.read_text()
    printed = "".join(log.read_text() for log in report.parent.iterdir())
    secrets = [(containers.folder / "secrets" / path / name).read_text() for name, path in SECRETS.items()]
    assert all(len(secret) == 64 and secret not in printed for secret in secrets)
