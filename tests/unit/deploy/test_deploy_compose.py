"""Contents of deploy/compose*.yaml, merged and filled: rights, secrets, order, restarts, health, devices, variables."""

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
    ROOT,
    SCRIPTS,
    SECRETS,
    SECRETS_SERVICE,
    SERVICES,
    STACKS,
    STAYING,
    VARIABLE,
    config_of,
    each_platform,
    each_service,
    is_pinned,
    seconds,
    services_of,
    words_of,
)
from trainer.platform import select_platform

ONCE = (SECRETS_SERVICE, "init")
ROLES = ("report", "trainer", "rollout")


@each_service
def test_a_service_has_no_privileges_and_publishes_only_to_the_loopback(stack: str, name: str) -> None:
    services = services_of(stack)
    service = services[name]
    assert (service["cap_drop"], service["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
    assert not service.keys() & {"privileged", "cap_add", "pid", "ipc", "userns_mode"}
    assert service.get("network_mode", "none") == "none"
    assert all(str(port).startswith("127.0.0.1:") for port in service.get("ports", []))
    assert "docker.sock" not in str(service["volumes"])
    if service["image"] == services["init"]["image"]:
        build = services[SECRETS_SERVICE]["build"]
        assert words_of(ROOT / build["dockerfile"], "USER")[-1] == "${APP_UID}"
        assert int(build["args"]["APP_UID"]) > 0
    else:
        assert int(service["user"].partition(":")[0]) > 0
        assert is_pinned(service["image"])


@each_service
def test_a_service_is_restarted_as_long_as_it_is_needed(stack: str, name: str) -> None:
    service = services_of(stack)[name]
    assert service["init"] is True
    if name in ONCE:
        assert service["restart"] == "no"
        return
    # A role that has finished (exit code 0) must stay ended, and one that fails again and again must end, too.
    assert service["restart"] == ("unless-stopped" if name in STAYING else "on-failure:5")
    assert name == "report" or service["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL")


@each_platform
def test_a_restart_of_the_machine_restarts_roles_that_it_has_stopped(platform: str) -> None:
    """Docker restarts a container with `on-failure` only if its exit code was not 0."""
    for name in ROLES:
        service = services_of(platform)[name]
        command = ["sh", str(SCRIPTS / "entrypoint.sh"), "sh", "-c", "trap 'exit 0' TERM; echo up; sleep 100 & wait"]
        environment = {
            "PATH": "/usr/bin:/bin",
            "SECRETS_DIR": "/none",
            "EXIT_CODE_WHEN_STOPPED": service["environment"]["EXIT_CODE_WHEN_STOPPED"],
        }
        role = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
        assert role.stdout is not None
        role.stdout.readline()
        role.terminate()
        role.stdout.close()
        assert role.wait(60) not in (0, 78)


@each_platform
def test_one_service_builds_the_image_of_all(platform: str) -> None:
    """Five builds of one tag leave images without a name."""
    services = services_of(platform)
    assert [name for name, service in services.items() if "build" in service] == [SECRETS_SERVICE]
    images = {service["image"] for name, service in services.items() if name != "redis"}
    assert images == {f"async-grpo:{platform}"}
    assert all(service["pull_policy"] == "never" for name, service in services.items() if name != "redis")


@each_platform
def test_the_image_does_not_contain_the_configurations_of_runs(platform: str) -> None:
    """They are mounted. In the image, a new configuration would make a new image, and `up --build` new roles."""
    copied = " ".join(words_of(DEPLOY / f"{platform}.Dockerfile", "COPY"))
    assert "deploy/configs" not in copied
    for name in ("init", *ROLES):
        assert "./configs:/app/deploy/configs:ro" in services_of(platform)[name]["volumes"]


@each_platform
def test_containers_of_other_users_read_no_file_of_the_clone(platform: str) -> None:
    """A clone made under umask 077 is readable only for its owner, which is the user of the image (APP_UID)."""
    for name, service in services_of(platform).items():
        if service["image"] != f"async-grpo:{platform}" or name == SECRETS_SERVICE:
            assert not [volume for volume in service["volumes"] if volume.startswith(".")], name
    copied = words_of(DEPLOY / f"{platform}.Dockerfile", "COPY")
    assert any("deploy/scripts/make-secrets.sh" in words for words in copied)
    assert any(
        "chmod -R a+rX /app /usr/local/bin" in words for words in words_of(DEPLOY / f"{platform}.Dockerfile", "RUN")
    )


@each_platform
def test_only_the_service_that_stores_secrets_is_given_them(platform: str) -> None:
    services = services_of(platform, **{secret: f"value of {secret}" for secret in SECRETS})
    for name, service in services.items():
        assert str(service).count("value of ") == (len(SECRETS) if name == SECRETS_SERVICE else 0)
    service = services_of(platform)[SECRETS_SERVICE]
    assert service["command"] == [f"{folder}/{secret}" for secret, folder in SECRETS.items()]
    assert {name: service["environment"][name] for name in SECRETS} == dict.fromkeys(SECRETS, "")


@each_platform
def test_a_service_mounts_only_the_secrets_that_it_needs(platform: str) -> None:
    needed = {
        SECRETS_SERVICE: {"redis", "weights", "http"},
        "redis": {"redis"},
        "report": {"redis"},
        "trainer": {"redis", "weights"},
        "rollout": {"redis", "weights", "http"},
    }
    for name, service in services_of(platform).items():
        volumes = [volume for volume in service["volumes"] if volume.startswith("secrets-")]
        assert {volume.partition(":")[0].removeprefix("secrets-") for volume in volumes} == needed.get(name, set())
        assert name == SECRETS_SERVICE or all(volume.endswith(":ro") for volume in volumes)


def test_one_variable_sets_the_memory_of_redis() -> None:
    services = services_of("cpu", REDIS_MEMORY="3gb")
    assert services["redis"]["mem_limit"] == services[SECRETS_SERVICE]["environment"]["REDIS_MEMORY"] == "3gb"
    assert "--maxmemory" not in services["redis"]["command"]


@each_platform
def test_a_stack_starts_in_order(platform: str) -> None:
    services = services_of(platform)
    completed, healthy, started = (
        {"condition": f"service_{state}"} for state in ("completed_successfully", "healthy", "started")
    )
    ready = {"init": completed, "redis": healthy}
    assert services["redis"]["depends_on"] == services["init"]["depends_on"] == {SECRETS_SERVICE: completed}
    assert services["report"]["depends_on"] == ready
    # `down` stops a service before its dependencies: the report must be written after the trainer's last step.
    assert services["trainer"]["depends_on"] == {**ready, "report": started}
    # Not healthy: on a finished run the trainer ends before it is healthy, and `up` would report a failure.
    assert services["rollout"]["depends_on"] == {**ready, "trainer": started}


@each_platform
def test_the_names_and_ports_that_are_looked_up_are_those_of_containers(platform: str) -> None:
    services, config = services_of(platform), config_of(platform)
    http, shown, weights = config.rollout.http, config.telemetry.http, urlsplit(config.weights.bind)
    assert (http.host, shown.host, weights.hostname) == ("0.0.0.0", "0.0.0.0", "0.0.0.0")
    assert urlsplit(config.redis.url or "").hostname in services
    assert services["trainer"]["hostname"] == "trainer"
    assert "hostname" not in services["rollout"]
    assert services["rollout"]["ports"] == [f"127.0.0.1::{http.port}"]
    ports = {"rollout": (http.port, "/healthz"), "trainer": (shown.port, "/readyz")}
    for name, (port, path) in ports.items():
        assert f"http://127.0.0.1:{port}{path}" in services[name]["healthcheck"]["test"][-1]
    jobs = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    found = {job["job_name"]: job["dns_sd_configs"][0] for job in jobs if "dns_sd_configs" in job}
    assert {name: (job["names"], job["port"]) for name, job in found.items()} == {
        name: ([name], port) for name, (port, _) in ports.items()
    }


@each_platform
def test_a_role_stops_by_itself_before_it_is_killed(platform: str) -> None:
    services = services_of(platform)
    limit = config_of(platform).launch.stop_timeout_s
    assert limit < seconds(services["rollout"]["stop_grace_period"])
    patience = re.search(r"-o launch.stop_timeout_s=(\d+)$", services["trainer"]["command"][-1])
    assert patience
    assert limit < float(patience[1]) < seconds(services["trainer"]["stop_grace_period"])


@each_platform
def test_all_roles_run_the_same_configuration(platform: str, tmp_path: Path) -> None:
    (tmp_path / "async-grpo").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "async-grpo").chmod(0o755)
    stacks = {
        f"deploy/configs/{platform}.yaml": services_of(platform),
        "other.yaml": services_of(platform, CONFIG="other.yaml"),
    }
    for config, services in stacks.items():
        commands = {
            "init": f"fetch {config}",
            "report": f"runs report {config} --wait",
            "trainer": f"trainer {config} -o launch.stop_timeout_s=270",
            "rollout": f"rollout {config} --name rollout-b",
        }
        for name, words in commands.items():
            environment = {
                "PATH": f"{tmp_path}:/usr/bin:/bin",
                "CONFIG": services[name]["environment"]["CONFIG"],
                "HOSTNAME": "b",
            }
            assert output_of(services[name], environment) == f"{words}\n"


def output_of(service: dict[str, Any], environment: dict[str, str]) -> str:
    """Return what the service's command prints with that environment."""
    done = subprocess.run(service["command"], env=environment, capture_output=True, text=True, timeout=60)
    return done.stdout


@each_platform
def test_the_page_reads_the_runs_and_nothing_else(platform: str) -> None:
    page = services_of(platform)["view"]
    driver = [volume for volume in page["volumes"] if volume.startswith(("/usr/local", "/etc/ascend"))]
    assert [volume for volume in page["volumes"] if volume not in driver] == ["runs:/runs:ro"]
    assert page["read_only"]
    assert "environment" not in page and "--localhost-only" in page["command"]
    port = page["command"][page["command"].index("--port") + 1]
    assert page["ports"] == [f"127.0.0.1:8765:{port}"]


@each_platform
def test_what_a_configuration_names_is_mounted_and_of_the_platform(platform: str) -> None:
    config, trainer = config_of(platform), services_of(platform)["trainer"]
    mounted = [volume.rpartition(":")[2] for volume in trainer["volumes"]]
    assert str(config.runs_dir) in mounted
    assert config.model.path is None or str(config.model.path.parent) in mounted
    assert config.data.path is None or str(config.data.path.parent) in mounted
    assert config.trainer.platform == select_platform(platform).name
    assert config.rollout.vllm.platform == platform
    command = SERVICES["redis"]["command"]
    assert command[command.index("--appendfsync") + 1] == RunConfig.model_fields["redis"].default.fsync


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
    for name, count in wanted.items():
        service = services_of("ascend")[name]
        assert {"/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"} <= set(service["devices"])
        own = [device for device in service["devices"] if re.fullmatch(r"/dev/davinci\d+", device)]
        assert len(own) == count
        assert service["environment"]["ASCEND_RT_VISIBLE_DEVICES"] == ",".join(map(str, range(len(own))))
        mounts = [volume for volume in service["volumes"] if volume.startswith(("/usr", "/etc"))]
        assert mounts and all(mount.endswith(":ro") for mount in mounts), "the driver cannot be changed from within"
        seen += own
    assert len(seen) == len(set(seen)) == wanted["trainer"] + config.rollout.servers * wanted["rollout"]


def test_a_gpu_of_the_trainer_is_in_no_set_of_a_rollout_server() -> None:
    config, services = config_of("cuda"), services_of("cuda")
    own = services["trainer"]["environment"]["CUDA_VISIBLE_DEVICES"].split(",")
    sets = [devices.split(",") for devices in services["rollout"]["environment"]["DEVICE_SETS"].split()]
    assert len(own) == config.trainer.processes
    assert [len(devices) for devices in sets] == [config.rollout.vllm.tensor_parallel] * config.rollout.servers
    dealt = own + [device for devices in sets for device in devices]
    assert len(set(dealt)) == len(dealt)


@each_service
def test_every_variable_that_a_container_is_given_is_read(stack: str, name: str) -> None:
    parts = ("async_grpo", "buffer", "rollout_server", "trainer")
    files = [*SCRIPTS.iterdir(), *(file for part in parts for file in (ROOT / part).rglob("*.py"))]
    known = "\n".join(file.read_text() for file in files)
    documented = (ROOT / "docs" / "platforms.md").read_text()
    service = services_of(stack)[name]
    for variable in service.get("environment", {}):
        if name == "grafana" and variable.startswith("GF_"):
            continue
        is_ours = variable.startswith("ASYNC_GRPO_")
        where = known if is_ours else known + documented + str(service.get("command"))
        assert re.search(rf"\b{variable}\b", where), f"{name}: nobody reads {variable}"


def test_the_example_names_every_setting_with_its_default_and_no_other() -> None:
    example = (DEPLOY / ".env.example").read_text()
    listed = dict(re.findall(r"^#?([A-Z][A-Z0-9_]*)=(.*)$", example, flags=re.MULTILINE))
    used = VARIABLE.findall(COMPOSE_TEXT)
    assert listed.keys() == {name for name, _ in used} - {"REDIS_MAXMEMORY"}
    assert listed.items() <= set(used)
    assert all(listed[name] == "" for name in SECRETS)
    assert "$" not in VARIABLE.sub("", COMPOSE_TEXT).replace("$$", ""), "a variable without a default"


@pytest.mark.parametrize("stack", STACKS)
def test_compose_accepts_the_files(stack: str) -> None:
    compose = shutil.which("docker-compose")
    command = [compose] if compose else ["docker", "compose"]
    if not compose and (not shutil.which("docker") or subprocess.run(["docker", "compose", "version"]).returncode):
        pytest.skip("there is no docker compose to ask")
    files = [word for file in STACKS[stack] for word in ("-f", str(DEPLOY / file))]
    shown = subprocess.run([*command, *files, "config"], timeout=120, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    for name, service in yaml.safe_load(shown.stdout.replace("$$", "$"))["services"].items():
        ours = services_of(stack)[name]
        assert (service["image"], service.get("command")) == (ours["image"], ours.get("command"))
        assert len(service["volumes"]) == len(ours["volumes"])
