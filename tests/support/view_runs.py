"""Run folders for the page: samples, a timeline and metrics, with texts that would run if they were markup."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from async_grpo.telemetry.jsonl import JsonLines

HOSTILE = "<script>alert('ran')</script><img src=x onerror=alert('ran')> \u202etxt.exe\x1b[31m"
STARTED_S = 1.7e9
WORDS = ("<think>", " so", " 1", " +", " 2", " =", " 3", "</think>", "\n", "<answer>", "3", "</answer>")


def sample_row(seq: int, *, size: int = 4, tokens: int = 24, text: str = "") -> dict[str, Any]:
    """A group with tokens of two versions; its first completion begins with `text`."""
    rng = random.Random(seq)
    version = 1 + seq // 4
    completions = []
    for place in range(size):
        pieces = [*([text] if text and place == 0 else []), *rng.choices(WORDS, k=tokens)][:tokens]
        completions.append(
            {
                "text": "".join(pieces),
                "reward": None if text and place == 1 else float(place % 2),
                "rewards": {text or "answer_tag": float(place % 2)},
                "unverifiable": f"crash: {text}" if text and place == 1 else "",
                "finish_reason": ("stop", "length")[place % 2],
                "spans": [[version - 1, 0, tokens // 2], [version, tokens // 2, tokens]],
                "age": 1,
                "pieces": pieces,
                "logprobs": [round(-rng.expovariate(2), 4) for _ in pieces],
            }
        )
    facts = {"admitted_version": version - 1, "inserted_version": version, "attempt": 1, "server": "rollout-0"}
    prompt = text or f"{seq}+1="
    return {"seq": seq, "prompt": prompt, "answer": text or str(seq + 1), "time_s": STARTED_S + seq, **facts} | {
        "completions": completions
    }


def write_samples(run_dir: Path, rows: list[dict[str, Any]]) -> None:
    """Append the rows to the samples of rollout-0."""
    with JsonLines(run_dir / "samples" / "rollout-0.jsonl") as file:
        for row in rows:
            file.write(row)


def write_run(run_dir: Path, *, groups: int = 40) -> Path:
    """A run with a hostile group (the newest one), in which step s has trained groups 4 (s - 2) to 4 (s - 1) - 1."""
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text(f"name: {run_dir.name!r}\nsteps: 10\nmax_staleness: 2\n")
    write_samples(run_dir, [sample_row(seq) for seq in range(groups)])
    write_samples(run_dir, [sample_row(groups, text=HOSTILE)])
    with JsonLines(run_dir / "trained.jsonl") as file:
        for step in range(2, groups // 4 + 2):
            seqs = range(4 * (step - 2), 4 * (step - 1))
            advantages = {str(seq): [-0.5, 0.5, -0.5, 0.5] for seq in seqs}
            file.write({"step": step, "skipped": False, "mask_below": 0, "groups": advantages})
    write_metrics(run_dir, range(1, 11))
    write_timeline(run_dir)
    return run_dir


def write_metrics(run_dir: Path, steps: range) -> None:
    """Append a row of each step, and a hostile warning."""
    with JsonLines(run_dir / "metrics.jsonl") as file:
        for step in steps:
            row = {
                "kind": "step",
                "step": step,
                "version": step - 1,
                "time_s": STARTED_S + step,
                "reward_mean": step / 10,
            }
            ages = {"age_mean": 0.5, "age_max": min(2, step), "age_histogram": {"0": 10, "1": 10}}
            released = {"trained": 4 * step, "stale": step // 2, "failed": 0}
            buffer = {"buffer_groups": {"inflight": 3, "ready": 5}, "released_groups": released}
            file.write({**row, **ages, **buffer, "step_s": 1.0, "wait_s": 0.2, "groups": 4})
        file.write({"kind": "warning", "step": steps[-1], "time_s": STARTED_S, "message": f"beware {HOSTILE}"})


def write_timeline(run_dir: Path) -> None:
    """Ten steps of a trainer, and a server that generates eight groups side by side."""
    rows = []
    for step in range(10):
        for name, start, end in (("wait", 0.0, 0.3), ("train", 0.3, 0.9), ("publish", 0.9, 1.0)):
            rows.append(("trainer", "trainer", name, step + start, step + end))
        rows.append(("rollout-0", "weights", f"version {step}", step + 0.95, step + 1.0))
        rows += [("rollout-0", "generation", f"group {HOSTILE}", step + lane / 10, step + 0.9) for lane in range(8)]
    for role in ("trainer", "rollout-0"):
        with JsonLines(run_dir / "timeline" / f"{role}.jsonl") as file:
            for owner, track, name, start, end in rows:
                if owner == role:
                    times = {"start_s": STARTED_S + start, "end_s": STARTED_S + end}
                    file.write({"role": role, "track": track, "name": name, **times})


def write_long_timeline(run_dir: Path, events: int) -> None:
    """A server that generates some forty groups at a time, and a trainer beside it."""
    rng = random.Random(0)
    with JsonLines(run_dir / "timeline" / "rollout-0.jsonl") as file:
        for group in range(events * 3 // 4):
            times = {"start_s": STARTED_S + group / 100, "end_s": STARTED_S + group / 100 + rng.uniform(0.05, 0.8)}
            file.write({"role": "rollout-0", "track": "generation", "name": f"group {group}", **times})
    with JsonLines(run_dir / "timeline" / "trainer.jsonl") as file:
        for span in range(events // 4):
            times = {"start_s": STARTED_S + span * 0.03, "end_s": STARTED_S + span * 0.03 + 0.02}
            file.write({"role": "trainer", "track": "trainer", "name": ("wait", "train")[span % 2], **times})
