"""Attacks a whole run with random SIGKILL and SIGSTOP to every kind of its processes, then checks what remains.

    python -m tests.support.run_attack --seed 1                    ten attacks over 170 steps, two rollout servers
    python -m tests.support.run_attack --seed 1 --last-seconds     five of them in the last five seconds
    python -m tests.support.run_attack --seed 1 --wild-workflow    with a workflow that misbehaves in 2% of its samples
    python -m tests.support.run_attack --seed 1 --outside-server   on a Valkey that is not attacked; its connections are
                                                                   counted at the end

The run must finish by itself or, if it gave up, when the same command is started again. Its counters must balance, and
no process or shared memory may remain. Exit code 0 if all of that holds. The run is configs/quickstart.yaml with a
random policy, so that it starts in seconds. Listening sockets end with their process, so a run without orphans leaves
none.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from async_grpo.config.buffer import RedisConfig
from async_grpo.telemetry.jsonl import RowFollower
from buffer import EmbeddedServer
from tests.support.run_traces import KINDS, RunBooks, RunFamily, describe

ROOT = Path(__file__).parents[2]
NAME = "attacked"
CONFIG = """\
base: {root}/configs/quickstart.yaml
name: {name}
steps: {steps}
max_staleness: 2
group_size: 4
groups_per_step: 4
model: {{warmup: null, random: {{hidden_size: 64, layers: 2, heads: 2, kv_heads: 1, intermediate_size: 128}}}}
sampling: {{max_tokens: 64}}
rewards: {{functions: [{{name: "tests.support.wild_rewards:coin"}}], deadline_s: 5}}
rollout: {{servers: {servers}, workflow: "{workflow}", max_concurrency: 16, vllm: {{kv_cache_bytes: 67108864}}}}
redis: {{timeout_s: 8{redis_url}}}
weights: {{update_timeout_s: 60}}
eval: {{prompts: 16, samples: 1, every_steps: 0, timeout_s: 120}}
launch: {{ready_timeout_s: 120}}
telemetry: {{samples_every: 1}}
"""
STOPPED_S = (1.0, 3.0, 8.0, 20.0)
"""Seconds for which a process is stopped."""
DETECTED = ("server", "engine", "publisher", "reward worker")
"""Kinds that may be stopped for ever: a lease, a deadline or a timeout detects them, and other processes take over."""
SPACING_S = 1.0
KIND_TIMEOUT_S = 60.0
"""Seconds to wait for a process of a kind before another kind is attacked."""
HUNG_S = 240.0
"""Seconds without a step, an exit or an attack, after which the run counts as hung."""
LEAVING_S = 20.0
FUTILE = 4
"""Consecutive starts without a new step, after which the run counts as unable to finish."""


@dataclass
class Attack:
    """A signal to a process of `kind` at `step`. At the last step: `after_s` later, or earlier if negative."""

    kind: str
    step: int
    stopped_s: float | None = None
    """None: SIGKILL. Infinite: never continued."""
    after_s: float = 0.0


@dataclass
class Findings:
    """Problems, exit codes and attacks of a run."""

    problems: list[str] = field(default_factory=list)
    exits: list[int] = field(default_factory=list)
    done: list[str] = field(default_factory=list)

    def expect(self, condition: bool, problem: str) -> None:
        """Record and print the problem unless the condition is true."""
        if not condition:
            self.problems.append(problem)
            print(f"  PROBLEM: {problem}", flush=True)


def plan(
    seed: int, *, steps: int, attacks: int, last_seconds: bool, kinds_to_attack: Sequence[str] = KINDS
) -> list[Attack]:
    """Plan attacks at random steps, on every kind once before any is repeated.

    With `last_seconds` five of them come at the end, all SIGKILL.
    """
    chance = random.Random(seed)
    kinds = list(itertools.islice(_shuffle_endlessly(chance, kinds_to_attack), attacks))
    late = min(5, attacks) if last_seconds else 0
    early = sorted(chance.sample(range(2, steps - 5), attacks - late))
    planned = [
        Attack(
            kind, step, chance.choice([None, chance.choice((*STOPPED_S, math.inf) if kind in DETECTED else STOPPED_S)])
        )
        for kind, step in zip(kinds[late:], early, strict=True)
    ]
    # The first comes a second before training ends, the others in the seconds after; two of them hit the trainer.
    others = chance.sample(kinds_to_attack, 2)
    last = [chance.choice(kinds_to_attack), *chance.sample(["rank", "rank", *others], 4)][:late]
    return planned + [Attack(kind, steps, after_s=second - chance.random()) for second, kind in enumerate(last)]


def _shuffle_endlessly(chance: random.Random, kinds: Sequence[str]) -> Iterator[str]:
    while True:
        yield from chance.sample(kinds, len(kinds))


class AttackedRun:
    """One run in `folder`, started again until it finishes."""

    def __init__(
        self,
        folder: Path,
        attacks: list[Attack],
        *,
        steps: int,
        servers: int,
        workflow: str = "single_turn",
        outside_server: EmbeddedServer | None = None,
    ) -> None:
        self.folder = folder
        self.steps = steps
        self.findings = Findings()
        self.run_dir = folder / "runs" / NAME
        self._attacks = list(attacks)
        self._outside_server = outside_server
        server_pids = [outside_server.pid] if outside_server is not None and outside_server.pid is not None else []
        self._family = RunFamily(not_of_the_run=server_pids)
        self._rows = RowFollower(self.run_dir / "metrics.jsonl")
        self._times: dict[int, float] = {}
        """Step -> time at which it was first trained."""
        self._continue_at: list[tuple[float, psutil.Process]] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._last_progress_s = self._started_s = time.monotonic()
        self._next_look_s = self._next_attack_s = 0.0
        self._config = folder / "attacked.yaml"
        redis_url = f', url: "{outside_server.url}"' if outside_server is not None else ""
        settings = {"steps": steps, "servers": servers, "workflow": workflow, "redis_url": redis_url}
        self._config.write_text(CONFIG.format(root=ROOT, name=NAME, **settings))
        self._books = RunBooks(self.run_dir, steps=steps, expect=self.findings.expect, server=outside_server)

    @property
    def step(self) -> int:
        """The last trained step."""
        return max(self._times, default=0)

    def go(self, timeout_s: float) -> Findings:
        """Run until it has finished, is unable to finish, or the time is over."""
        futile = 0
        before = -1
        while futile < FUTILE and time.monotonic() < self._started_s + timeout_s:
            code = self._run_command(timeout_s)
            self.findings.exits.append(code)
            self._print(f"exit code {code} at step {self.step}: {self._last_words()}")
            self._check_gone()
            if code == 0:
                break
            futile = 0 if self.step > before else futile + 1
            before = self.step
        self.findings.expect(
            self.findings.exits[-1:] == [0], "the run did not finish, by itself or by the same command"
        )
        self._print(f"attacked {len(self.findings.done)} times; {len(self._attacks)} attacks were not reached")
        self._check_end()
        return self.findings

    def _run_command(self, timeout_s: float) -> int:
        with (self.folder / "printed.log").open("ab") as printed:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "async_grpo.app.cli.main", "run", str(self._config)],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        self._print(f"started: pid {self._process.pid}")
        self._last_progress_s = time.monotonic()
        while (code := self._process.poll()) is None:
            self._observe()
            self._continue_due()
            self._attack_due()
            if time.monotonic() - self._last_progress_s > HUNG_S or time.monotonic() > self._started_s + timeout_s:
                return self._interrupt()
            time.sleep(0.05)
        return code

    def _observe(self) -> None:
        for row in self._rows.read_new_rows():
            if row.get("kind") == "step" and (row["step"] not in self._times or row["step"] == self.steps):
                self._times[row["step"]] = self._last_progress_s = time.monotonic()
        if time.monotonic() < self._next_look_s:
            return
        self._next_look_s = time.monotonic() + 0.3
        self._books.look()
        self._family.look()
        assert self._process is not None
        self._family.reap(spare=self._process.pid)

    def _attack_due(self) -> None:
        now_s = time.monotonic()
        if not self._attacks or now_s < self._next_attack_s or not self._is_due(self._attacks[0], now_s):
            return
        attack = self._attacks[0]
        chance = random.Random(f"{attack.kind}{attack.step}")
        targets = self._family.processes_of_kind(attack.kind)
        if not targets and attack.step < self.steps and now_s - self._last_progress_s < KIND_TIMEOUT_S:
            return
        if not targets:  # the end does not wait: another process in its place
            attack.kind, targets = next(
                (kind, of) for kind in chance.sample(KINDS, len(KINDS)) if (of := self._family.processes_of_kind(kind))
            )
        self._send_signal(attack, chance.choice(targets))
        self._attacks.pop(0)
        self._next_attack_s = now_s + (0.0 if attack.step == self.steps else SPACING_S)

    def _is_due(self, attack: Attack, now_s: float) -> bool:
        """True if it is time for the attack. One before the end is timed by the pace of the last steps."""
        if attack.step < self.steps or attack.after_s >= 0:
            return self.step >= attack.step and now_s >= self._times[self.step] + attack.after_s
        if self.step < 12:
            return False
        times = [self._times[step] for step in sorted(self._times)][-12:]
        pace_s = statistics.median(after - before for before, after in itertools.pairwise(times))
        return now_s >= times[-1] + (self.steps - self.step) * pace_s + attack.after_s

    def _send_signal(self, attack: Attack, target: psutil.Process) -> None:
        how = "SIGKILL" if attack.stopped_s is None else f"SIGSTOP for {attack.stopped_s:g} s"
        with contextlib.suppress(psutil.NoSuchProcess):
            target.send_signal(signal.SIGKILL if attack.stopped_s is None else signal.SIGSTOP)
            if attack.stopped_s is not None:
                self._continue_at.append((time.monotonic() + attack.stopped_s, target))
        self._last_progress_s = time.monotonic()
        self.findings.done.append(f"{attack.kind} {how}")
        self._print(f"attack {len(self.findings.done)} at step {self.step}: {how} to {attack.kind} {target.pid}")

    def _continue_due(self) -> None:
        for due in [due for due in self._continue_at if due[0] <= time.monotonic()]:
            self._continue_at.remove(due)
            with contextlib.suppress(psutil.NoSuchProcess):
                due[1].send_signal(signal.SIGCONT)

    def _interrupt(self) -> int:
        """Interrupt a hung run with Ctrl-C. Returns its exit code."""
        assert self._process is not None
        self.findings.expect(
            False, f"hung at step {self.step}: {HUNG_S:g} s without a step. It shows: {self._last_words()}"
        )
        for process in self._family.alive():
            print(f"    {describe(process)}", flush=True)
        self._process.send_signal(signal.SIGINT)
        try:
            return self._process.wait(90)
        except subprocess.TimeoutExpired:
            self.findings.expect(False, "it did not obey Ctrl-C within 90 s")
            self._process.kill()
            return self._process.wait()

    def _check_gone(self) -> None:
        assert self._process is not None
        left = self._family.wait_until_gone(self._process.pid, LEAVING_S)
        self.findings.expect(
            not left, f"orphans {LEAVING_S:g} s after the end: {[describe(process) for process in left]}"
        )
        self._family.end(left)
        self._continue_at.clear()

    def _check_end(self) -> None:
        expect = self.findings.expect
        files = self._family.left_in_shared_memory(NAME)
        expect(not files, f"left in /dev/shm: {files}")
        outside = sorted({host for host, _ in self._family.listened if host not in ("127.0.0.1", "::1")})
        expect(not outside, f"listened beyond the loopback: {outside}")
        if self._outside_server is not None:
            connections = self._books.connections_of_others()
            expect(not connections, f"connections left on the server: {connections}")
            self._print(f"at most {self._books.most_connections} connections to the server at a time")
        if (self.run_dir / "summary.json").exists():
            asyncio.run(self._books.check())
        self._print(f"the groups of {len(self._books.batches)} of {self.steps} steps were seen in the buffer's log")

    def _last_words(self) -> str:
        lines = (self.folder / "printed.log").read_text(errors="replace").splitlines()
        return " / ".join(line.strip()[:300] for line in lines[-2:])

    def _print(self, text: str) -> None:
        print(f"{time.monotonic() - self._started_s:6.1f} s  {text}", flush=True)


def main() -> int:
    """Attack one run and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, default=170)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--last-seconds", action="store_true")
    parser.add_argument("--folder", type=Path, help="of the run; a new one by default, kept if something is wrong")
    parser.add_argument("--timeout-s", type=float, default=1800.0)
    parser.add_argument("--wild-workflow", action="store_true", help="a workflow that misbehaves in 2%% of its samples")
    parser.add_argument("--outside-server", action="store_true", help="a Valkey that is not attacked")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="attack-"))
    folder.mkdir(parents=True, exist_ok=True)
    server = EmbeddedServer(folder / "server", RedisConfig()) if options.outside_server else None
    if server is not None:
        server.start()
    kinds = [kind for kind in KINDS if kind != "redis" or server is None]
    attacks = plan(
        options.seed,
        steps=options.steps,
        attacks=options.kills,
        last_seconds=options.last_seconds,
        kinds_to_attack=kinds,
    )
    run = AttackedRun(
        folder,
        attacks,
        steps=options.steps,
        servers=options.servers,
        workflow="tests.support.wild_workflows:WildWorkflow" if options.wild_workflow else "single_turn",
        outside_server=server,
    )
    found = run.go(options.timeout_s)
    if server is not None:
        server.stop()
    print(f"seed {options.seed}: exit codes {found.exits}, {len(found.problems)} problems; {folder}")
    if not found.problems and options.folder is None:
        shutil.rmtree(folder)
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
