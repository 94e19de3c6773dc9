"""What deploy/ promises, read from its files: nothing is built or started but the scripts of the containers."""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from async_grpo.config import RunConfig, load
from async_grpo.versions import MINDSPEED_BRANCH, VLLM_ASCEND
from buffer.server import find_server

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SCRIPTS = DEPLOY / "scripts"
PROFILES = ("cpu", "cuda", "ascend")
DOCKERFILES = [DEPLOY / f"{profile}.Dockerfile" for profile in PROFILES]
SECRETS = ("ASYNC_GRPO_REDIS_PASSWORD", "ASYNC_GRPO_HTTP_KEY", "ASYNC_GRPO_ADMIN_TOKEN", "ASYNC_GRPO_WEIGHTS_SECRET")
ONE_SHOT = "secrets"

COMPOSE_TEXT = (DEPLOY / "compose.yaml").read_text()
COMPOSE = yaml.safe_load(COMPOSE_TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
VARIABLE = re.compile(r"(?<!\$)\$\{(\w+):-([^}]*)\}")

each_service = pytest.mark.parametrize("name", SERVICES)
each_dockerfile = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
each_profile = pytest.mark.parametrize("profile", PROFILES)


def default(text: str) -> str:
    """As compose reads it where no variable is set."""
    return VARIABLE.sub(lambda found: found.group(2), text)


def services_of(profile: str) -> dict[str, dict[str, Any]]:
    return {name: service for name, service in SERVICES.items() if profile in service["profiles"]}


def role(profile: str, kind: str) -> dict[str, dict[str, Any]]:
    return {name: service for name, service in services_of(profile).items() if name.startswith(kind)}


def config_of(profile: str) -> RunConfig:
    return load(DEPLOY / "configs" / f"{profile}.yaml")


def seconds(text: str) -> float:
    return float(text[:-1]) * {"s": 1, "m": 60}[text[-1]]


def instructions(path: Path) -> list[tuple[str, str]]:
    """(word, rest) of a Dockerfile, continued lines joined."""
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    split = [line.strip().partition(" ") for line in text.splitlines() if line.strip()]
    return [(word.upper(), rest.strip()) for word, _, rest in split]


def words_of(path: Path, word: str) -> list[str]:
    return [rest for found, rest in instructions(path) if found == word]


def stages(path: Path) -> list[list[tuple[str, str]]]:
    found: list[list[tuple[str, str]]] = []
    for instruction in instructions(path):
        if instruction[0] == "FROM":
            found.append([])
        if found:
            found[-1].append(instruction)
    return found


def arguments_of(path: Path) -> dict[str, str]:
    return {name: value.strip('"') for name, _, value in (rest.partition("=") for rest in words_of(path, "ARG"))}


def is_pinned(image: str) -> bool:
    """By digest, or by a tag that names a version."""
    tag = image.rpartition("/")[2].partition(":")[2]
    return "@sha256:" in image or bool(re.search(r"\d+\.\d+\.\d+", tag))


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
    http, weights = config.rollout.http, urlsplit(config.weights.bind)
    assert (http.host, weights.hostname) == ("0.0.0.0", "0.0.0.0")
    for service in role(profile, "rollout").values():
        assert service["ports"] == [f"127.0.0.1::{http.port}"]
        assert f"http://127.0.0.1:{http.port}/healthz" in service["healthcheck"]["test"][-1]
    for service in role(profile, "trainer").values():
        assert f":{weights.port:04X} " in service["healthcheck"]["test"][-2]
    jobs = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    (servers,) = [job["dns_sd_configs"] for job in jobs if "dns_sd_configs" in job]
    assert servers == [{"names": ["rollout"], "type": "A", "port": http.port, "refresh_interval": "5s"}]


def test_the_trainers_health_check_finds_a_socket_that_listens_and_no_other() -> None:
    pattern = SERVICES["trainer"]["healthcheck"]["test"][-2]
    port = 0
    while not port:
        with socket.socket() as listener:
            listener.bind(("0.0.0.0", 0))
            port = listener.getsockname()[1]
            wanted = pattern.replace("15E0", f"{port:04X}")
            assert not re.search(wanted, Path("/proc/net/tcp").read_text())
            listener.listen()
            assert re.search(wanted, Path("/proc/net/tcp").read_text())


@each_profile
def test_a_role_stops_by_itself_before_it_is_killed(profile: str) -> None:
    limit = config_of(profile).launch.stop_timeout_s
    for service in role(profile, "rollout").values():
        assert limit < seconds(service["stop_grace_period"])
    for service in role(profile, "trainer").values():
        assert limit < float(service["environment"]["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
        assert float(service["environment"]["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < seconds(service["stop_grace_period"])


@each_profile
def test_all_roles_of_a_profile_run_the_same_configuration(profile: str) -> None:
    (trainer,) = role(profile, "trainer").values()
    *_, wanted = trainer["command"]
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


# -- Dockerfiles -------------------------------------------------------------------------------------------------------


@each_dockerfile
def test_a_dockerfile_has_stages_and_its_bases_are_pinned(path: Path) -> None:
    bases = words_of(path, "FROM")
    own = {base.partition(" AS ")[2] for base in bases} - {""}
    assert len(bases) >= 2
    values = arguments_of(path)
    for base in (base.partition(" AS ")[0] for base in bases):
        variable = re.fullmatch(r"\$\{(\w+)\}", base)
        assert base in own or (variable and is_pinned(values[variable.group(1)])), base


@each_dockerfile
def test_a_dockerfile_ends_as_a_user_without_rights(path: Path) -> None:
    users = [rest for word, rest in stages(path)[-1] if word == "USER"]
    assert users[-1] == "${APP_UID}"
    assert int(arguments_of(path)["APP_UID"]) > 0


@each_dockerfile
def test_whatever_is_installed_comes_from_the_index_and_the_certificates_that_were_given(path: Path) -> None:
    """A build argument counts only in the stage that names it; a stage inherits what the one that it is from has."""
    named: dict[str, set[str]] = {}
    for stage in stages(path):
        base, _, name = stage[0][1].partition(" AS ")
        given = {rest.partition("=")[0] for word, rest in stage if word == "ARG"}
        certificates = {"EXTRA_CA_CERT"} & (given | named.get(base, set()))
        named[name] = certificates
        if any("pip install" in rest or "pip wheel" in rest for word, rest in stage if word == "RUN"):
            assert "PIP_INDEX_URL" in given
            assert certificates


@each_dockerfile
def test_a_dockerfile_holds_no_secret(path: Path) -> None:
    given = [rest for word, rest in instructions(path) if word in ("ARG", "ENV", "LABEL")]
    assert not [rest for rest in given if re.search(r"(?i)password|secret|token|api_?key", rest)]


@each_dockerfile
def test_what_a_dockerfile_copies_is_there_and_in_the_context(path: Path) -> None:
    allowed = [
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")
    ]  # the file begins by leaving everything out
    for rest in words_of(path, "COPY"):
        if rest.startswith("--from"):
            continue
        for source in rest.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert any(fnmatch(source, f"{entry}*") for entry in allowed), source


@each_dockerfile
def test_the_context_of_a_build_has_no_environment_runs_or_settings(path: Path) -> None:
    assert (ROOT / ".dockerignore").read_text().splitlines()[1] == "*"
    copied = {source for rest in words_of(path, "COPY") for source in rest.split()[:-1]}
    assert not copied & {".", "./", "deploy", "runs", ".venv"}


def test_images_are_of_the_versions_that_the_code_is_written_for() -> None:
    ascend, cuda = arguments_of(DOCKERFILES[2]), arguments_of(DOCKERFILES[1])
    assert ascend["ASCEND_IMAGE"] == f"quay.io/ascend/vllm-ascend:v{VLLM_ASCEND}"
    assert ascend["MINDSPEED_REF"] == MINDSPEED_BRANCH
    major, minor = map(int, cuda["VLLM_IMAGE"].rpartition(":v")[2].split(".")[:2])
    assert (major, minor) >= (0, 23) and (major, minor) < (0, 33)  # the extra rollout-cuda


@each_profile
def test_compose_builds_with_the_defaults_of_the_dockerfile(profile: str) -> None:
    (trainer,) = role(profile, "trainer").values()
    values = arguments_of(ROOT / trainer["build"]["dockerfile"])
    for name, value in trainer["build"]["args"].items():
        assert values[name] == default(value), name


# -- the scripts of the containers -------------------------------------------------------------------------------------


def script(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", str(SCRIPTS / name), *arguments],
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*.sh")), ids=lambda path: path.name)
def test_a_script_can_be_run(path: Path) -> None:
    assert path.stat().st_mode & stat.S_IXUSR
    shell = path.read_text().splitlines()[0].removeprefix("#!")
    assert subprocess.run([shell, "-n", path], timeout=60).returncode == 0


def test_secrets_are_random_long_and_made_once(tmp_path: Path) -> None:
    first = script("make-secrets.sh", str(tmp_path), *SECRETS)
    made = {name: (tmp_path / name).read_text() for name in SECRETS}
    again = script("make-secrets.sh", str(tmp_path), *SECRETS)
    assert (first.returncode, again.returncode) == (0, 0)
    assert all(re.fullmatch(r"[0-9a-f]{64}", secret) for secret in made.values())
    assert len(set(made.values())) == len(SECRETS)
    assert {name: (tmp_path / name).read_text() for name in SECRETS} == made
    assert not any(secret in first.stdout + first.stderr for secret in made.values())


def test_a_secret_that_is_given_replaces_the_one_that_was_made(tmp_path: Path) -> None:
    script("make-secrets.sh", str(tmp_path), *SECRETS)
    mine = "a-password-of-mine"
    assert script("make-secrets.sh", str(tmp_path), *SECRETS, ASYNC_GRPO_HTTP_KEY=mine).returncode == 0
    assert (tmp_path / "ASYNC_GRPO_HTTP_KEY").read_text() == mine


@pytest.mark.parametrize(("given", "why"), [("short", "too few"), ('sixteen "letters" or more', "character")])
def test_a_secret_that_cannot_be_used_is_refused_without_being_shown(tmp_path: Path, given: str, why: str) -> None:
    ended = script("make-secrets.sh", str(tmp_path), *SECRETS, ASYNC_GRPO_HTTP_KEY=given)
    assert ended.returncode == 1
    assert "ASYNC_GRPO_HTTP_KEY" in ended.stderr and why in ended.stderr
    assert given not in ended.stdout + ended.stderr


def test_a_role_finds_its_secrets_in_its_environment(tmp_path: Path) -> None:
    (tmp_path / "ASYNC_GRPO_HTTP_KEY").write_text("from the file $(id)")
    (tmp_path / "ASYNC_GRPO_ADMIN_TOKEN").write_text("from the file")
    (tmp_path / "OTHER").write_text("not ours")
    ended = script("entrypoint.sh", "env", SECRETS_DIR=str(tmp_path), ASYNC_GRPO_ADMIN_TOKEN="given")
    found = dict(line.partition("=")[::2] for line in ended.stdout.splitlines())
    assert found["ASYNC_GRPO_HTTP_KEY"] == "from the file $(id)"
    assert found["ASYNC_GRPO_ADMIN_TOKEN"] == "given"
    assert "OTHER" not in found


def test_a_role_without_secrets_is_started_all_the_same(tmp_path: Path) -> None:
    ended = script("entrypoint.sh", "sh", "-c", "exit 7", SECRETS_DIR=str(tmp_path / "none"))
    assert ended.returncode == 7


@pytest.fixture
def containers(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Starts processes that are alike, of which each is to have devices of its own, and prints them."""
    started: list[subprocess.Popen[str]] = []
    environment = {
        "PATH": os.environ["PATH"],
        "SECRETS_DIR": str(tmp_path),
        "DEVICE_LOCKS": str(tmp_path),
        "DEVICE_SETS": "0,1 2,3",
        "VISIBLE_DEVICES_VARIABLE": "CUDA_VISIBLE_DEVICES",
    }
    command = ["sh", str(SCRIPTS / "entrypoint.sh"), "sh", "-c", 'echo "$CUDA_VISIBLE_DEVICES"; exec sleep 100']

    def start() -> subprocess.Popen[str]:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def devices_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_containers_that_are_alike_have_different_devices(containers: Callable[[], subprocess.Popen[str]]) -> None:
    assert [devices_of(containers()) for _ in range(2)] == ["0,1", "2,3"]
    third = containers()
    _, said = third.communicate(timeout=60)
    assert third.returncode == 1
    assert "DEVICE_SETS (0,1 2,3)" in said


def test_the_devices_of_a_container_that_was_killed_go_to_the_next(
    containers: Callable[[], subprocess.Popen[str]],
) -> None:
    first, second = containers(), containers()
    devices = devices_of(first)
    devices_of(second)
    first.kill()
    first.wait()
    assert devices_of(containers()) == devices


def test_the_server_wants_the_password_and_never_drops_what_it_has_acknowledged(tmp_path: Path) -> None:
    import redis

    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "redis-server").symlink_to(find_server())
    secret, path = "f00d" * 16, tmp_path / "socket"
    (tmp_path / "ASYNC_GRPO_REDIS_PASSWORD").write_text(secret)
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SECRETS_DIR": str(tmp_path)}
    arguments = ["--port", "0", "--unixsocket", str(path), "--dir", str(tmp_path)]
    server = subprocess.Popen(
        ["sh", str(SCRIPTS / "redis.sh"), *arguments], env=environment | {"TMPDIR": str(tmp_path)}
    )
    try:
        deadline = time.monotonic() + 60
        while not path.exists() and server.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(unix_socket_path=str(path)).ping()
        client = redis.Redis(unix_socket_path=str(path), password=secret, decode_responses=True)
        wanted = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction", "save": ""}
        assert {name: client.config_get(name)[name] for name in wanted} == wanted
        assert int(client.config_get("maxmemory")["maxmemory"]) == 4 << 30
        assert secret not in Path(f"/proc/{server.pid}/cmdline").read_text()
        client.close()
    finally:
        server.terminate()
        server.wait(60)


# -- what is written about it ------------------------------------------------------------------------------------------


def test_metrics_that_operators_are_told_to_watch_exist() -> None:
    told = set(re.findall(r"\basync_grpo_[a-z_]+", (ROOT / "docs" / "operations.md").read_text()))
    there = set(re.findall(r"\basync_grpo_[a-z_]+", (ROOT / "docs" / "http.md").read_text()))
    assert told and told <= there


def test_compose_accepts_the_file() -> None:
    compose = shutil.which("docker-compose")
    command = [compose] if compose else ["docker", "compose"]
    if not compose and (not shutil.which("docker") or subprocess.run(["docker", "compose", "version"]).returncode):
        pytest.skip("there is no docker compose to ask")
    for profile in PROFILES:
        arguments = ["-f", str(DEPLOY / "compose.yaml"), "--profile", profile, "config", "-q"]
        assert subprocess.run([*command, *arguments], timeout=120).returncode == 0
