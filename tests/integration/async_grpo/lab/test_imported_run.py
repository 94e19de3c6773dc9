"""MindRLHF's published configuration, imported, trains a tiny model on the CPU with the sampling and objective of the
file. Only model, data and sizes are adapted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from async_grpo.telemetry.jsonl import read_rows
from tests.support.whole_run import CommandInFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PUBLISHED = Path(__file__).parents[3] / "support" / "published" / "mindrlhf_qwen2.5_7b.yaml"
STEPS = 20
TINY = (
    "name=imported",
    f"steps={STEPS}",
    "eval.prompts=4",
    "model.path=null",
    "model.precision=float32",
    "model.random={hidden_size: 64, layers: 2, heads: 2, kv_heads: 1, intermediate_size: 128, vocab_size: 300}",
    "data.kind=arithmetic",
    "data.path=null",
    "rewards.functions=[{name: answer_tag}]",
    "sampling.max_tokens=24",
    "rollout.servers=1",
    "rollout.max_concurrency=32",
    "rollout.vllm={platform: cpu, max_model_len: 128, kv_cache_bytes: 67108864}",
    "trainer.platform=cpu",
    "trainer.processes=1",
    "trainer.tensor_parallel=1",
    "trainer.pipeline_parallel=1",
)


def test_an_imported_run_samples_and_trains_as_the_file_says(tmp_path: Path) -> None:
    command = CommandInFolder(tmp_path)
    try:
        command.begin("import-config", str(PUBLISHED), "--from", "mindrlhf", "--out", "imported.yaml")
        assert command.wait() == 0, command.printed
        command.begin("run", "imported.yaml", *(word for override in TINY for word in ("-o", override)))
        assert command.wait(500.0) == 0, command.printed[-3000:]
    finally:
        command.close()

    run_dir = tmp_path / "runs" / "imported"
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (
        summary["sampling"]
        == "temperature 0.8, top_k 20, top_p 0.8, repetition_penalty 1.05, min_tokens 2, at most 24 tokens"
    )
    assert summary["steps"] == STEPS
    # The trainer normalises over the kept tokens. Over the whole vocabulary the mean gap would be about 0.2, -log 0.8.
    assert summary["logprob_gap_mean"] < 1e-4
    steps = [row for row in read_rows(run_dir / "metrics.jsonl") if row["kind"] == "step"]
    assert all(row["kl"] is not None for row in steps)  # the penalty of the file, with a frozen reference
