"""A reference model that would be computed as another network is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from async_grpo.app.launch.plan import plan_run
from async_grpo.config.model import RandomModelConfig
from async_grpo.config.trainer import ReferenceConfig, TrainerConfig
from async_grpo.errors import ConfigError
from async_grpo.models.tiny.random_qwen2 import make_random_model
from tests.support.trainer_programs.models import CONFIGS
from trainer.model.builder import transformer_config
from trainer.model.checks import check_reference_config
from trainer.model.families import read_options, read_rope, read_sizes

LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SWAP = ReferenceConfig(source="frozen")
SECOND_MODEL = ReferenceConfig(source="frozen", placement="model")
SYNCED = ReferenceConfig(source="synced", sync_every=2, placement="model")

OPTIONS = [
    (Qwen2Config(), Qwen2Config(rope_parameters={"rope_type": "default", "rope_theta": 1e6}), "rope_theta 1000000"),
    (Qwen2Config(), Qwen2Config(rms_norm_eps=1e-5), "rms_norm_eps 1e-05"),
    (Qwen2Config(), Qwen2Config(tie_word_embeddings=True), "tie_word_embeddings True"),
    (
        LlamaConfig(rope_parameters={**LLAMA3, "factor": 8.0}),
        LlamaConfig(rope_parameters={**LLAMA3, "factor": 32.0}),
        "rope factor 32",
    ),
    (Qwen3MoeConfig(num_experts_per_tok=8), Qwen3MoeConfig(num_experts_per_tok=4), "num_experts_per_tok 4"),
    (Qwen3MoeConfig(norm_topk_prob=False), Qwen3MoeConfig(norm_topk_prob=True), "norm_topk_prob True"),
]


@pytest.mark.parametrize(("policy", "reference", "named"), OPTIONS, ids=[named for _, _, named in OPTIONS])
def test_other_options_need_a_second_model_that_stays_as_it_is(
    policy: PretrainedConfig, reference: PretrainedConfig, named: str
) -> None:
    with pytest.raises(ConfigError, match=rf"trainer\.reference\.path ref has {named}"):
        check_reference_config(policy, reference, SWAP, Path("ref"))
    with pytest.raises(ConfigError, match=r"trainer\.reference\.source to frozen"):
        check_reference_config(policy, reference, SYNCED, Path("ref"))
    check_reference_config(policy, reference, SECOND_MODEL, Path("ref"))
    check_reference_config(policy, policy, SWAP, Path("ref"))


@pytest.mark.parametrize(
    ("policy", "reference", "named"),
    [
        (Qwen3Config(head_dim=128), Qwen3Config(head_dim=64), "head_dim 64"),
        (Qwen2Config(), Qwen2Config(intermediate_size=1024), "intermediate_size 1024"),
        (Qwen2Config(), Qwen2Config(vocab_size=1000), "vocab_size 1000"),
        (Qwen2Config(), LlamaConfig(), "model_type llama"),
        (Qwen2Config(), Qwen2Config(use_sliding_window=True, max_window_layers=0), "use_sliding_window True"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_sizes_and_options_that_nothing_computes_are_refused(
    policy: PretrainedConfig, reference: PretrainedConfig, named: str
) -> None:
    with pytest.raises(ConfigError, match=named) as refused:
        check_reference_config(policy, reference, SECOND_MODEL, Path("ref"))
    assert "model.path" not in str(refused.value)


class RecordingConfig:
    """Notes which values are read of a configuration."""

    def __init__(self, hf: PretrainedConfig) -> None:
        self._hf, self.read = hf, set[str]()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self._hf, name)


@pytest.mark.parametrize("name", CONFIGS)
def test_everything_that_a_model_is_built_from_is_compared(name: str) -> None:
    built, compared = (RecordingConfig(CONFIGS[name]()) for _ in range(2))
    transformer_config(built, torch.float32, TrainerConfig(), {})  # type: ignore[arg-type]
    read_rope(built)  # type: ignore[arg-type]
    read_sizes(compared), read_options(compared)  # type: ignore[arg-type]
    assert built.read <= compared.read


def test_a_dry_run_refuses_a_reference_of_another_network(tmp_path: Path) -> None:
    shape = RandomModelConfig(hidden_size=64, layers=1, heads=2, kv_heads=1, intermediate_size=64, vocab_size=320)
    for name in ("policy", "reference"):
        make_random_model(shape, ["1 + 1"], tmp_path / name, 1)
    file = tmp_path / "reference" / "config.json"
    file.write_text(file.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 0.001'))
    config = tmp_path / "config.yaml"
    config.write_text(
        json.dumps(
            {
                "name": "other",
                "runs_dir": str(tmp_path / "runs"),
                "model": {"path": str(tmp_path / "policy")},
                "data": {"kind": "arithmetic"},
                "rewards": {"functions": [{"name": "gsm8k"}]},
                "trainer": {"reference": {"source": "frozen", "path": str(tmp_path / "reference")}},
            }
        )
    )
    with pytest.raises(ConfigError, match=r"rms_norm_eps 0\.001 .*1e-06.*placement to model"):
        plan_run(config, [], download=False)
    plan_run(config, ["trainer.reference.placement=model"], download=False)
