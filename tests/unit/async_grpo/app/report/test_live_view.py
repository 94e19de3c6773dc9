"""The live view: its panel, its log lines, and how often a line is printed."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from async_grpo.app.report.live_state import LiveState, RoleState, describe_current_wait
from async_grpo.app.report.live_view import LiveView
from async_grpo.config import RunConfig
from async_grpo.utils.text import sparkline
from async_grpo.wire.board import Estimate, EvalMetrics, Evaluation, EvaluationState, ServerBeat

CONFIG = RunConfig.model_validate({"name": "demo", "model": {"random": {}}, "steps": 120})


def server(name: str = "rollout-0", **fields: Any) -> ServerBeat:
    return ServerBeat(**{"name": name, "pid": 1, "version": 48, "running": 64, "tokens_per_s": 1520.0, **fields})


def state(**changes: Any) -> LiveState:
    row = {
        "step": 48,
        "reward_mean": 0.512,
        "reward_std": 0.31,
        "age_max": 2,
        "age_mean": 0.8,
        "trained_tokens": 2600,
        "step_s": 2.0,
        "wait_s": 0.5,
        "train_s": 1.2,
        "logprob_gap_mean": 2e-6,
        "logprob_gap_max": 1e-5,
        "gap_tokens": 1300,
    }
    evaluations = [
        Evaluation(version=0, prompts=256, samples=4, sampled_accuracy=0.125, greedy_accuracy=0.14),
        Evaluation(version=40, prompts=256, samples=4, sampled_accuracy=0.47, greedy_accuracy=0.51),
    ]
    base = LiveState(
        step=row,
        steps_done=48,
        evaluations=evaluations,
        waiting=120,
        inflight=28,
        ready=3,
        taken=0,
        active=31,
        capacity=48,
        servers=[server()],
        roles=[RoleState("trainer", "running"), RoleState("rollout-0", "running", restarts=1)],
        elapsed_s=130.0,
    )
    return replace(base, **changes)


IDLE = {"running": 0, "waiting_for": "the staleness window"}
EVALUATING = {"evaluation": EvaluationState(version=0, done=512, total=1280, left_s=3.2)}
LOADING = RoleState("rollout-0", "starting", stage="loading the model", since_s=8.2, usual_s=14.0)
ROLLOUT_1 = server("rollout-1")
FINISHED = [RoleState("trainer", "finished"), RoleState("rollout-0", "running")]
FULL_WINDOW = {"taken": 16, "active": 48}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "the trainer waits for rollout-0: 3 of 16 groups are ready"),
        ({"servers": [server(), ROLLOUT_1]}, "the trainer waits for rollout-0, rollout-1: 3 of 16 groups are ready"),
        ({**FULL_WINDOW, "servers": [server(**IDLE)]}, "rollout-0 waits for the trainer: the staleness window is full"),
        (
            {**FULL_WINDOW, "servers": [server(**IDLE), server("rollout-1", **IDLE)]},
            "rollout-0, rollout-1 wait for the trainer: the staleness window is full",
        ),
        ({"taken": 16, "servers": [server(waiting_for="tasks")]}, "rollout-0 waits for tasks"),
        ({"taken": 16}, "nobody: training and generation overlap"),
        (
            {"taken": 16, "servers": [server(waiting_for="weights", **EVALUATING)]},
            "the trainer is training; rollout-0 evaluates version 0: 512 of 1,280 completions, 3 s left",
        ),
        ({"ready": 20}, "the trainer waits for the groups that are next in line; 20 others are ready"),
        ({"ready": 20, "inflight": 0}, "the rollout servers wait for the trainer: 20 groups are ready, none is taken"),
        ({"servers": []}, "the trainer waits for a rollout server; none has reported"),
        ({"servers": [server(running=0)]}, "the trainer waits for groups: 3 of 16 are ready, 28 are being made"),
        (
            {"ready": 0, "servers": [server(running=0, **EVALUATING)]},
            "the trainer waits: rollout-0 evaluates version 0: 512 of 1,280 completions, 3 s left",
        ),
        (
            {"servers": [server(running=0, waiting_for="weights")]},
            "rollout-0 waits for weights, and the trainer for its groups",
        ),
        ({"roles": [RoleState("trainer", "restarting")]}, "starting trainer"),
        ({"roles": FINISHED, "servers": []}, "nobody: the trainer has finished"),
        (
            {"roles": FINISHED, "servers": [server(**EVALUATING)]},
            "the end of the run waits: rollout-0 evaluates version 0: 512 of 1,280 completions, 3 s left",
        ),
        (
            {"roles": [RoleState("trainer", "running"), LOADING]},
            "starting rollout-0 (loading the model, 8 s, last time 14 s)",
        ),
    ],
)
def test_the_current_wait_is_described(changes: dict[str, Any], sentence: str) -> None:
    assert describe_current_wait(state(**changes), groups_per_step=16) == sentence


def make_terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=110, record=True)


def test_a_terminal_shows_every_fact_of_the_run() -> None:
    console = make_terminal()
    with LiveView(CONFIG, console) as view:
        view.update(state())
    text = console.export_text()
    for fact in (
        "48 of 120",
        "2:24 left",
        "0.512 ± 0.31",
        "12.5% -> 47.0% (v40), greedy 51.0%",
        "max 2 of S = 2",
        "31/48   28 in flight, 3 ready, 0 taken, 120 tasks left",
        "generate 1,520 tok/s, train 1,300 tok/s",
        "mean 2.0e-06, max 1.0e-05 over 1,300 tokens",
        "train 60%",
        "the trainer waits for rollout-0: 3 of 16",
        "max_staleness 2, 16 groups of 8 per step   2:10",
        "✓ learning: held-out accuracy rose: 12.5% → 47.0%",
        "! fast: 1,300 tokens/s, trainer waits 25%",
        "! sound: 1 restart",
        "rollout-0 running v48, 64 running, 1 restart",
    ):
        assert fact in text


@pytest.mark.parametrize("width", [80, 200])
def test_the_panel_fills_the_terminal_and_cuts_nothing(width: int) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, record=True)
    servers = [server(f"rollout-{index}", **EVALUATING) for index in range(4)]
    with LiveView(CONFIG, console) as view:
        view.update(state(servers=servers, roles=[RoleState(name, "running") for name in ("trainer", "rollout-3")]))
    lines = console.export_text().splitlines()
    assert {len(line) for line in lines} == {width}
    assert "…" not in "".join(lines)
    assert "3 ready, 0 taken, 120 tasks left" in " ".join(" ".join(lines).replace("│", " ").split())


def render_plain(view: LiveView) -> str:
    """Return the panel without colours."""
    console = make_terminal()
    console.print(view.render())
    return console.export_text()


def render_styled(view: LiveView) -> str:
    """Return the panel with its colours as escape sequences."""
    console = make_terminal()
    console.print(view.render())
    return console.export_text(styles=True)


def test_a_phase_is_shown_until_the_next_step() -> None:
    view = LiveView(CONFIG, make_terminal())
    view.show_phase("preparing the model")
    assert "preparing the model" in render_styled(view)
    view.update(state(step={"step": 1}))
    view.show_phase("evaluating")
    view.update(state(step={"step": 1}))
    assert "evaluating" in render_styled(view)
    view.update(state(step={"step": 2}))
    assert "evaluating" not in render_styled(view)


def test_a_starting_role_shows_its_stage_and_seconds() -> None:
    view = LiveView(CONFIG, make_terminal())
    view.update(state(step=None, servers=[], roles=[RoleState("trainer", "running"), LOADING]))
    lines = [" ".join(line.split()) for line in render_plain(view).splitlines()]
    assert "│ roles ● trainer running │" in lines
    assert "│ ● rollout-0 starting: loading the model, 8 s, last time 14 s │" in lines


def test_a_run_without_steps_is_shown_and_a_broken_bound_is_red() -> None:
    view = LiveView(CONFIG, make_terminal())
    view.update(LiveState())
    assert "0 of 120" in render_styled(view) and "not measured yet" in render_styled(view)
    view.update(state(step={"step": 1, "age_max": 3}))
    assert "\x1b[31mmax 3 of S = 2" in render_styled(view)
    assert "no token of age 0 in the last step" in render_styled(view)


def test_a_message_stays_above_the_panel() -> None:
    console = make_terminal()
    with LiveView(CONFIG, console) as view:
        view.print_message("rollout-0 was killed; restart [1] of 3")
        view.update(state())
    assert "rollout-0 was killed; restart [1] of 3\n" in console.export_text()


def test_a_pipe_gets_a_line_per_interval_and_the_last_state() -> None:
    file = io.StringIO()
    with LiveView(CONFIG, Console(file=file, width=80), every_s=10.0) as view:
        view.show_phase("starting [rollout-0]")
        for second in range(26):
            view.update(state(elapsed_s=100.0 + second))
    lines = file.getvalue().splitlines()
    assert lines[0] == "starting [rollout-0]"
    assert lines[1].startswith("legend") and "gap = " in lines[1], "abbreviations are explained once"
    assert [line.split()[0] for line in lines[2:]] == ["[1:40]", "[1:50]", "[2:00]", "[2:05]"]
    assert lines[2] == (
        "[1:40] step 48/120 | reward 0.512 | accuracy 12.5% -> 47.0% (v40), greedy 51.0% | age 2/2 | buffer 31/48 | "
        "generate 1,520 tok/s, train 1,300 tok/s | gap 2.0e-06 | the trainer waits for rollout-0: 3 of 16 groups are "
        "ready | 2:24 left"
    )


def test_graded_answers_are_shown_as_held_out_reward() -> None:
    mean, once = Estimate(0.35, 0.3, 0.4), Estimate(0.2, 0.1, 0.3)
    figures = EvalMetrics(prompts=9, completions=36, mean=mean, pass_at={"1": once})
    graded = Evaluation(version=0, prompts=9, samples=4, sampled_accuracy=0.35, figures=figures)
    file = io.StringIO()
    with LiveView(CONFIG, Console(file=file, width=80), every_s=10.0) as view:
        view.update(state(evaluations=[graded]))
    assert "| held-out reward 0.350 |" in file.getvalue()


def test_a_pipe_gets_a_line_per_step_at_most_one_per_second() -> None:
    file = io.StringIO()
    with LiveView(CONFIG, Console(file=file, width=80)) as view:
        view.update(state(step=None, steps_done=0, elapsed_s=1.0, roles=[replace(LOADING, stage="importing")]))
        view.update(state(step=None, steps_done=0, elapsed_s=3.0, roles=[replace(LOADING, since_s=10.0)]))
        for tenth in range(25):  # ten steps per second
            view.update(state(step={"step": 1 + tenth}, steps_done=1 + tenth, elapsed_s=4.0 + tenth / 10))
    assert [line.partition(" | ")[0] for line in file.getvalue().splitlines()] == [
        "[0:01] step 0/120",
        "[0:03] step 0/120",
        "legend of the lines below: reward = mean of the step",
        "[0:04] step 1/120",
        "[0:05] step 11/120",
        "[0:06] step 21/120",
        "[0:06] step 25/120",  # the last state
    ]
    assert file.getvalue().splitlines()[1].endswith("starting rollout-0 (loading the model, 10 s, last time 14 s)")


def test_the_remaining_time_follows_the_recent_steps() -> None:
    file = io.StringIO()
    with LiveView(CONFIG, Console(file=file, width=80)) as view:
        for step, step_s in ((47, 4.0), (48, 2.0), (48, 2.0)):
            view.update(state(step={"step": step, "step_s": step_s}))
    assert "3:36 left" not in file.getvalue().splitlines()[1]
    assert file.getvalue().splitlines()[-1].endswith("3:36 left")


@pytest.mark.parametrize(
    "changes",
    [
        {"servers": []},
        {"roles": [RoleState("trainer", "restarting"), RoleState("rollout-0", "running")]},
        {"steps_done": 120},  # the last evaluation is still running
    ],
)
def test_no_remaining_time_is_shown_while_no_step_can_end(changes: dict[str, Any]) -> None:
    file = io.StringIO()
    with LiveView(CONFIG, Console(file=file, width=80)) as view:
        view.update(state(**changes))
    assert " left" not in file.getvalue().splitlines()[-1]


def test_the_last_state_is_printed_before_the_report_message() -> None:
    file = io.StringIO()
    with LiveView(CONFIG, Console(file=file, width=80)) as view:
        view.update(state())
        view.update(state(elapsed_s=130.5))
        view.print_last_state()
        view.print_message("report: report.md")
    assert file.getvalue().splitlines()[-1] == "report: report.md"


def test_json_lines_have_a_level_and_the_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ASYNC_GRPO_LOG_FORMAT", "json")
    monkeypatch.setenv("ASYNC_GRPO_LOG_FIELDS", "{}")  # restored afterwards
    monkeypatch.setattr("async_grpo.telemetry.logging._redirect_other_output", lambda: None)
    view = LiveView(CONFIG, Console(file=io.StringIO(), width=80))
    view.update(state())
    view.warn("rollout-0 was killed", failed_role="rollout-0", signal="SIGKILL", restart=1, restart_limit=3)
    progress, death = (json.loads(text) for text in capsys.readouterr().err.splitlines())
    shown = {"level": "info", "kind": "progress", "step": 48, "steps": 120, "reward_mean": 0.512, "age_max": 2}
    assert progress.items() >= {**shown, "generated_tokens_per_s": 1520.0, "eta_s": 144.0}.items()
    assert death.items() >= {"level": "warning", "failed_role": "rollout-0", "signal": "SIGKILL", "restart": 1}.items()


def test_a_sparkline_spans_lowest_to_highest() -> None:
    assert sparkline([0, 1, 2, 3], 8) == "▁▃▆█"
    assert sparkline([1.0] * 3, 8) == "▁▁▁"
    assert sparkline([], 8) == ""
    assert len(sparkline(list(range(1000)), 24)) == 24
