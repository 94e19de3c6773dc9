"""What deploy/compose.yaml promises, read from it: who may reach what, profiles, health, devices, variables."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from async_grpo.config import RunConfig
from tests.support.deploy_files import (
    COMPOSE_TEXT,
    DEPLOY,
    ONE_SHOT,
    PROFILES,
    ROOT,
    SCRIPTS,
    SECRETS,
    SERVICES,
    VARIABLE,
    config_of,
    default,
    each_profile,
    each_service,
    is_pinned,
    role,
    seconds,
    services_of,
    words_of,
)

# -- compose: who may reach what ---------------------------------------------------------------------------------------


@each_service
def test_a_service_publishes_to_the_loopback_alone(name: str) -> None:
    for port in SERVICES[name].get("ports", []):
        assert isinstance(port, str) and port.startswith("127.0.0.1:"), port
    assert SERVICES[name].get("network_mode", "none") == "none"


@each_service
def test_a_service_runs_without_privileges(name: str) -> None:
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not service.keys() & {"privileged", "cap_add", "pid", "ipc", "userns_mode"}
    assert "docker.sock" not in str(service["volumes"])


@each_service
def test_a_service_is_not_run_by_root(name: str) -> None:
    service = SERVICES[name]
    if "build" in service:
        assert words_of(ROOT / service["build"]["dockerfile"], "USER")[-1] == "${APP_UID}"
        assert int(default(service["build"]["args"]["APP_UID"])) > 0
    else:
        assert int(service["user"].partition(":")[0]) > 0


@each_service
def test_a_service_is_looked_after(name: str) -> None:
    service = SERVICES[name]
    assert service["init"] is True
    if name == ONE_SHOT:
        assert service["restart"] == "no"
        return
    # A role that has finished (exit code 0) must stay so; the others must be there as long as any role may be.
    assert service["restart"] == ("on-failure" if "build" in service else "unless-stopped")
    assert service["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL")


@each_service
def test_secrets_come_from_a_file_and_stand_nowhere(name: str) -> None:
    service = SERVICES[name]
    given = service.get("environment", {})
    assert not [key for key in given if key in SECRETS] or name == ONE_SHOT
    assert not re.search(r"(?i)(password|secret|token|key)=\w", str(service.get("command", "")))
    assert not [key for key in service.get("build", {}).get("args", {}) if re.search(r"PASSWORD|SECRET|TOKEN", key)]


def test_the_one_shot_makes_every_secret_that_the_code_reads_from_the_environment() -> None:
    assert tuple(SERVICES[ONE_SHOT]["command"]) == SECRETS
    assert {name: default(value) for name, value in SERVICES[ONE_SHOT]["environment"].items()} == dict.fromkeys(
        SECRETS, ""
    )


@each_service
def test_an_image_is_pinned_or_built_here(name: str) -> None:
    service = SERVICES[name]
    assert "build" in service or is_pinned(default(service["image"])), service["image"]


# -- compose: the profiles ---------------------------------------------------------------------------------------------


@each_profile
def test_a_profile_is_a_whole_run(profile: str) -> None:
    names = services_of(profile)
    assert {"secrets", "redis", "prometheus"} <= names.keys()
    assert len(role(profile, "trainer")) == 1
    assert role(profile, "rollout")
    for service in names.values():
        assert service.get("depends_on", {}).keys() <= names.keys()


@each_profile
def test_rollout_servers_wait_for_the_trainer_that_makes_the_policy(profile: str) -> None:
    (trainer,) = role(profile, "trainer")
    for service in role(profile, "rollout").values():
        assert service["depends_on"] == {trainer: {"condition": "service_healthy"}}
    assert SERVICES[trainer]["depends_on"] == {
        "secrets": {"condition": "service_completed_successfully"},
        "redis": {"condition": "service_healthy"},
    }


@each_profile
def test_the_names_that_are_looked_up_are_those_of_containers(profile: str) -> None:
    def names(kind: str) -> list[set[str]]:
        """Of each container of that kind."""
        found = []
        for name, service in role(profile, kind).items():
            networks = service.get("networks", {"default": {}})
            found.append({name, *networks["default"].get("aliases", [])})
        return found

    assert all("trainer" in found for found in names("trainer"))
    assert all("rollout" in found for found in names("rollout"))
    assert all(service["hostname"] == "trainer" for service in role(profile, "trainer").values())
    assert urlsplit(config_of(profile).redis.url or "").hostname in services_of(profile)


@each_profile
def test_ports_are_the_same_in_configuration_compose_and_prometheus(profile: str) -> None:
    config = config_of(profile)
    http, shown, weights = config.rollout.http, config.telemetry.http, urlsplit(config.weights.bind)
    assert (http.host, shown.host, weights.hostname) == ("0.0.0.0", "0.0.0.0", "0.0.0.0")
    for service in role(profile, "rollout").values():
        assert service["ports"] == [f"127.0.0.1::{http.port}"]
        assert f"http://127.0.0.1:{http.port}/healthz" in service["healthcheck"]["test"][-1]
    for service in role(profile, "trainer").values():
        assert f"http://127.0.0.1:{shown.port}/readyz" in service["healthcheck"]["test"][-1]
    jobs = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    found = {job["job_name"]: job["dns_sd_configs"] for job in jobs if "dns_sd_configs" in job}
    assert found == {
        name: [{"names": [name], "type": "A", "port": port, "refresh_interval": "5s"}]
        for name, port in (("rollout", http.port), ("trainer", shown.port))
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
def test_all_roles_of_a_profile_run_the_same_configuration(profile: str) -> None:
    (trainer,) = role(profile, "trainer").values()
    _, _, wanted, *_ = trainer["command"]
    assert default(wanted) == f"deploy/configs/{profile}.yaml"
    assert all(service["environment"]["CONFIG"] == wanted for service in role(profile, "rollout").values())
    config = config_of(profile)
    mounted = [volume.rpartition(":")[2] for volume in map(default, filter(is_text, trainer["volumes"]))]
    assert str(config.runs_dir) in mounted
    assert config.model.path is None or str(config.model.path.parent) in mounted
    assert config.data.path is None or str(config.data.path.parent) in mounted
    assert config.trainer.platform == {"ascend": "npu"}.get(profile, profile)
    assert config.rollout.vllm.platform == profile


def is_text(value: object) -> bool:
    return isinstance(value, str)


def test_the_server_of_compose_is_never_behind_the_settings_that_a_run_demands() -> None:
    environment = SERVICES["redis"]["environment"]
    assert default(environment["REDIS_FSYNC"]) == RunConfig.model_fields["redis"].default.fsync == "always"


# -- health ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "path"), [("trainer", "/readyz"), ("rollout", "/healthz")])
@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_a_role_is_healthy_when_it_says_so(name: str, path: str, status: int, code: int) -> None:
    program, asked = SERVICES[name]["healthcheck"]["test"][-1], []

    class Role(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Role) as role:
        answering = threading.Thread(target=role.handle_request)
        answering.start()
        here = re.sub(r"(?<=127\.0\.0\.1:)\d+", str(role.server_port), program).replace("timeout=10", "timeout=60")
        ended = subprocess.run([sys.executable, "-c", here], capture_output=True, timeout=120)
        answering.join()
    assert (ended.returncode, asked) == (code, [path])


def test_a_role_where_nobody_listens_is_not_healthy() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        program = SERVICES["trainer"]["healthcheck"]["test"][-1].replace("8090", str(bound.getsockname()[1]))
        assert subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120).returncode == 1


# -- devices -----------------------------------------------------------------------------------------------------------


def test_no_npu_belongs_to_two_containers_and_every_rank_has_one() -> None:
    config = config_of("ascend")
    wanted = {"trainer": config.trainer.processes, "rollout": config.rollout.vllm.tensor_parallel}
    seen: list[str] = []
    for name, service in services_of("ascend").items():
        devices = set(service.get("devices", []))
        if not devices:
            continue
        assert devices >= {"/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"}
        own = [device for device in devices if re.fullmatch(r"/dev/davinci\d+", device)]
        assert len(own) == wanted[name.partition("-")[0]]
        assert service["environment"]["ASCEND_RT_VISIBLE_DEVICES"] == ",".join(map(str, range(len(own))))
        seen += own
    assert len(seen) == len(set(seen)) == wanted["trainer"] + config.rollout.servers * wanted["rollout"]


def test_npu_containers_have_the_driver_and_its_tool_but_cannot_change_them() -> None:
    for service in [*role("ascend", "trainer").values(), *role("ascend", "rollout").values()]:
        mounts = [volume for volume in service["volumes"] if is_text(volume) and volume.startswith(("/usr", "/etc"))]
        assert all(mount.endswith(":ro") for mount in mounts)
        sources = {mount.partition(":")[0] for mount in mounts}
        assert {"/usr/local/dcmi", "/usr/local/bin/npu-smi", "/usr/local/Ascend/driver/lib64"} <= sources
        shared = [volume for volume in service["volumes"] if volume not in mounts]
        assert shared == [each for each in SERVICES["trainer"]["volumes"] if not str(each).startswith("devices:")]


def test_a_gpu_of_the_trainer_is_in_no_set_of_a_rollout_server() -> None:
    config = config_of("cuda")
    own = default(SERVICES["trainer-cuda"]["environment"]["CUDA_VISIBLE_DEVICES"]).split(",")
    sets = default(SERVICES["rollout-cuda"]["environment"]["DEVICE_SETS"]).split()
    dealt = [device for each in sets for device in each.split(",")]
    assert len(own) == config.trainer.processes
    assert len(sets) == config.rollout.servers
    assert {len(each.split(",")) for each in sets} == {config.rollout.vllm.tensor_parallel}
    assert len(set(own + dealt)) == len(own + dealt)


# -- variables ---------------------------------------------------------------------------------------------------------


def test_every_variable_that_a_container_is_given_is_read_by_somebody() -> None:
    code = [path.read_text() for part in ("async_grpo", "buffer", "rollout_server", "trainer") for path in python(part)]
    known = "\n".join([*code, *(path.read_text() for path in SCRIPTS.iterdir())])
    documented = (ROOT / "docs" / "platforms.md").read_text()
    for name, service in SERVICES.items():
        for variable in service.get("environment", {}):
            ours = variable.startswith("ASYNC_GRPO_")
            where = known if ours else known + documented + str(service.get("command"))
            assert re.search(rf"\b{variable}\b", where), f"{name}: nobody reads {variable}"


def python(part: str) -> Iterator[Path]:
    return (ROOT / part).rglob("*.py")


def test_the_example_names_every_setting_with_its_default_and_no_other() -> None:
    example = (DEPLOY / ".env.example").read_text()
    listed = dict(re.findall(r"^#?([A-Z][A-Z0-9_]*)=(.*)$", example, flags=re.MULTILINE))
    used: dict[str, set[str]] = {}
    for name, value in VARIABLE.findall(COMPOSE_TEXT):
        used.setdefault(name, set()).add(value)
    assert listed.keys() == used.keys()
    for name, value in listed.items():
        assert value in used[name], name
    assert all(listed[name] == "" for name in SECRETS)


def test_every_variable_of_compose_has_a_default() -> None:
    assert not re.search(r"(?<!\$)\$(?!\$|\{\w+:-)\w*", COMPOSE_TEXT.replace("$$", ""))


def test_compose_accepts_the_file() -> None:
    compose = shutil.which("docker-compose")
    command = [compose] if compose else ["docker", "compose"]
    if not compose and (not shutil.which("docker") or subprocess.run(["docker", "compose", "version"]).returncode):
        pytest.skip("there is no docker compose to ask")
    for profile in PROFILES:
        arguments = ["-f", str(DEPLOY / "compose.yaml"), "--profile", profile, "config", "-q"]
        assert subprocess.run([*command, *arguments], timeout=120).returncode == 0
