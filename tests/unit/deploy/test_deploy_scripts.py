"""The scripts of the containers, run here, and the metrics that operators are told of."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from buffer.server import find_server
from tests.support.deploy_files import DOCKERFILES, ROOT, SCRIPTS, SECRETS, words_of


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


def test_secrets_are_random_long_and_made_once_unless_one_is_given(tmp_path: Path) -> None:
    first = script("make-secrets.sh", str(tmp_path), *SECRETS)
    made = {name: (tmp_path / name).read_text() for name in SECRETS}
    assert all(re.fullmatch(r"[0-9a-f]{64}", secret) for secret in made.values())
    assert len(set(made.values())) == len(SECRETS)
    again = script("make-secrets.sh", str(tmp_path), *SECRETS, ASYNC_GRPO_HTTP_KEY="a-password-of-mine")
    assert (first.returncode, again.returncode) == (0, 0)
    found = {name: (tmp_path / name).read_text() for name in SECRETS}
    assert found == made | {"ASYNC_GRPO_HTTP_KEY": "a-password-of-mine"}
    said = first.stdout + first.stderr + again.stdout + again.stderr
    assert not any(secret in said for secret in [*made.values(), *found.values()])


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
    def named_in(*pages: str) -> set[str]:
        text = "".join((ROOT / "docs" / page).read_text() for page in pages)
        return set(re.findall(r"\basync_grpo_[a-z_]+", text))

    told = named_in("watching.md")
    assert told and told <= named_in("http.md", "reference.md")
