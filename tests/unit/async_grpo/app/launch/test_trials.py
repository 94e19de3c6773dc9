"""What is tried on the first rows of the data before a run starts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from async_grpo.app.launch.checks.data import count_prompt_lengths
from async_grpo.app.launch.checks.trials import check_rewards, check_workflow, read_first_rows
from async_grpo.app.launch.memory_plan import check_shared_memory
from async_grpo.app.launch.plan import RunPlan
from async_grpo.app.launch.plan_table import plan_table
from async_grpo.config import RunConfig, validate
from async_grpo.errors import ConfigError, DataError
from async_grpo.models.tiny.arithmetic import build_char_tokenizer

USERS = """
class Good:
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
    async def run(self, task, session):
        generation = await session.turn()
        await session.observe(self.hint)
        generation = await session.turn()
        return session.sample(self.tokenizer.decode(generation.tokens.tolist()))
    async def hint(self):
        return self.tokenizer.encode("1")

class Forever(Good):
    async def run(self, task, session):
        while session.tokens_left:
            await session.turn()
        return session.sample("")

class ToolAway(Good):
    async def run(self, task, session):
        raise ConnectionError("no sandbox")

class NoText(Good):
    async def run(self, task, session):
        return session.sample((await session.turn()).text)

class NoSample(Good):
    async def run(self, task, session):
        return "4"

class WantsMore:
    def __init__(self, tokenizer, judge):
        pass

def raises(completion, reference):
    raise ValueError("no number in the completion")

def raises_for_the_unknown(completion, reference):
    return float(completion == reference) if completion.isdigit() else float("x")
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a first policy, as far as its tokenizer goes; the working folder has the user's module."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "users_own", raising=False)
    (tmp_path / "users_own.py").write_text(USERS)
    rows = [{"question": f"{index}+1=", "answer": f"{index + 1}"} for index in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    build_char_tokenizer().save_pretrained(str(tmp_path / "model"))
    return tmp_path / "model"


def config(**changes: Any) -> RunConfig:
    raw = {"name": "one", "model": {"path": "model"}, "data": {"kind": "jsonl", "path": "rows.jsonl"}}
    raw |= {"eval": {"prompts": 4}, "sampling": {"max_tokens": 32}}
    return validate(raw | changes, "test")


@pytest.mark.parametrize(
    ("workflow", "error"),
    [
        ("users_own:NoText", r"failed at users_own\.py, line \d+: AttributeError"),
        ("users_own:NoSample", "run\\(\\) returned a str"),
        ("users_own:WantsMore", "rollout.workflow: .*TypeError"),
        ("users_own:Missing", "rollout.workflow: .*AttributeError"),
        ("no_such_module:Nope", "rollout.workflow: .*ModuleNotFoundError"),
    ],
)
def test_a_workflow_that_cannot_work_is_refused_before_the_start(model: Path, workflow: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        check_workflow(config(rollout={"workflow": workflow}), model)


@pytest.mark.parametrize("name", ["Good", "Forever", "ToolAway"])
def test_a_workflow_that_may_work_is_not_refused(model: Path, name: str) -> None:
    check_workflow(config(rollout={"workflow": f"users_own:{name}"}), model)


def test_without_a_tokenizer_a_workflow_is_imported(model: Path) -> None:
    check_workflow(config(rollout={"workflow": "users_own:NoText"}), None)
    with pytest.raises(ConfigError, match="cannot be imported"):
        check_workflow(config(rollout={"workflow": "users_own:Missing"}), None)


def test_a_reward_that_raises_for_every_row_is_refused(model: Path) -> None:
    made = config(rewards={"functions": [{"name": "users_own:raises"}]})
    with pytest.raises(ConfigError, match="no number in the completion"):
        check_rewards(made.rewards, read_first_rows(made, 3))
    picky = config(rewards={"functions": [{"name": "users_own:raises_for_the_unknown"}]})
    check_rewards(picky.rewards, read_first_rows(picky, 3))


def test_prompts_that_are_all_too_long_in_tokens_are_refused(model: Path) -> None:
    lengths = count_prompt_lengths(config(), model)
    assert lengths is not None and (lengths.rows, lengths.too_long) == (16, 0)
    short = config(data={"kind": "jsonl", "path": "rows.jsonl", "max_prompt_tokens": 3})
    with pytest.raises(DataError, match="prompt too long"):
        count_prompt_lengths(short, model)


@pytest.mark.parametrize(
    ("every_steps", "when"), [(0, "before and after"), (25, "every 25 steps"), (100, "before and after")]
)
def test_the_plan_says_when_a_run_evaluates(model: Path, every_steps: int, when: str) -> None:
    planned = config(eval={"prompts": 4, "every_steps": every_steps})
    names, shown = (list(column.cells) for column in plan_table(RunPlan(planned, planned)).columns)
    assert when in str(shown[names.index("evaluation")])
    assert ("every" in str(shown[names.index("evaluation")])) is (when != "before and after")


def test_shared_memory_that_cannot_hold_the_weights_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 100_000_000}
    (model / "config.json").write_text(json.dumps(shape))
    with pytest.raises(ConfigError, match="copies of the weights"):
        check_shared_memory(config(), model)
    (model / "config.json").write_text(json.dumps(shape | {"vocab_size": 100}))
    check_shared_memory(config(), model)
