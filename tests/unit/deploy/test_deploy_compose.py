"""What deploy/compose.yaml promises, rendered: who may reach what, profiles, health, devices, variables."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from async_grpo.config import RunConfig
from tests.support.deploy_files import (
    COMPOSE_TEXT,
    DEPLOY,
    PROFILES,
    ROOT,
    SCRIPTS,
    SECRETS,
    SECRETS_SERVICE,
    SERVICES,
    STAYING,
    VARIABLE,
    config_of,
    each_profile,
    each_service,
    is_pinned,
    render,
    role,
    seconds,
    services_of,
    words_of,
)
from trainer.platform import select_platform


@each_service
def test_a_service_has_no_privileges_and_publishes_to_the_loopback_alone(name: str) -> None:
    service = SERVICES[name]
    assert (service["cap_drop"], service["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
    assert not service.keys() & {"privileged", "cap_add", "pid", "ipc", "userns_mode"}
    assert service.get("network_mode", "none") == "none"
    assert all(str(port).startswith("127.0.0.1:") for port in service.get("ports", []))
    assert "docker.sock" not in str(service["volumes"])
    if "build" in service:
        assert words_of(ROOT / service["build"]["dockerfile"], "USER")[-1] == "${APP_UID}"
        assert int(service["build"]["args"]["APP_UID"]) > 0
    else:
        assert int(service["user"].partition(":")[0]) > 0
        assert is_pinned(service["image"])


@each_service
def test_a_service_is_looked_after(name: str) -> None:
    service = SERVICES[name]
    assert service["init"] is True
    kind = name.partition("-")[0]
    if kind in (SECRETS_SERVICE, "init"):
        assert service["restart"] == "no"
        return
    # A role that has finished (exit code 0) must stay so, and one that fails again and again must end; the others must
    # be there as long as any role may be.
    assert service["restart"] == ("unless-stopped" if kind in STAYING else "on-failure:5")
    assert kind == "report" or service["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL")


@each_service
def test_only_the_service_that_stores_secrets_is_given_them(name: str) -> None:
    text = str(render(**{secret: f"value of {secret}" for secret in SECRETS})[name])
    assert text.count("value of ") == (len(SECRETS) if name == SECRETS_SERVICE else 0)
    assert tuple(SERVICES[SECRETS_SERVICE]["command"]) == SECRETS
    assert SERVICES[SECRETS_SERVICE]["environment"] == dict.fromkeys(SECRETS, "")


@each_profile
def test_a_profile_is_a_whole_run_that_starts_in_order(profile: str) -> None:
    names = services_of(profile)
    assert {"secrets", "redis", "prometheus"} <= names.keys()
    (init,), (trainer,) = role(profile, "init"), role(profile, "trainer")
    assert "secrets" in SERVICES["redis"]["depends_on"]
    assert SERVICES[trainer]["depends_on"] == {
        init: {"condition": "service_completed_successfully"},
        "redis": {"condition": "service_healthy"},
    }
    (report,) = role(profile, "report").values()
    assert report["depends_on"] == SERVICES[trainer]["depends_on"], "it keeps time from the trainer's start"
    servers = role(profile, "rollout").values()
    assert servers
    for service in servers:  # its weights are served
        assert service["depends_on"] == {trainer: {"condition": "service_healthy"}}
    assert all(service.get("depends_on", {}).keys() <= names.keys() for service in names.values())


@each_profile
def test_the_names_and_ports_that_are_looked_up_are_those_of_containers(profile: str) -> None:
    config = config_of(profile)
    http, shown, weights = config.rollout.http, config.telemetry.http, urlsplit(config.weights.bind)
    assert (http.host, shown.host, weights.hostname) == ("0.0.0.0", "0.0.0.0", "0.0.0.0")
    assert urlsplit(config.redis.url or "").hostname in services_of(profile)
    ports = {"rollout": (http.port, "/healthz"), "trainer": (shown.port, "/readyz")}
    for kind, (port, path) in ports.items():
        for name, service in role(profile, kind).items():
            networks = service.get("networks", {"default": {}})
            assert kind in {name, *networks["default"].get("aliases", [])}
            assert service.get("hostname") == ("trainer" if kind == "trainer" else None)
            assert service.get("ports", []) == ([f"127.0.0.1::{port}"] if kind == "rollout" else [])
            assert f"http://127.0.0.1:{port}{path}" in service["healthcheck"]["test"][-1]
    jobs = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    found = {job["job_name"]: job["dns_sd_configs"][0] for job in jobs if "dns_sd_configs" in job}
    assert {name: (job["names"], job["port"]) for name, job in found.items()} == {
        kind: ([kind], port) for kind, (port, _) in ports.items()
    }


@each_profile
def test_a_role_stops_by_itself_before_it_is_killed(profile: str) -> None:
    limit = config_of(profile).launch.stop_timeout_s
    for service in role(profile, "rollout").values():
        assert limit < seconds(service["stop_grace_period"])
    for service in role(profile, "trainer").values():
        *_, option, override = service["command"]
        key, _, patience = override.partition("=")
        assert (option, key) == ("-o", "launch.stop_timeout_s")
        assert limit < float(patience) < seconds(service["stop_grace_period"])


@each_profile
def test_all_roles_of_a_profile_run_the_same_configuration(profile: str, tmp_path: Path) -> None:
    for wanted, services in ((f"deploy/configs/{profile}.yaml", SERVICES), ("other.yaml", render(CONFIG="other.yaml"))):
        (trainer,) = (services[name] for name in role(profile, "trainer"))
        assert trainer["command"][:3] == ["async-grpo", "trainer", wanted]
        (tmp_path / "async-grpo").write_text('#!/bin/sh\necho "$@"\n')
        (tmp_path / "async-grpo").chmod(0o755)
        for server in (services[name] for name in role(profile, "rollout")):
            environment = {
                "PATH": f"{tmp_path}:/usr/bin:/bin",
                "CONFIG": server["environment"]["CONFIG"],
                "HOSTNAME": "b",
            }
            assert typed(server, environment) == f"rollout {wanted} --name rollout-b\n"
        for kind, words in (("init", f"fetch {wanted}"), ("report", f"runs report {wanted} --wait")):
            (service,) = (services[name] for name in role(profile, kind))
            environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "CONFIG": service["environment"]["CONFIG"]}
            assert typed(service, environment) == f"{words}\n"


def typed(service: dict[str, Any], environment: dict[str, str]) -> str:
    """What the service's command prints with that environment."""
    done = subprocess.run(service["command"], env=environment, capture_output=True, text=True, timeout=60)
    return done.stdout


@each_profile
def test_the_page_reads_the_runs_and_nothing_else(profile: str) -> None:
    (page,) = role(profile, "view").values()
    assert page["volumes"] == ["runs:/runs:ro"] and page["read_only"]
    assert "environment" not in page and "--localhost-only" in page["command"]
    port = page["command"][page["command"].index("--port") + 1]
    assert page["ports"] == [f"127.0.0.1:8765:{port}"]


@each_profile
def test_what_a_configuration_names_is_mounted_and_of_the_profile(profile: str) -> None:
    config, (trainer,) = config_of(profile), role(profile, "trainer").values()
    mounted = [volume.rpartition(":")[2] for volume in trainer["volumes"] if isinstance(volume, str)]
    assert str(config.runs_dir) in mounted
    assert config.model.path is None or str(config.model.path.parent) in mounted
    assert config.data.path is None or str(config.data.path.parent) in mounted
    assert config.trainer.platform == select_platform(profile).name
    assert config.rollout.vllm.platform == profile
    assert SERVICES["redis"]["environment"]["REDIS_FSYNC"] == RunConfig.model_fields["redis"].default.fsync


@pytest.mark.parametrize(("name", "path"), [("trainer", "/readyz"), ("rollout", "/healthz")])
@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_a_role_is_healthy_when_it_says_so(name: str, path: str, status: int, code: int) -> None:
    asked = []

    class Role(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Role) as role:
        answering = threading.Thread(target=role.handle_request)
        answering.start()
        assert health_of(name, role.server_port) == code
        answering.join()
    assert asked == [path]


def test_a_role_where_nobody_listens_is_not_healthy() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert health_of("trainer", bound.getsockname()[1]) == 1


def health_of(name: str, port: int) -> int:
    """The exit code of a service's health check, asked at this port."""
    program = SERVICES[name]["healthcheck"]["test"][-1].replace("timeout=10", "timeout=60")
    here = re.sub(r"(?<=127\.0\.0\.1:)\d+", str(port), program)
    return subprocess.run([sys.executable, "-c", here], capture_output=True, timeout=120).returncode


def test_no_npu_belongs_to_two_containers_and_every_rank_has_one() -> None:
    config = config_of("ascend")
    wanted = {"trainer": config.trainer.processes, "rollout": config.rollout.vllm.tensor_parallel}
    seen: list[str] = []
    for name, service in (role("ascend", "trainer") | role("ascend", "rollout")).items():
        assert {"/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"} <= set(service["devices"])
        own = [device for device in service["devices"] if re.fullmatch(r"/dev/davinci\d+", device)]
        assert len(own) == wanted[name.partition("-")[0]]
        assert service["environment"]["ASCEND_RT_VISIBLE_DEVICES"] == ",".join(map(str, range(len(own))))
        mounts = [each for each in service["volumes"] if isinstance(each, str) and each.startswith(("/usr", "/etc"))]
        assert mounts and all(mount.endswith(":ro") for mount in mounts), "the driver cannot be changed from within"
        seen += own
    assert len(seen) == len(set(seen)) == wanted["trainer"] + config.rollout.servers * wanted["rollout"]


def test_a_gpu_of_the_trainer_is_in_no_set_of_a_rollout_server() -> None:
    config = config_of("cuda")
    own = SERVICES["trainer-cuda"]["environment"]["CUDA_VISIBLE_DEVICES"].split(",")
    sets = [each.split(",") for each in SERVICES["rollout-cuda"]["environment"]["DEVICE_SETS"].split()]
    assert len(own) == config.trainer.processes
    assert [len(each) for each in sets] == [config.rollout.vllm.tensor_parallel] * config.rollout.servers
    dealt = own + [device for each in sets for device in each]
    assert len(set(dealt)) == len(dealt)


def test_every_variable_that_a_container_is_given_is_read_by_somebody() -> None:
    parts = ("async_grpo", "buffer", "rollout_server", "trainer")
    files = [*SCRIPTS.iterdir(), *(file for part in parts for file in (ROOT / part).rglob("*.py"))]
    known = "\n".join(file.read_text() for file in files)
    documented = (ROOT / "docs" / "platforms.md").read_text()
    for name, service in SERVICES.items():
        for variable in service.get("environment", {}):
            if name == "grafana" and variable.startswith("GF_"):
                continue
            ours = variable.startswith("ASYNC_GRPO_")
            where = known if ours else known + documented + str(service.get("command"))
            assert re.search(rf"\b{variable}\b", where), f"{name}: nobody reads {variable}"


def test_the_example_names_every_setting_with_its_default_and_no_other() -> None:
    example = (DEPLOY / ".env.example").read_text()
    listed = dict(re.findall(r"^#?([A-Z][A-Z0-9_]*)=(.*)$", example, flags=re.MULTILINE))
    used = VARIABLE.findall(COMPOSE_TEXT)
    assert listed.keys() == {name for name, _ in used}
    assert listed.items() <= set(used)
    assert all(listed[name] == "" for name in SECRETS)
    assert "$" not in VARIABLE.sub("", COMPOSE_TEXT).replace("$$", ""), "a variable without a default"


def test_compose_accepts_the_file() -> None:
    compose = shutil.which("docker-compose")
    command = [compose] if compose else ["docker", "compose"]
    if not compose and (not shutil.which("docker") or subprocess.run(["docker", "compose", "version"]).returncode):
        pytest.skip("there is no docker compose to ask")
    for profile in PROFILES:
        profiles = ["--profile", profile, "--profile", "monitoring"]
        arguments = ["-f", str(DEPLOY / "compose.yaml"), *profiles, "config", "-q"]
        assert subprocess.run([*command, *arguments], timeout=120).returncode == 0
