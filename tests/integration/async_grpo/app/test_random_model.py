"""The tiny random model: whole, deterministic, and its tokenizer reads and writes every text."""

from __future__ import annotations

from pathlib import Path

from async_grpo.config.model import RandomModelConfig
from async_grpo.data.tokenizer import load_tokenizer
from async_grpo.models.tiny.random_qwen2 import make_random_model

SHAPE = RandomModelConfig(hidden_size=64, layers=1, heads=2, kv_heads=1, intermediate_size=64, vocab_size=320)
TEXTS = [f"Question: what is {number} plus {number}?" for number in range(50)]


def test_the_same_seed_makes_the_same_files(tmp_path: Path) -> None:
    for name, seed in (("one", 1), ("again", 1), ("other", 2)):
        make_random_model(SHAPE, TEXTS, tmp_path / name, seed)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= set(files)
    assert all((tmp_path / "one" / name).read_bytes() == (tmp_path / "again" / name).read_bytes() for name in files)
    one, other = (tmp_path / name / "model.safetensors" for name in ("one", "other"))
    assert one.read_bytes() != other.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "one", "other"]


def test_every_text_survives_encoding_and_decoding(tmp_path: Path) -> None:
    make_random_model(SHAPE, TEXTS, tmp_path / "model", 1)
    tokenizer = load_tokenizer(tmp_path / "model")
    for text in ("Question: what is 7 plus 8?", "naïve 数学 \n\t{}", " <think> a , b ."):
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
