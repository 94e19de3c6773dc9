"""The proof of log-probabilities, with an engine whose logits are a table."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from async_grpo.errors import CONFIG_FAULTS, LogprobsWrong, WaitTimeout
from async_grpo.wire.sampling_mask import SamplingMask, join_masks
from rollout_server import assembly
from rollout_server.engines.base import Generation, GenerationRequest, Truncation
from rollout_server.engines.proof import LogprobProof, kept_tokens, prove_logprobs
from rollout_server.engines.scripted import ScriptedEngine
from tests.support.rollout_fakes import config_of

VOCABULARY = 50

Row = npt.NDArray[np.float64]


@dataclass
class TableEngine:
    """Logits depend on the last token. `draws`, `reports`: map the requested temperature to the one really used."""

    scale: float = 3.0
    noise: float = 0.0
    reports: Any = float
    draws: Any = float
    normalised: bool = True
    delay_s: float = 0.0
    length: int = 2
    keeps: Any = kept_tokens
    """(log-probabilities, truncation) -> tokens that are kept."""
    description: str = "rollout-0 (table 1.0)"

    def __post_init__(self) -> None:
        self.closed = False
        self.random = np.random.default_rng(1)
        self.logits = self.scale * self.random.normal(size=(VOCABULARY, VOCABULARY))

    async def start(self) -> None: ...

    async def aclose(self) -> None:
        self.closed = True

    async def vocabulary_logprobs(self, prompt: Sequence[int]) -> npt.NDArray[np.float32]:
        await asyncio.sleep(self.delay_s)
        return log_softmax(self.logits[prompt[-1]]).astype(np.float32)

    async def generate(self, request: GenerationRequest) -> Generation:
        last, tokens, logprobs, masks = request.prompt[-1], [], [], []
        for _ in range(min(self.length, request.max_tokens)):
            row = self.logits[last] + self.noise * self.random.normal(size=VOCABULARY)
            if request.truncation is not None:
                kept = sorted(self.keeps(log_softmax(row / request.temperature), request.truncation))
                masks.append(SamplingMask(np.array(kept, np.int32), np.array([len(kept)], np.uint16)))
                row = np.where(np.isin(np.arange(VOCABULARY), kept), row, -1e9)
            last = int(self.random.choice(VOCABULARY, p=np.exp(log_softmax(row / self.draws(request.temperature)))))
            reported = row / self.reports(request.temperature)
            tokens.append(last)
            logprobs.append((log_softmax(reported) if self.normalised else reported)[last])
        mask = join_masks(masks) if masks else None
        return Generation(np.array(tokens, np.int32), np.array(logprobs, np.float32), [], "length", mask)


def log_softmax(row: Row) -> Row:
    normalised: Row = row - np.log(np.exp(row).sum())
    return normalised


async def prove(engine: Any, temperature: float = 0.8, timeout_s: float = 5.0, **fields: Any) -> LogprobProof | None:
    fields = {"precision": "float32", **fields}
    return await prove_logprobs(engine, vocabulary=VOCABULARY, temperature=temperature, timeout_s=timeout_s, **fields)


@pytest.mark.parametrize("scale", [20.0, 3.0, 0.3, 0.003])
@pytest.mark.parametrize("temperature", [1.0, 0.8, 2.0])
async def test_correct_logprobs_pass_at_any_sharpness(scale: float, temperature: float) -> None:
    proof = await prove(TableEngine(scale), temperature)
    assert proof is not None
    assert proof.temperatures[0] == temperature != proof.temperatures[1]
    assert (proof.tokens, proof.gap_max < 1e-3) == (16, True)


@pytest.mark.parametrize("scale", [20.0, 3.0, 0.3, 0.003])
@pytest.mark.parametrize("temperature", [1.0, 0.8, 2.0])
async def test_logprobs_of_temperature_1_are_refused(scale: float, temperature: float) -> None:
    with pytest.raises(LogprobsWrong, match="temperature 1"):
        await prove(TableEngine(scale, reports=lambda _: 1.0), temperature)


@pytest.mark.parametrize(
    "fault",
    [{"normalised": False}, {"reports": lambda temperature: temperature**2}, {"reports": lambda _: np.nan}],
    ids=["logits", "divided twice", "nan"],
)
async def test_other_wrong_logprobs_are_refused_with_an_example(fault: dict[str, Any]) -> None:
    expected = r"rollout-0 \(table 1\.0\).*token \d+, .*log_softmax\(logits / "
    with pytest.raises(LogprobsWrong, match=expected):
        await prove(TableEngine(**fault))
    assert LogprobsWrong in CONFIG_FAULTS, "such a server is not restarted"


async def test_a_sampler_that_draws_at_another_temperature_is_refused() -> None:
    with pytest.raises(LogprobsWrong, match=r"8 tokens .*0\.2 .*e\^\d+ .*temperature 1"):
        await prove(TableEngine(draws=lambda _: 1.0), 1.0)


async def test_decoding_may_round_differently_from_prefill_within_limits() -> None:
    noisy = TableEngine(noise=0.1)
    assert await prove(noisy, precision="bfloat16")
    with pytest.raises(LogprobsWrong, match=r"allowed 0\.0125"):
        await prove(noisy)


async def test_completions_may_end_at_their_first_token() -> None:
    proof = await prove(TableEngine(length=1))
    assert proof is not None
    assert proof.tokens == 8


async def test_a_script_has_no_proof_and_a_silent_engine_times_out() -> None:
    assert await prove(ScriptedEngine()) is None
    with pytest.raises(WaitTimeout, match=r"0\.01 s .*rollout-0 \(table 1\.0\)"):
        await prove(TableEngine(delay_s=5.0), timeout_s=0.01)


@pytest.mark.parametrize("right", [True, False])
async def test_a_server_proves_its_engine_at_the_runs_temperature(monkeypatch: pytest.MonkeyPatch, right: bool) -> None:
    engine = TableEngine(reports=float if right else lambda _: 1.0)
    monkeypatch.setattr(assembly, "make_engine", lambda *_, **__: engine)
    monkeypatch.setattr(assembly, "vocabulary_size", lambda _: VOCABULARY)
    config = config_of(sampling={"temperature": 0.7})
    async with AsyncExitStack() as stack:
        with nullcontext() if right else pytest.raises(LogprobsWrong):
            started, proof = await assembly.start_engine(stack, config, Path("unused"), "rollout-0")
            assert started is engine
            assert proof is not None
            assert proof.temperatures[0] == 0.7
    assert engine.closed


TRUNCATIONS = [Truncation(20), Truncation(20, top_p=0.9), Truncation(20, min_p=0.05), Truncation(20, 0.8, 0.0, 1.05)]


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
@pytest.mark.parametrize("scale", [20.0, 3.0, 0.3])
async def test_the_tokens_that_truncation_keeps_pass(truncation: Truncation, scale: float) -> None:
    assert await prove(TableEngine(scale), truncation=truncation) is not None


@pytest.mark.parametrize(
    "keeps",
    [
        lambda row, truncation: kept_tokens(row, replace(truncation, top_k=10)),
        lambda row, truncation: kept_tokens(row, replace(truncation, top_k=40)),
        lambda row, truncation: kept_tokens(row, replace(truncation, top_p=1.0)),
        lambda row, truncation: kept_tokens(row * 3, truncation),
    ],
    ids=["too few", "too many", "top_p ignored", "cut at another temperature"],
)
async def test_a_wrong_set_of_kept_tokens_is_refused(keeps: Any) -> None:
    with pytest.raises(LogprobsWrong, match="kept tokens of Truncation"):
        await prove(TableEngine(scale=0.3, keeps=keeps), truncation=Truncation(20, top_p=0.5))


async def test_kept_tokens_that_are_not_reported_are_refused() -> None:
    engine = TableEngine()

    async def without_mask(request: GenerationRequest) -> Generation:
        return replace(await TableEngine.generate(engine, request), sampling_mask=None)

    engine.generate = without_mask  # type: ignore[method-assign]
    with pytest.raises(LogprobsWrong, match="no kept tokens"):
        await prove(engine, truncation=Truncation(20))


def test_kept_tokens_are_those_of_vllms_sampler() -> None:
    sampler = pytest.importorskip("vllm.v1.sample.ops.topk_topp_sampler")
    generator = np.random.default_rng(5)
    for truncation in TRUNCATIONS:
        logits = torch.tensor(generator.normal(size=(30, 64)) * 2, dtype=torch.float32)
        scaled = logits.log_softmax(-1)
        removed = torch.zeros_like(logits, dtype=torch.bool)
        if truncation.min_p:
            removed = scaled.exp() < truncation.min_p * scaled.exp().amax(-1, keepdim=True)
        cut = sampler.apply_top_k_top_p_pytorch(
            logits.masked_fill(removed, -torch.inf),
            torch.full((30,), truncation.top_k),
            torch.full((30,), truncation.top_p),
            allow_cpu_sync=True,
        )
        for row, kept in zip(scaled, cut, strict=True):
            expected = set(torch.isfinite(kept).nonzero()[:, 0].tolist())
            assert kept_tokens(row.double().numpy(), truncation) == expected
