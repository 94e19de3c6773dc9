"""Fake points, their metrics, and the folders that such runs leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from async_grpo.config import RunConfig
from async_grpo.lab.sweep.plan import Point
from async_grpo.lab.sweep.results import FINISHED, Curve, PointMetrics
from async_grpo.telemetry.jsonl import JsonLines
from async_grpo.telemetry.timeline import Timeline

STEPS = 20


def point(runs_dir: Path, name: str = "p", *, seed: int = 1, **changes: Any) -> Point:
    """A run with a tiny random policy."""
    raw = {"name": name, "runs_dir": str(runs_dir), "model": {"random": {}}, "steps": STEPS, "seed": seed, **changes}
    values = {key: str(value) for key, value in changes.items()}
    return Point(values, RunConfig.model_validate(raw))


def figures(staleness: int, seed: int = 1, **changes: Any) -> PointMetrics:
    """Metrics of a finished run that learned well."""
    fields: dict[str, Any] = {
        "name": f"s{staleness}-{seed}",
        "values": {"max_staleness": str(staleness)},
        "seed": seed,
        "state": FINISHED,
        "steps_done": STEPS,
        "steps": STEPS,
        "accuracy_before": 0.4,
        "accuracy_after": 0.9,
        "eval_prompts": 256,
        "reward_mean": 0.7,
        "samples_per_s": 10.0,
        "age_max": staleness,
        "age_bound": staleness,
        "balanced": True,
        "curve": Curve(steps=[1, 2], seconds=[1.0, 2.0], reward=[0.4, 0.6]),
    }
    return PointMetrics(**{**fields, **changes})


def leave_run(made: Point, *, accuracy: float, step_s: float, steps: int = STEPS, finished: bool = True) -> None:
    """Write the files of a run of `steps` steps of `step_s` seconds, a quarter of which it waited."""
    folder = made.config.run_dir
    with JsonLines(folder / "metrics.jsonl") as metrics:
        for step in range(1, steps + 1):
            metrics.write(_step(step, step_s, accuracy))
    trainer = Timeline(folder / "timeline" / "trainer.jsonl", "trainer")
    server = _server(folder)
    trainer.span("trainer", "start", 0.0, 100.0)
    for step in range(steps):
        begin_s = 100.0 + step * step_s
        trainer.span("trainer", "wait", begin_s, begin_s + step_s / 4)
        trainer.span("trainer", "train", begin_s + step_s / 4, begin_s + step_s)
        server.span("generation", f"group {step}", begin_s, begin_s + step_s / 2)
    if finished:
        (folder / "summary.json").write_text(json.dumps(_summary(made, accuracy, steps * step_s)))
        (folder / "run.json").write_text(json.dumps({"wall_s": steps * step_s + 30, "finished_steps": steps}))


def _server(folder: Path) -> Timeline:
    return Timeline(folder / "timeline" / "rollout-0.jsonl", "rollout-0")


def _step(step: int, step_s: float, accuracy: float) -> dict[str, Any]:
    return {
        "kind": "step",
        "step": step,
        "reward_mean": accuracy * step / STEPS,
        "time_s": 100.0 + step * step_s,
        "step_s": step_s,
        "wait_s": step_s / 4,
        "train_s": step_s * 3 / 4,
        "groups": 16,
        "trained_tokens": 1000,
        "ess": 0.9,
        "clip_fraction": 0.01,
    }


def _summary(made: Point, accuracy: float, spent_s: float) -> dict[str, Any]:
    return {
        "name": made.name,
        "accuracy_before": 0.4,
        "accuracy_after": accuracy,
        "reward_first": 0.1,
        "reward_last": accuracy,
        "wall_s": spent_s + 30,
        "mean_age": 0.5,
        "max_age": made.config.max_staleness,
        "age_bound": made.config.max_staleness,
        "logprob_gap_mean": 1e-6,
        "logprob_gap_max": 1e-5,
        "balanced": True,
        "evaluations": [
            {"version": version, "prompts": 256, "samples": 4, "sampled_accuracy": share}
            for version, share in ((0, 0.4), (STEPS // 2, accuracy), (STEPS, accuracy))
        ],
    }
