"""Writes the folders of simulated runs: the files that a real run would leave about its speed, with known timings."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from async_grpo.config import validate
from async_grpo.lab.simulate.buffer import SimulatedBuffer, TicketWaiter
from async_grpo.lab.simulate.context import SimulationContext
from async_grpo.lab.simulate.engine import SimulatedSample
from async_grpo.lab.simulate.group import SimulatedGroup
from async_grpo.lab.simulate.recorded import RecordedRun, read_recorded
from async_grpo.lab.simulate.server import SimulatedServer
from async_grpo.lab.simulate.settings import SimulatedSettings
from async_grpo.lab.simulate.simulation import Simulation
from async_grpo.lab.simulate.timings import Timings
from async_grpo.wire import Batch, Ticket

Row = dict[str, Any]
GROUPS = 8
SIZE = 8
PLAIN: dict[str, Any] = {
    "steps": 40,
    "group_size": SIZE,
    "groups_per_step": GROUPS,
    "model": {"random": {}},
    "data": {"kind": "arithmetic"},
    "sampling": {"max_tokens": 200},
    "rollout": {"max_concurrency": 64},
}


class RecordingBuffer(SimulatedBuffer):
    """A simulated buffer that records ticket waits, groups, and the number of waiting tasks after each step."""

    def __init__(self, context: SimulationContext) -> None:
        super().__init__(context)
        self.spans: dict[str, list[Row]] = defaultdict(list)
        """Timeline spans by server name."""
        self.waiting_tasks: list[int] = []
        self.first_start_s: dict[int, float] = {}
        """Time at which the first sample of each group started, by sequence number."""
        self.last_end_s: dict[int, float] = {}
        """Time at which the last sample of each group ended."""
        self._requested_s: dict[str, float] = {}

    def admit_groups(self, server: TicketWaiter, limit: int, slots: int) -> list[Ticket]:
        tickets = super().admit_groups(server, limit, slots)
        now_s = self._context.events.now_s
        call_s = self._context.timings.engine.call_s
        if not tickets:
            self._requested_s.setdefault(server.name, now_s)
        elif server.name in self._requested_s:
            _add_span(self.spans[server.name], "wait", "ticket", self._requested_s.pop(server.name), now_s + call_s, {})
        return tickets

    def end_group(self, group: SimulatedGroup) -> None:
        assert group.ticket is not None
        now_s = self._context.events.now_s
        began_s = group.admitted_s + self._context.timings.engine.call_s
        args = {
            "version": group.ticket.version,
            "lengths": [round(sample.generated_tokens) for sample in group.samples],
            "queued_s": max(0.0, self.first_start_s[group.seq] - began_s),
            "judged_s": now_s - self.last_end_s[group.seq],
        }
        _add_span(self.spans[group.ticket.holder], "generation", f"group {group.seq}", began_s, now_s, args)
        super().end_group(group)

    def release_batch(self, batch: Batch) -> None:
        super().release_batch(batch)
        self.waiting_tasks.append(len(self.state.tasks))


class RecordedSimulation(Simulation):
    """A simulated run that records what a real one writes to its timeline and metrics.

    `slow`: factor by which the last server's engine is slower.
    """

    buffer: RecordingBuffer

    def __init__(self, settings: SimulatedSettings, timings: Timings, *, slow: float = 1.0) -> None:
        super().__init__(settings, timings, seed=3, buffer_class=RecordingBuffer)
        self.events = self.context.events
        self.train: list[Row] = []
        self._computing_since = 0.0
        for server in self.servers:
            self._watch_server(server)
        self._watch_trainer()
        self.servers[-1].engine.set_slowdown(0.0, slow)

    def write(self, folder: Path, config: str) -> RecordedRun:
        """Write the folder and read it back."""
        (folder / "timeline").mkdir(parents=True)
        (folder / "config.yaml").write_text(config)
        _write(folder / "timeline" / "trainer.jsonl", [*self.train, *self._waits()])
        for name, spans in self.buffer.spans.items():
            _write(folder / "timeline" / f"{name}.jsonl", spans)
        _write(folder / "metrics.jsonl", [self._row(index) for index in range(len(self.trainer.steps))])
        return read_recorded(folder)

    def _row(self, index: int) -> Row:
        row = self.trainer.steps[index]
        timings = self.context.timings
        settings = self.context.settings
        saves = settings.checkpoint_steps and index and index % settings.checkpoint_steps == 0
        saved_s = timings.trainer.checkpoint_s if saves else 0.0
        wait_s = row.wait_s + timings.trainer.take_s
        return {
            "kind": "step",
            "step": row.version + 1,
            "version": row.version,
            "time_s": row.ended_s,
            "step_s": row.step_s,
            "wait_s": wait_s,
            "publish_s": timings.sync.stall_s,
            "checkpoint_s": saved_s,
            "train_s": row.step_s - wait_s - timings.sync.stall_s - saved_s,
            "groups": GROUPS,
            "age_mean": sum(age * tokens for age, tokens in row.ages.items()) / sum(row.ages.values()),
            "trained_tokens": round(row.tokens),
            "read_tokens": round(row.tokens + (timings.prompt_tokens - 1) * GROUPS * SIZE),
            "completion_tokens_mean": row.tokens / GROUPS / SIZE,
            "buffer_groups": {"waiting": self.buffer.waiting_tasks[index]},
        }

    def _waits(self) -> list[Row]:
        """Waits of the trainer: from the end of a publication or checkpoint until it computes."""
        waits: list[Row] = []
        trains = [span for span in self.train if span["name"] == "train"]
        ends = [row.ended_s for row in self.trainer.steps]
        for end, train in zip(ends, trains[1:], strict=False):
            _add_span(waits, "trainer", "wait", min(end, train["start_s"]), train["start_s"], {})
        return waits

    def _watch_trainer(self) -> None:
        publish_version = self.trainer.publish_version
        update_engine_speed = self.processors.update_engine_speed

        def watched_publish(version: int) -> None:
            now_s = self.events.now_s
            stall_s = self.context.timings.sync.stall_s
            _add_span(self.train, "trainer", "publish", now_s - stall_s, now_s, {"version": version})
            publish_version(version)

        def watched_computing(computing: bool) -> None:
            if computing:
                self._computing_since = self.events.now_s
            else:
                _add_span(self.train, "trainer", "train", self._computing_since, self.events.now_s, {})
            update_engine_speed(computing)

        self.trainer.publish_version = watched_publish
        self.processors.update_engine_speed = watched_computing

    def _watch_server(self, server: SimulatedServer) -> None:
        start_sample = server.engine.start_sample
        load_weights = server.engine.load_weights
        queue_for_verifiers = server._queue_for_verifiers
        start_due_evaluation = server._start_due_evaluation
        unpin_version = server._unpin_version
        spans = self.buffer.spans
        pinned_s: list[float] = []

        def watched_start(now_s: float, sample: SimulatedSample, *, prompt: float) -> None:
            if isinstance(sample.group, SimulatedGroup):
                self.buffer.first_start_s.setdefault(sample.group.seq, now_s)
            start_sample(now_s, sample, prompt=prompt)

        def watched_load(now_s: float, version: int, load_s: float, *, encode_again: bool = False) -> float:
            done_s = load_weights(now_s, version, load_s, encode_again=encode_again)
            _add_span(spans[server.name], "weights", f"version {version}", now_s, done_s, {})
            return done_s

        def watched_judging(samples: int) -> float:
            for seq, group in server.groups.items():
                if not group.unfinished_samples:
                    self.buffer.last_end_s.setdefault(seq, self.events.now_s)
            return queue_for_verifiers(samples)

        def watched_evaluation() -> None:
            start_due_evaluation()
            if server._is_version_pinned:
                pinned_s.append(self.events.now_s)

        def watched_unpin() -> None:
            _add_span(spans[server.name], "evaluation", "version", pinned_s.pop(), self.events.now_s, {})
            unpin_version()

        replaced: list[tuple[object, str, Callable[..., Any]]] = [
            (server.engine, "start_sample", watched_start),
            (server.engine, "load_weights", watched_load),
            (server, "_queue_for_verifiers", watched_judging),
            (server, "_start_due_evaluation", watched_evaluation),
            (server, "_unpin_version", watched_unpin),
        ]
        for owner, name, function in replaced:
            setattr(owner, name, function)


def _add_span(rows: list[Row], track: str, name: str, begin: float, end: float, args: dict[str, Any]) -> None:
    rows.append({"track": track, "name": name, "start_s": begin, "end_s": end, "args": args})


def settings_of(folder: Path, max_staleness: int, **changed: Any) -> tuple[SimulatedSettings, str]:
    """The settings of a run of 40 steps of 8 groups of 8 samples, and its configuration as text."""
    own = {"name": f"run-{max_staleness}", "runs_dir": str(folder), "max_staleness": max_staleness}
    plain = {**PLAIN, **changed, **own}
    return SimulatedSettings.from_config(validate(plain, source="a test")), json.dumps(plain)


def recorded_run(
    folder: Path, max_staleness: int, timings: Timings, *, slow: float = 1.0, **changed: Any
) -> RecordedRun:
    """Simulate a run, write its folder, and read it back."""
    settings, config = settings_of(folder, max_staleness, **changed)
    simulation = RecordedSimulation(settings, timings, slow=slow)
    simulation.run()
    return simulation.write(folder / f"run-{max_staleness}", config)


def _write(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
