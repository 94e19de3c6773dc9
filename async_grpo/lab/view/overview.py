"""The overview of a run: the verdict, its progress while it is live, what to do next, and the settings that matter.

StepColumns, evaluations, summary.json --> verdict, progress, suggestion     with the first request
timeline/, metrics.jsonl               --> the advice of `async-grpo why`    with a second one, after the first paint
"""

from __future__ import annotations

import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from async_grpo.app.report.summary import name_held_out_score
from async_grpo.app.runs.run import Run, RunStatus
from async_grpo.config.explain import list_changed_settings
from async_grpo.errors import AsyncGrpoError
from async_grpo.lab.simulate.recorded import read_recorded
from async_grpo.lab.simulate.why import explain_run
from async_grpo.lab.view.columns import StepColumns
from async_grpo.telemetry.bottleneck import ADVICE, describe_bottleneck
from async_grpo.telemetry.charts import ROLLOUT_IDLE
from async_grpo.telemetry.rows import Facts, count_warmup_steps, rate
from async_grpo.telemetry.verdict import judge_run, suggest_next_step, training_reward

RECENT_STEPS = 20
"""Steps that predict the remaining time and show the present waits of a live run."""
MIN_SILENCE_S = 10.0
SILENT_STEPS = 3.0
"""A live run is silent when its newest step is older than MIN_SILENCE_S and SILENT_STEPS times the slowest recent step.
Its remaining time is unknown then."""
MAX_EXPLAINED_BYTES = 64 << 20
"""Largest timeline that is read for the advice of `why`. Larger ones would keep a request for minutes."""


def make_overview(run: Run, columns: StepColumns, entry: Facts, settings: Facts) -> Facts:
    """Return verdict, suggestion, progress and settings. `entry`: the run's entry in the list."""
    is_live = entry["status"] == RunStatus.LIVE
    facts = run.written_summary()
    # A resumed run that was killed has the summary of its earlier invocation.
    is_complete = int(facts.get("steps") or 0) >= len(columns)
    if is_live or not facts or not is_complete:
        facts = measure_columns(columns, run.evaluations(), entry)
    answers = judge_run(facts, warnings=len(columns.warnings))
    changed = [asdict(setting) for setting in list_changed_settings(settings) if setting.key != "name"]
    return {
        "verdict": [asdict(answer) for answer in answers],
        "suggestion": suggest_next_step(facts, answers, str(run.path)),
        "progress": measure_progress(columns, entry["steps"], time.time()) if is_live else None,
        "restarts": facts.get("restarts") or {},
        "settings": settings,
        "changed_settings": changed,
    }


def measure_columns(columns: StepColumns, evaluations: list[Facts], entry: Facts) -> Facts:
    """Return the metrics of `judge_run` for a run without a complete summary.json, under the same keys."""
    with columns.lock:
        rewards = columns.column("reward_mean")
        gaps = columns.column("logprob_gap_mean")
        weights = columns.column("gap_tokens")
        steps = len(columns)
    first = count_warmup_steps(steps, entry["max_staleness"] if isinstance(entry["max_staleness"], int) else 0)
    trainer_idle, rollout_idle = idle_shares(columns, first)
    return {
        "steps": steps,
        "held_out_score": name_held_out_score(evaluations),
        "evaluations": evaluations,
        **training_reward(rewards[~np.isnan(rewards)].tolist()),
        "tokens_per_s": entry["tokens_per_s"],
        "trainer_idle": trainer_idle,
        "rollout_idle": rollout_idle,
        "bottleneck": describe_bottleneck(trainer_idle, rollout_idle),
        "max_age": entry["age_max"],
        "age_bound": entry["age_bound"],
        "logprob_gap_mean": rate(float(np.nansum(gaps * weights)), float(np.nansum(weights[~np.isnan(gaps)]))),
    }


def idle_shares(columns: StepColumns, first: int) -> tuple[float | None, float | None]:
    """Return the idle shares of trainer and servers from step index `first` on; None for an unknown share."""
    with columns.lock:
        step_s = columns.column("step_s")[first:]
        wait_s = columns.column("wait_s")[first:]
        rollout = columns.column(ROLLOUT_IDLE)[first:]
    total_s = float(np.nansum(step_s))
    is_known = ~np.isnan(rollout)
    trainer_idle = None if np.isnan(wait_s).all() else rate(float(np.nansum(wait_s)), total_s)
    if not is_known.any():
        return trainer_idle, None
    return trainer_idle, rate(float((rollout * step_s)[is_known].sum()), float(step_s[is_known].sum()))


def measure_progress(columns: StepColumns, steps: Any, now_s: float) -> Facts:
    """Return the remaining seconds of a live run, the seconds since its newest step if that is unusual, and the waits
    of its recent steps."""
    with columns.lock:
        step_s = columns.column("step_s")[-RECENT_STEPS:]
        times = columns.column("time_s")
        done = columns.last_value("step") or 0
        first = max(0, len(columns) - RECENT_STEPS)
    if not len(times) or np.isnan(step_s).all():
        return {"left_s": None, "silent_s": None, "waits": ""}

    silent_s = max(0.0, now_s - float(times[-1]))
    is_silent = silent_s > max(MIN_SILENCE_S, SILENT_STEPS * float(np.nanmax(step_s)))
    left = steps - done if isinstance(steps, int) else 0
    return {
        "left_s": float(np.nanmean(step_s)) * left if left > 0 and not is_silent else None,
        "silent_s": silent_s if is_silent else None,
        "waits": describe_bottleneck(*idle_shares(columns, first)),
    }


class AdviceCache:
    """The advice of `async-grpo why` for one run, computed again when its files have changed. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._fingerprint: Any = None
        self._advice: Facts = {}

    def advise(self, fingerprint: Any, *, is_live: bool) -> Facts:
        """Return `cause`, its share of the time and `advice`; of the recent steps if the run is live.

        Returns {} with a `note` if the run cannot be explained.
        """
        with self._lock:
            if fingerprint != self._fingerprint:
                self._advice = self._explain(RECENT_STEPS if is_live else None)
                self._fingerprint = fingerprint
            return self._advice

    def _explain(self, last: int | None) -> Facts:
        size_bytes = sum(file.stat().st_size for file in (self._path / "timeline").glob("*.jsonl"))
        if size_bytes > MAX_EXPLAINED_BYTES:
            return {"note": f"`async-grpo why {self._path}` names the cause; this run is too long to do it here."}
        try:
            explanation = explain_run(read_recorded(self._path), last=last)
        except (AsyncGrpoError, OSError):
            return {"note": ""}  # too few steps, or a configuration of another release
        advice = ADVICE[explanation.cause]
        return {
            "cause": explanation.cause.value,
            "share": explanation.share,
            "advice": f"{advice[0].upper()}{advice[1:]}.",
            "steps": last,
        }
