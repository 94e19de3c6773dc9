"""`async-grpo run CONFIG --explain KEY`, and which keys are basic."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_grpo.app.cli.reference import list_fields
from async_grpo.config import RunConfig
from async_grpo.config.basics import BASIC_KEYS, FIRST_RUN_KEYS
from async_grpo.config.explain import KeyExplanation, explain_key
from async_grpo.config.load import find_key_lines, shipped_configs
from async_grpo.errors import ConfigError

QUICKSTART = shipped_configs() / "quickstart.yaml"
TOY_POLICIES = ("model.random.", "model.warmup.")


def explain(key: str, *overrides: str, path: Path = QUICKSTART) -> KeyExplanation:
    (explanation,) = explain_key(path, overrides, key)
    return explanation


def test_a_value_of_the_file_is_shown_with_its_line() -> None:
    explanation = explain("trainer.optimizer.lr")
    line = next(n for n, text in enumerate(QUICKSTART.read_text().splitlines(), 1) if text.strip().startswith("lr:"))
    assert (explanation.value, explanation.default) == ("0.0002", "1e-06")
    assert explanation.origin == f"{QUICKSTART}, line {line}"


def test_a_value_of_a_layer_is_shown_with_its_file() -> None:
    explanation = explain("trainer.tensor_parallel", path=shipped_configs() / "qwen2.5_7b_gsm8k_cuda.yaml")
    assert "layers/cuda.yaml, line" in explanation.origin


@pytest.mark.parametrize("override", ["max_staleness=0", "trainer={optimizer: {lr: 1.0e-4}}"])
def test_an_override_is_named(override: str) -> None:
    key = "max_staleness" if override.startswith("max") else "trainer.optimizer.lr"
    assert explain(key, override).origin == f"override -o {override}"


def test_a_default_and_a_value_of_a_preset_are_told_apart() -> None:
    assert explain("rollout.lease_s").origin == "default"
    assert explain("trainer.objective.clip_low").origin.startswith("preset areal")


def test_a_key_of_a_section_that_is_not_set_has_no_effect() -> None:
    assert explain("model.random.layers").origin.startswith("nowhere: model.random is not set")


def test_checks_that_mention_the_key_are_listed() -> None:
    assert any("min_lr" in check for check in explain("trainer.optimizer.lr").checks)
    assert any("redis.timeout_s" in check for check in explain("rollout.lease_s").checks)


def test_a_section_explains_all_its_keys() -> None:
    explanations = explain_key(QUICKSTART, (), "trainer.optimizer")
    assert {"trainer.optimizer.lr", "trainer.optimizer.schedule"} <= {explanation.key for explanation in explanations}


@pytest.mark.parametrize(("key", "nearest"), [("lr", "trainer.optimizer.lr"), ("max_stalenes", "max_staleness")])
def test_an_unknown_key_gets_the_nearest_names(key: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"no key {key}. Nearest: .*{nearest}"):
        explain_key(QUICKSTART, (), key)


def test_keys_of_shipped_configurations_are_basic() -> None:
    keys = {key for key, _ in list_fields(RunConfig, "")}
    assert len(FIRST_RUN_KEYS) == 15
    assert set(FIRST_RUN_KEYS) <= BASIC_KEYS <= keys
    used = {key for file in shipped_configs().rglob("*.yaml") for key in find_key_lines(file.read_text())}
    assert {key for key in used & keys if not key.startswith(TOY_POLICIES)} <= BASIC_KEYS


def test_sizes_of_toy_policies_are_not_basic() -> None:
    assert not any(key.startswith(TOY_POLICIES) for key in BASIC_KEYS)
