"""Real processes are started, killed and cleaned up after."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from async_grpo.app.launch.role_process import RoleProcess, RoleSpec, supervise_processes
from async_grpo.app.launch.role_specs import trainer_argv
from async_grpo.app.launch.supervisor import RunProgress, Supervisor
from async_grpo.app.report.live_state import warn_as_text
from async_grpo.config import dump, validate
from async_grpo.errors import RoleFailed
from async_grpo.utils.child_process import adopt_orphans, child_argv

SLEEPER = "import time; time.sleep(60)"
PARENT_OF_A_DETACHED_CHILD = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {SLEEPER!r}], start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
"""

TWO_RANKS = """
import os, sys
first, second = os.fork() or -1, os.fork() or -1
if first > 0 and second > 0:
    os.waitpid(first, 0), os.waitpid(second, 0)
    sys.exit("TrainingError: rank 1 ended with exit code 1")
if first < 0 and second < 0:
    os._exit(0)  # a child of the first child
import torch, torch.distributed as dist
number = 0 if first < 0 else 1
dist.init_process_group("gloo", init_method="file://{meeting}", rank=number, world_size=2)
dist.barrier()
if number == 1:
    raise ValueError("no such chunk")
dist.recv(torch.zeros(1), src=1)
"""
PARENT_OF_A_CHILD_WITHOUT_ENVIRONMENT = PARENT_OF_A_DETACHED_CHILD.replace("start_new_session=True", "env={}")

PARENT_OF_A_CHILD_THAT_IS_LATE = """
import os, subprocess, sys
from async_grpo.utils.child_process import child_argv
late = ["/bin/sh", "-c", 'read go; exec "$@"', "sh", *child_argv(["/bin/echo", "alive"])]
print(subprocess.Popen(late, stdin=int(sys.argv[1]), pass_fds=[int(sys.argv[1])]).pid, flush=True)
os.kill(os.getpid(), 9)
"""


STARTER_OF_A_RECEIVER_THAT_STOPS = """
import os, signal, sys, time
from pathlib import Path
from async_grpo.config.weights import WeightsConfig
from async_grpo.weights.node.local_socket import ReceiverPaths, start_receiver
receiver = start_receiver(ReceiverPaths(Path({store!r})), WeightsConfig())
os.kill(receiver.pid, signal.SIGSTOP)
print(receiver.pid, flush=True)
time.sleep(60)
"""

HOLDER_OF_A_SEMAPHORE = """
import multiprocessing, os, sys, time
semaphore = multiprocessing.get_context("spawn").Semaphore()
print(semaphore._semlock.name, flush=True)
time.sleep(60)
"""


def spec(folder: Path, program: str, *, name: str = "role", restarts: int = 0) -> RoleSpec:
    return RoleSpec(name, [sys.executable, "-c", program], folder / f"{name}.log", restarts)


async def first_line(log: Path) -> str:
    async with asyncio.timeout(10):
        while not log.exists() or not log.read_text().strip():
            await asyncio.sleep(0.05)
    return log.read_text().splitlines()[0]


@pytest.mark.parametrize(
    "program",
    [PARENT_OF_A_DETACHED_CHILD, PARENT_OF_A_CHILD_WITHOUT_ENVIRONMENT],
    ids=["in another session", "that cannot be told by its environment"],
)
async def test_a_killed_role_leaves_no_orphan(tmp_path: Path, program: str) -> None:
    adopt_orphans()
    role = await RoleProcess.start(spec(tmp_path, program), "run")
    child = int(await first_line(tmp_path / "role.log"))
    os.kill(role.pid, signal.SIGKILL)
    assert await role.wait() == -signal.SIGKILL
    assert not psutil.pid_exists(child)


@pytest.mark.parametrize("how", ["killed", "killed by the supervisor", "ends without cleaning up"])
async def test_a_killed_role_leaves_no_semaphore_in_shared_memory(tmp_path: Path, how: str) -> None:
    """As vLLM's engine has them."""
    adopt_orphans()
    program = HOLDER_OF_A_SEMAPHORE.replace("time.sleep(60)", "os._exit(3)") if "ends" in how else HOLDER_OF_A_SEMAPHORE
    role = await RoleProcess.start(spec(tmp_path, program), "run")
    name = await first_line(tmp_path / "role.log")
    if how == "killed":
        os.kill(role.pid, signal.SIGKILL)
    elif how == "killed by the supervisor":
        role.kill()
    await role.wait()
    assert not Path(f"/dev/shm/sem.{name.removeprefix('/')}").exists()


def test_a_child_whose_parent_died_before_it_could_ask_the_kernel_ends_by_itself() -> None:
    adopt_orphans()
    gate, go = os.pipe()
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT_OF_A_CHILD_THAT_IS_LATE, str(gate)], stdout=subprocess.PIPE, pass_fds=[gate]
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert parent.wait(10) == -signal.SIGKILL
    os.write(go, b"\n")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert parent.stdout.read() == b""
    os.close(go)
    os.close(gate)


def test_a_child_keeps_its_process_id_and_none_of_the_signals_that_python_ignores() -> None:
    shows = subprocess.Popen(
        child_argv(["/bin/grep", "-E", "^(Pid|SigIgn):", "/proc/self/status"]), stdout=subprocess.PIPE, text=True
    )
    _, pid, _, ignored = shows.communicate(timeout=10)[0].split()
    own = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("SigIgn:"))
    python_ignores = sum(1 << (number - 1) for number in (signal.SIGPIPE, signal.SIGXFSZ))
    assert (int(pid), int(ignored, 16)) == (shows.pid, int(own.split()[1], 16) & ~python_ignores)


async def test_the_explanation_names_the_signal(tmp_path: Path) -> None:
    role = await RoleProcess.start(spec(tmp_path, SLEEPER), "run")
    role.kill()
    assert "role was killed by SIGKILL" in role.explain(await role.wait())


@pytest.mark.parametrize(
    ("program", "quoted"),
    [
        ("raise ValueError('no such chunk')", "ValueError: no such chunk"),
        (
            "from async_grpo.errors import NonFiniteStep as E; raise E('the loss is nan')",
            "async_grpo.errors.NonFiniteStep: the loss is nan (",
        ),
    ],
    ids=["Python's", "ours"],
)
async def test_the_explanation_quotes_the_last_error_of_the_log(tmp_path: Path, program: str, quoted: str) -> None:
    role = await RoleProcess.start(spec(tmp_path, program), "run")
    assert f"exit code 1: {quoted}" in role.explain(await role.wait())


async def test_the_explanation_blames_no_error_of_an_earlier_life(tmp_path: Path) -> None:
    first = await RoleProcess.start(spec(tmp_path, "raise ValueError('of the first life')"), "run")
    assert "of the first life" in first.explain(await first.wait())
    second = await RoleProcess.start(spec(tmp_path, "import os; os._exit(1)"), "run")
    assert second.explain(await second.wait()) == f"role ended with exit code 1 (log: {tmp_path / 'role.log'})"


async def test_the_explanation_is_the_error_of_the_rank_that_failed_and_not_those_of_the_others(tmp_path: Path) -> None:
    role = await RoleProcess.start(spec(tmp_path, TWO_RANKS.format(meeting=tmp_path / "meeting")), "run")
    explained = role.explain(await role.wait())
    log = (tmp_path / "role.log").read_text()
    assert "[rank1]: ValueError: no such chunk" in log and "closed by peer" in log  # as torch writes them
    assert "exit code 1: ValueError: no such chunk (" in explained


async def test_the_explanation_of_a_trainer_is_the_error_of_its_rank(tmp_path: Path) -> None:
    raw = {"name": "a", "runs_dir": str(tmp_path), "model": {"random": {}}, "trainer": {"platform": "npu"}}
    (tmp_path / "a.yaml").write_text(dump(validate(raw, "test")))
    argv = trainer_argv(tmp_path / "a.yaml", tmp_path / "no-model")
    role = await RoleProcess.start(RoleSpec("trainer", argv, tmp_path / "trainer.log", 0), "run")
    explained = role.explain(await role.wait())
    assert "trainer ended with exit code 78: DependencyError: trainer.platform is npu" in explained
    *_, last = (tmp_path / "trainer.log").read_text().splitlines()
    assert last.startswith("RankFailed: rank 0 ended with exit code 78: DependencyError: trainer.platform is npu")


def supervisor(folder: Path, *specs: RoleSpec, said: list[str]) -> Supervisor:
    return supervise_processes("run", specs, restarts={}, warn=warn_as_text(said.append), stop_timeout_s=5.0)


async def test_a_role_that_dies_is_named_restarted_and_given_up_at_its_limit(tmp_path: Path) -> None:
    said: list[str] = []
    failing = spec(tmp_path, "import sys; sys.exit(3)", name="trainer", restarts=2)
    with pytest.raises(RoleFailed, match=r"trainer .*exit code 3"):
        await supervisor(tmp_path, failing, said=said).watch()
    assert len(said) == 2


@pytest.mark.parametrize(
    ("module", "more"),
    [("trainer.main", []), ("rollout_server.main", ["--name", "rollout-0"])],
    ids=["trainer", "rollout"],
)
async def test_a_role_that_refuses_its_configuration_is_not_restarted(
    tmp_path: Path, module: str, more: list[str]
) -> None:
    said: list[str] = []
    files = ["--config", str(tmp_path / "gone.yaml"), "--model", str(tmp_path)]
    role = RoleSpec("trainer", [sys.executable, "-m", module, *files, *more], tmp_path / "role.log", max_restarts=3)
    with pytest.raises(RoleFailed, match=r"exit code 78: ConfigError"):
        await supervisor(tmp_path, role, said=said).watch()
    assert said == []
    assert "Traceback" not in role.log.read_text()


async def test_servers_that_leave_while_the_trainer_is_restarted_after_the_end_are_not_started_again(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    second_life = f"import os, pathlib, time; life = pathlib.Path({str(tmp_path / 'life')!r})"
    dies_once = f"{second_life}; os._exit(0) if life.exists() else (life.touch(), time.sleep(0.3), os._exit(1))"
    specs = [spec(tmp_path, dies_once, name="trainer", restarts=1), spec(tmp_path, "", name="rollout-0")]

    class Generated(RunProgress):
        async def is_generated(self) -> bool:
            return True

    keeper = supervise_processes(
        "run", specs, restarts={}, warn=warn_as_text(said.append), stop_timeout_s=5.0, progress=Generated()
    )
    await asyncio.wait_for(keeper.watch(), 20)
    assert keeper.restarts == {"trainer": 1, "rollout-0": 0}
    assert {role.state for role in keeper.states.values()} == {"finished"}


async def test_the_death_of_a_role_is_a_warning_with_fields(tmp_path: Path) -> None:
    warned: list[dict[str, object]] = []

    def warn(text: str, *, level: str = "warning", **fields: object) -> None:
        warned.append({"level": level, **fields})

    dies = "import os; os.kill(os.getpid(), 9)"
    specs = [spec(tmp_path, dies, name="trainer", restarts=1)]
    keeper = supervise_processes("run", specs, restarts={}, warn=warn, stop_timeout_s=5.0)
    with pytest.raises(RoleFailed):
        await keeper.watch()
    shown = {"failed_role": "trainer", "signal": "SIGKILL", "restart": 1, "restart_limit": 1}
    assert warned == [{"level": "warning", **shown}]


async def test_a_run_goes_on_with_the_servers_that_it_has(tmp_path: Path) -> None:
    said: list[str] = []
    keeper = supervise_processes(
        "run",
        [spec(tmp_path, SLEEPER, name=name) for name in ("trainer", "rollout-0", "rollout-1")],
        spares=[spec(tmp_path, "import sys; sys.exit(3)", name="rollout-2")],
        restarts={},
        warn=warn_as_text(said.append),
        stop_timeout_s=5.0,
    )
    watching = asyncio.create_task(keeper.watch())

    async def until_failed(name: str) -> None:
        async with asyncio.timeout(10):
            while keeper.states[name].state != "failed" or keeper.pid(name) is not None:
                await asyncio.sleep(0.02)

    async with asyncio.timeout(10):
        while any(keeper.mark_ready(name) is None for name in keeper.states if keeper.states[name].state == "starting"):
            await asyncio.sleep(0.02)
    assert keeper.start_spare() == "rollout-2"
    await until_failed("rollout-2")  # it dies too often
    keeper.give_up_role("rollout-1", "rollout-1 has not been ready for 1 s")
    await until_failed("rollout-1")
    assert set(keeper.given_up) == {"rollout-1", "rollout-2"}
    assert keeper.start_spare() is None, "a spare that was given up would fail again"
    assert len(said) == 2 and not watching.done()
    for name in ("rollout-0", "trainer"):  # the last server, and the trainer
        with pytest.raises(RoleFailed, match=f"{name} has not"):
            keeper.give_up_role(name, f"{name} has not been ready for 1 s")
    await keeper.stop()
    await asyncio.wait_for(watching, 10)


@pytest.mark.parametrize(("others", "goes_on"), [("starting", False), ("running", True)])
async def test_a_server_with_a_faulty_configuration_ends_the_run_unless_others_run_with_it(
    tmp_path: Path, others: str, goes_on: bool
) -> None:
    refuses = "import sys, time; time.sleep(0.5); sys.exit(78)"
    programs = {"trainer": SLEEPER, "rollout-0": SLEEPER, "rollout-1": refuses}
    keeper = supervisor(tmp_path, *(spec(tmp_path, text, name=name) for name, text in programs.items()), said=[])
    watching = asyncio.create_task(keeper.watch())
    async with asyncio.timeout(10):
        while others == "running" and keeper.mark_ready("rollout-0") is None:
            await asyncio.sleep(0.02)
        while keeper.states["rollout-1"].state != "failed":
            await asyncio.sleep(0.02)
    assert ("rollout-1" in keeper.given_up) is goes_on
    await keeper.stop()
    ended = await asyncio.gather(watching, return_exceptions=True)
    assert isinstance(ended[0], RoleFailed) is not goes_on


async def test_stop_ends_all_roles_in_time_and_does_not_restart_them(tmp_path: Path) -> None:
    said: list[str] = []
    keeper = supervisor(tmp_path, spec(tmp_path, SLEEPER, name="trainer", restarts=3), said=said)
    watching = asyncio.create_task(keeper.watch())
    async with asyncio.timeout(10):
        while (pid := keeper.pid("trainer")) is None:
            await asyncio.sleep(0.02)
        await keeper.stop()
        await watching
    assert said == []
    assert not psutil.pid_exists(pid)


async def test_what_roles_share_outlives_each_of_them_and_ends_with_the_last_also_where_it_has_stopped(
    tmp_path: Path,
) -> None:
    adopt_orphans()
    program = STARTER_OF_A_RECEIVER_THAT_STOPS.format(store=str(tmp_path / "node.weights"))
    programs = {"trainer": SLEEPER, "rollout-0": program, "rollout-1": SLEEPER}
    specs = [spec(tmp_path, text, name=name) for name, text in programs.items()]
    keeper = supervisor(tmp_path, *specs, said=[])
    watching = asyncio.create_task(keeper.watch())
    receiver = int(await first_line(tmp_path / "rollout-0.log"))
    starter = keeper.pid("rollout-0")
    assert starter is not None
    os.kill(starter, signal.SIGKILL)
    async with asyncio.timeout(10):
        while keeper.states["rollout-0"].state != "failed":
            await asyncio.sleep(0.02)
    assert psutil.Process(receiver).status() == psutil.STATUS_STOPPED
    await keeper.stop()
    await watching
    assert not psutil.pid_exists(receiver)


async def test_a_role_that_ignores_sigterm_is_killed_at_the_deadline(tmp_path: Path) -> None:
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    keeper = supervise_processes(
        "run", [spec(tmp_path, stubborn, name="trainer")], restarts={}, warn=warn_as_text(print), stop_timeout_s=0.5
    )
    watching = asyncio.create_task(keeper.watch())
    await first_line(tmp_path / "trainer.log")
    pid = keeper.pid("trainer")
    assert pid is not None
    async with asyncio.timeout(10):
        await keeper.stop()
        await watching
    assert not psutil.pid_exists(pid)


async def test_a_role_counts_as_running_once_it_has_been_heard_of(tmp_path: Path) -> None:
    keeper = supervisor(tmp_path, spec(tmp_path, SLEEPER, name="trainer"), said=[])
    watching = asyncio.create_task(keeper.watch())
    async with asyncio.timeout(10):
        while keeper.pid("trainer") is None:
            await asyncio.sleep(0.02)
        assert keeper.states["trainer"].state == "starting"
        keeper.mark_ready("trainer")
        assert keeper.states["trainer"].state == "running"
        await keeper.stop()
        await watching


async def test_spare_servers_start_leave_and_start_again_and_stop_with_the_others(tmp_path: Path) -> None:
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    said: list[str] = []
    keeper = supervise_processes(
        "run",
        [spec(tmp_path, SLEEPER, name="trainer")],
        spares=[spec(tmp_path, program, name=name) for name, program in (("one", SLEEPER), ("two", stubborn))],
        restarts={},
        warn=warn_as_text(said.append),
        stop_timeout_s=0.5,
    )
    assert keeper.start_spare() is None  # nothing runs yet
    watching = asyncio.create_task(keeper.watch())

    async def until(name: str, *, runs: bool) -> None:
        async with asyncio.timeout(10):
            while (keeper.pid(name) is not None) != runs or keeper.is_active(name) != runs:
                await asyncio.sleep(0.02)

    await until("trainer", runs=True)
    assert set(keeper.states) == {"trainer"}
    assert [keeper.start_spare() for _ in range(3)] == ["one", "two", None]
    await first_line(tmp_path / "two.log")
    for name in ("one", "two"):  # one obeys, the other is killed at the deadline
        await until(name, runs=True)
        keeper.retire_server(name)
        await until(name, runs=False)
    assert keeper.start_spare() == "one"
    await until("one", runs=True)
    assert keeper.can_retire("one") and not keeper.can_retire("two") and not keeper.can_retire("trainer")
    await keeper.stop()
    await asyncio.wait_for(watching, 10)
    assert said == [] and keeper.pid("one") is None
