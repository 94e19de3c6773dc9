"""A bfloat16 engine computes its logits in float32 with `model.fp32_head`."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout_server.engines.proof import prove_logprobs
from tests.support.vllm_lab import FIRST_PROMPT, VOCABULARY, engine_of, random_model

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def count_distinct_logprobs(model_dir: Path, *, fp32_head: bool) -> int:
    """Number of different log-probabilities among those of the whole vocabulary after one prompt."""
    engine = engine_of(model_dir, precision="bfloat16", fp32_head=fp32_head)
    try:
        await engine.start()
        row = await engine.vocabulary_logprobs(FIRST_PROMPT)
        proof = await prove_logprobs(
            engine, vocabulary=VOCABULARY, temperature=0.8, precision="bfloat16", timeout_s=60.0
        )
    finally:
        await engine.aclose()
    assert proof is not None
    return len(set(row.tolist()))


async def test_logits_have_more_digits_than_bfloat16(tmp_path: Path) -> None:
    """Rounded to bfloat16, the logits of many tokens are equal."""
    random_model(tied=True, stop_tokens=None).save_pretrained(tmp_path)
    assert await count_distinct_logprobs(tmp_path, fp32_head=False) < 0.95 * VOCABULARY
    assert await count_distinct_logprobs(tmp_path, fp32_head=True) > 0.99 * VOCABULARY
