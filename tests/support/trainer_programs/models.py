"""Tiny random checkpoints of every family, with nothing in them that would hide a mistake."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from tests.support.trainer_programs.batches import VOCAB

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
}
_EXPERTS: dict[str, Any] = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,  # so that some wavelengths lie on each side of the scaling's bounds
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen2": lambda: Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2-untied": lambda: Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen2-even": lambda: Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "llama": lambda: LlamaConfig(**SIZES, head_dim=8, tie_word_embeddings=False),
    "llama3": lambda: LlamaConfig(**SIZES, head_dim=8, rope_parameters=_LLAMA3, tie_word_embeddings=True),
    "moe": lambda: Qwen3MoeConfig(**SIZES, **_EXPERTS, norm_topk_prob=True, tie_word_embeddings=False),
    "moe-unnormed": lambda: Qwen3MoeConfig(**SIZES, **_EXPERTS, norm_topk_prob=False, tie_word_embeddings=True),
}


def make_model(folder: Path, name: str) -> Path:
    """A Hugging Face folder, made once; norms and biases are random, too, but for the even one."""
    path = folder / f"model-{name}"
    if path.exists():
        return path
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]()).float()
    for parameter_name, parameter in model.named_parameters():
        if name != "qwen2-even" and (parameter_name.endswith("bias") or "norm" in parameter_name):
            torch.nn.init.normal_(parameter, mean=float("norm" in parameter_name), std=0.2)
    model.save_pretrained(path)
    (path / "tokenizer_config.json").write_text("{}")
    return path


def make_other(model: Path) -> Path:
    """The same architecture, with weights that have gone another way."""
    folder = model.with_name(f"{model.name}-other")
    if not folder.exists():
        other = AutoModelForCausalLM.from_pretrained(model)
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
        other.save_pretrained(folder)
    return folder


def make_other_options(model: Path) -> Path:
    """Weights of the same shapes that are another network: other position embeddings and another epsilon."""
    other = make_other(model)
    folder = model.with_name(f"{model.name}-other-options")
    if not folder.exists():
        shutil.copytree(other, folder)
        file = folder / "config.json"
        config = json.loads(file.read_text())
        config["rms_norm_eps"] = 0.1
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": 7.0}
        file.write_text(json.dumps(config))
    return folder
