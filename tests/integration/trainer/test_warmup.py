"""The warm-up writes a checkpoint that others can load, stops where it should, and repeats itself."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_grpo.config.model import ArithmeticTaskConfig, WarmupConfig
from async_grpo.errors import TrainingError
from trainer.warmup import WarmupProgress, WarmupReport, learning_rate, sample, warm_up

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


def changed(**fields: object) -> WarmupConfig:
    return WarmupConfig.model_validate(SHORT.model_dump() | fields)


@dataclass(frozen=True)
class Made:
    folder: Path
    report: WarmupReport
    progress: list[WarmupProgress]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder, seen = tmp_path_factory.mktemp("warmup"), list[WarmupProgress]()
    return Made(folder, warm_up(SHORT, folder / "policy", seed=1, on_progress=seen.append), seen)


def test_the_folder_is_a_checkpoint_that_transformers_loads_and_samples_from(made: Made) -> None:
    model = AutoModelForCausalLM.from_pretrained(made.folder / "policy", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(made.folder / "policy")
    assert (model.config.model_type, model.config.tie_word_embeddings) == ("qwen2", True)
    assert sum(parameter.numel() for parameter in model.parameters()) == made.report.parameters
    prompts = torch.tensor([tokenizer.encode("47+85=")])
    generated = model.generate(prompts, max_new_tokens=6, do_sample=False)[0, prompts.shape[1] :]
    assert generated.tolist() == sample(model, prompts, 6, None)[0].tolist()


def test_the_report_lies_beside_the_weights_and_no_draft_is_left(made: Made) -> None:
    assert json.loads((made.folder / "policy" / "warmup.json").read_text()) == dataclasses.asdict(made.report)
    assert [path.name for path in made.folder.iterdir()] == ["policy"]


def test_progress_comes_at_every_probe_and_after_the_last_step(made: Made) -> None:
    assert [progress.step for progress in made.progress] == [5, 10, 12]
    assert made.progress[-1].loss < made.progress[0].loss


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(made: Made, tmp_path: Path) -> None:
    for name, seed in (("again", 1), ("other", 2)):
        warm_up(SHORT, tmp_path / name, seed)
    folders = (made.folder / "policy", tmp_path / "again", tmp_path / "other")
    first, again, other = (load_file(folder / "model.safetensors") for folder in folders)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)


def test_a_policy_outside_the_accuracy_range_is_refused_and_not_written(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"model\.warmup"):
        warm_up(changed(accuracy_floor=0.3), tmp_path / "policy", seed=1)
    assert list(tmp_path.iterdir()) == []


def test_a_probe_above_the_limit_goes_back_to_the_probe_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of 8 completions a probe, the first probe has none right and the second all; afterwards, on the
    # held-out problems, none is right again, so that the result passes the final check.
    verdicts = iter([False] * 8 + [True] * 8)
    monkeypatch.setattr("trainer.warmup.is_correct", lambda problem, text: next(verdicts, False))
    report = warm_up(SHORT, tmp_path / "stopped", seed=1)
    assert (report.steps, report.rolled_back) == (5, True)


def test_the_learning_rate_rises_linearly_and_falls_to_a_twentieth() -> None:
    config = changed(steps=100, lr=1.0, lr_warmup_steps=10)
    rates = [learning_rate(config, step) for step in range(1, 101)]
    assert rates[0] == pytest.approx(0.1, rel=0.01)
    assert rates[9] == max(rates)
    assert rates[-1] == pytest.approx(0.05)
