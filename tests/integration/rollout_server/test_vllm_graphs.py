"""Engines with captured graphs check at their start that decoding follows updates, and else restart without graphs.

vLLM captures nothing on a CPU. These tests run the whole check in vLLM's real worker and the restart without graphs; a
layer imitates a graph.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from async_grpo.lab.accept.engine import STALE_LAYER
from tests.support.vllm_lab import EXACT, FAR, FIRST_PROMPT, PROBE, Lab, prompt_of, started_lab

pytestmark = pytest.mark.asyncio(loop_scope="session")

UNCOMPILED = {"compilation_config": {"mode": 0}}
MOVES_NORM = "tests.support.wrong_engines.MovesNorm"


async def test_an_engine_with_graphs_checks_updates_at_its_start(tmp_path: Path) -> None:
    extra = {"worker_extension_cls": PROBE, **UNCOMPILED}
    async with started_lab(tmp_path, tied=True, enforce_eager=False, extra=extra) as lab:
        check = lab.engine.update_check
        assert check is not None and lab.engine.note == ""
        assert check.gap < EXACT < FAR < check.distance
        assert {span.version for span in lab.first.spans} == {-1}
        assert lab.error(FIRST_PROMPT, lab.first) < EXACT
        await assert_follows_updates(lab)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (STALE_LAYER, "decoded tokens differ by"),
        (MOVES_NORM, r"moved 1 of the model's \d+ tensors.*model\.norm\.weight"),
    ],
    ids=["a copy that is no parameter", "a parameter that moves"],
)
async def test_an_engine_whose_graphs_ignore_updates_restarts_eagerly(
    fault: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = {"worker_extension_cls": fault, **UNCOMPILED}
    async with started_lab(tmp_path, tied=True, enforce_eager=False, extra=extra) as lab:
        assert lab.engine.update_check is None
        assert re.search(f"without captured graphs .*{reason}", lab.engine.note)
        assert capsys.readouterr().out.count("runs without captured graphs") == 1
        assert lab.engine.async_llm.vllm_config.model_config.enforce_eager
        assert lab.error(FIRST_PROMPT, lab.first) < EXACT
        await assert_follows_updates(lab)


async def assert_follows_updates(lab: Lab) -> None:
    version = await lab.update("keep")
    generation = await lab.generate(prompt_of(10, 1), 40)
    assert {span.version for span in generation.spans} == {version}
    assert lab.error(prompt_of(10, 1), generation) < EXACT
    assert lab.engine.disputed_spans == 0
