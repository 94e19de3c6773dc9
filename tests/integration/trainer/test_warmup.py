"""The warm-up writes a checkpoint that others can load, stops where it should, and repeats itself."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_grpo.config.model import ArithmeticTaskConfig, WarmupConfig
from async_grpo.errors import TrainingError
from trainer.warmup import WarmupProgress, learning_rate, sample, warm_up

SHORT = WarmupConfig(
    task=ArithmeticTaskConfig(digits=2, held_out=8),
    hidden_size=32,
    heads=1,
    kv_heads=1,
    intermediate_size=64,
    steps=12,
    batch_size=8,
    lr_warmup_steps=2,
    probe_every=5,
    probe_samples=8,
    accuracy_floor=0.0,
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """On a busy machine two threads wait for each other longer than they work on matrices this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def changed(**fields: object) -> WarmupConfig:
    return WarmupConfig.model_validate(SHORT.model_dump() | fields)


def test_the_folder_is_a_checkpoint_that_transformers_loads_and_samples_from(tmp_path: Path) -> None:
    report = warm_up(SHORT, tmp_path / "policy", seed=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    assert (model.config.model_type, model.config.tie_word_embeddings) == ("qwen2", True)
    assert sum(parameter.numel() for parameter in model.parameters()) == report.parameters
    prompts = torch.tensor([tokenizer.encode("47+85=")])
    generated = model.generate(prompts, max_new_tokens=6, do_sample=False)[0, prompts.shape[1] :]
    ours = sample(model, prompts, 6, None)[0]
    assert generated.tolist() == ours.tolist()


def test_the_report_lies_beside_the_weights_and_no_draft_is_left(tmp_path: Path) -> None:
    report = warm_up(SHORT, tmp_path / "policy", seed=1)
    assert json.loads((tmp_path / "policy" / "warmup.json").read_text()) == dataclasses.asdict(report)
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


def test_progress_comes_at_every_probe_and_after_the_last_step(tmp_path: Path) -> None:
    seen: list[WarmupProgress] = []
    warm_up(SHORT, tmp_path / "policy", seed=1, on_progress=seen.append)
    assert [progress.step for progress in seen] == [5, 10, 12]
    assert seen[-1].loss < seen[0].loss


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(tmp_path: Path) -> None:
    for name, seed in (("first", 1), ("again", 1), ("other", 2)):
        warm_up(SHORT, tmp_path / name, seed)
    first, again, other = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "again", "other"))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)


def test_a_policy_outside_the_accuracy_range_is_refused_and_not_written(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"Raise model\.warmup"):
        warm_up(changed(accuracy_floor=0.3), tmp_path / "policy", seed=1)
    assert list(tmp_path.iterdir()) == []


def test_a_probe_above_the_limit_goes_back_to_the_probe_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of 8 completions a probe, the first probe has none right and the second all; afterwards, on the
    # held-out problems, none is right again, so that the result passes the final check.
    verdicts = iter([0.0] * 8 + [1.0] * 8)
    monkeypatch.setattr("trainer.warmup.answer_tag", lambda text, answer: next(verdicts, 0.0))
    report = warm_up(SHORT, tmp_path / "stopped", seed=1)
    assert (report.steps, report.rolled_back) == (5, True)


def test_the_learning_rate_rises_linearly_and_falls_to_a_twentieth() -> None:
    config = changed(steps=100, lr=1.0, lr_warmup_steps=10)
    rates = [learning_rate(config, step) for step in range(1, 101)]
    assert rates[0] == pytest.approx(0.1, rel=0.01)
    assert rates[9] == max(rates)
    assert rates[-1] == pytest.approx(0.05)
