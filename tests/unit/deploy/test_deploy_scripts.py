"""The scripts of the containers, run here, and the metrics that operators are told of."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from buffer.server import find_server
from tests.support.deploy_files import DOCKERFILES, ROOT, SCRIPTS, SECRETS, services_of, words_of

PATHS = [f"{folder}/{name}" for name, folder in SECRETS.items()]


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


def make_secrets(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    for name in SECRETS.values():
        (folder / name).mkdir(exist_ok=True)
    return script("make-secrets.sh", str(folder), *PATHS, **environment)


def read_secrets(folder: Path) -> dict[str, str]:
    return {path.rpartition("/")[2]: (folder / path).read_text() for path in PATHS}


def test_secrets_are_random_long_and_made_once_unless_one_is_given(tmp_path: Path) -> None:
    first = make_secrets(tmp_path)
    made = read_secrets(tmp_path)
    assert all(re.fullmatch(r"[0-9a-f]{64}", secret) for secret in made.values())
    assert len(set(made.values())) == len(SECRETS)
    again = make_secrets(tmp_path, ASYNC_GRPO_HTTP_KEY="a-password-of-mine")
    assert (first.returncode, again.returncode) == (0, 0)
    found = read_secrets(tmp_path)
    assert found == made | {"ASYNC_GRPO_HTTP_KEY": "a-password-of-mine"}
    said = first.stdout + first.stderr + again.stdout + again.stderr
    assert not any(secret in said for secret in [*made.values(), *found.values()])


@pytest.mark.parametrize(("given", "why"), [("short", "too few"), ('sixteen "letters" or more', "character")])
def test_a_secret_that_cannot_be_used_is_refused_without_being_shown(tmp_path: Path, given: str, why: str) -> None:
    ended = make_secrets(tmp_path, ASYNC_GRPO_HTTP_KEY=given)
    assert ended.returncode == 1
    assert "ASYNC_GRPO_HTTP_KEY" in ended.stderr and why in ended.stderr
    assert given not in ended.stdout + ended.stderr


@pytest.mark.parametrize(("given", "maxmemory"), [("3gb", 1536), ("700mb", 350)])
def test_redis_may_fill_half_of_its_container(tmp_path: Path, given: str, maxmemory: int) -> None:
    assert make_secrets(tmp_path, REDIS_MEMORY=given).returncode == 0
    password = (tmp_path / "redis" / "ASYNC_GRPO_REDIS_PASSWORD").read_text()
    config = (tmp_path / "redis" / "redis.conf").read_text()
    assert config == f"requirepass {password}\nmaxmemory {maxmemory}mb\n"


@pytest.mark.parametrize("given", ["8", "8g", "gb", "-8gb", "x8gb"])
def test_a_memory_without_a_unit_is_refused(tmp_path: Path, given: str) -> None:
    ended = make_secrets(tmp_path, REDIS_MEMORY=given)
    assert ended.returncode == 1 and f"REDIS_MEMORY is {given}." in ended.stderr


def test_the_variable_of_earlier_releases_is_refused_with_its_successor(tmp_path: Path) -> None:
    ended = make_secrets(tmp_path, REDIS_MAXMEMORY="4gb")
    assert ended.returncode == 1 and "REDIS_MEMORY" in ended.stderr


def test_a_role_finds_its_secrets_in_its_environment(tmp_path: Path) -> None:
    (tmp_path / "http").mkdir()
    (tmp_path / "http" / "ASYNC_GRPO_HTTP_KEY").write_text("from the file $(id)")
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


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("trap 'exit 0' TERM; echo up; sleep 100 & wait", 75),  # it has saved its work
        ("trap 'exit 78' TERM; echo up; sleep 100 & wait", 78),
        ("trap 'sleep 1; exit 3' TERM; echo up; sleep 100 & wait", 3),
    ],
)
def test_a_role_that_is_stopped_does_not_end_with_0(program: str, code: int) -> None:
    environment = {"PATH": os.environ["PATH"], "SECRETS_DIR": "/none", "EXIT_CODE_WHEN_STOPPED": "75"}
    command = ["sh", str(SCRIPTS / "entrypoint.sh"), "sh", "-c", program]
    role = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
    assert role.stdout is not None
    role.stdout.readline()
    role.send_signal(signal.SIGTERM)
    role.stdout.close()
    assert role.wait(60) == code


@pytest.mark.parametrize("code", [0, 1, 78])
def test_a_role_that_ends_by_itself_keeps_its_exit_code_and_its_input(code: int) -> None:
    environment = {"PATH": os.environ["PATH"], "SECRETS_DIR": "/none", "EXIT_CODE_WHEN_STOPPED": "75"}
    command = ["sh", str(SCRIPTS / "entrypoint.sh"), "sh", "-c", 'read line; echo "$line"; exit ' + str(code)]
    ended = subprocess.run(command, env=environment, input="typed\n", capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (code, "typed\n")


@pytest.mark.parametrize(("given", "left"), [("", None), ("1", "1"), ("2", "2")])
def test_the_ascend_image_leaves_the_queue_to_trainer_and_engine_unless_it_is_told(
    given: str, left: str | None
) -> None:
    """Their base image says 1 for both; an engine captures no graph at 2, and a trainer is slower at 1."""
    values = dict(re.findall(r"(\w+)=(\S+)", words_of(DOCKERFILES[2], "ENV")[-1]))
    assert values["TASK_QUEUE_ENABLE"] == '""'
    command = ["bash", str(SCRIPTS / "with-cann.sh"), "env"]
    environment = {"PATH": os.environ["PATH"], "TASK_QUEUE_ENABLE": given}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    found = dict(line.partition("=")[::2] for line in ended.stdout.splitlines())
    assert found.get("TASK_QUEUE_ENABLE") == left


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

    service, path = services_of("cpu")["redis"], tmp_path / "socket"
    assert make_secrets(tmp_path, ASYNC_GRPO_REDIS_PASSWORD="f00d" * 16).returncode == 0
    places = {"redis-server": find_server(), "/run/secrets/redis.conf": str(tmp_path / "redis" / "redis.conf")}
    places["/data"] = str(tmp_path)
    argv = [places.get(word, word) for word in [*service["entrypoint"], *service["command"]]]
    server = subprocess.Popen([*argv, "--port", "0", "--unixsocket", str(path)])
    try:
        deadline = time.monotonic() + 60
        while not path.exists() and server.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(unix_socket_path=str(path)).ping()
        client = redis.Redis(unix_socket_path=str(path), password="f00d" * 16, decode_responses=True)
        wanted = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction", "save": ""}
        assert {name: client.config_get(name)[name] for name in wanted} == wanted
        assert int(client.config_get("maxmemory")["maxmemory"]) == 4 << 30
        assert "f00d" not in Path(f"/proc/{server.pid}/cmdline").read_text()
        client.close()
    finally:
        server.terminate()
        server.wait(60)


# -- what is written about it ------------------------------------------------------------------------------------------


def test_metrics_that_operators_are_told_to_watch_exist() -> None:
    def named_in(*pages: str) -> set[str]:
        text = "".join((ROOT / "docs" / page).read_text() for page in pages)
        return set(re.findall(r"\basync_grpo_[a-z_]+", text))

    told = named_in("watching.md")
    assert told and told <= named_in("http.md", "reference.md")
