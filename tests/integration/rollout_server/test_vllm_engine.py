"""The real vLLM against a plain Hugging Face forward pass, across weight updates.

Every log-probability that the engine reports must be that of the policy version in its span. What
vLLM may keep from older weights (KV cache of requests in flight) is rebuilt token by token by the
reference, so that all comparisons are exact.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import DynamicCache, Qwen2ForCausalLM

from async_grpo.errors import EngineError, WeightsCorrupt, WeightsError
from async_grpo.weights.base import HeldWeights
from async_grpo.weights.manifest import WeightVersion, layout_of
from async_grpo.weights.shared_memory import remove_stores, store_path
from async_grpo.weights.store import WeightStore
from async_grpo.wire import VersionSpan
from rollout_server.engines.base import Generation, GenerationRequest, Interruption
from rollout_server.engines.vllm import engine, requests
from tests.support.vllm_lab import EXACT, FAR, STOP_TOKENS, Lab, log_softmax, prompt_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

RUN = f"test-vllm-engine-{os.getpid()}"
PREFIX_BLOCK = 128


@pytest.fixture(scope="module", autouse=True)
def _environment_and_shared_memory_are_left_as_found() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    remove_stores(RUN)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tied(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    """Tied embeddings, and stop tokens."""
    lab = Lab(tmp_path_factory.mktemp("tied"), run=RUN, tied=True, stop_tokens=STOP_TOKENS)
    await lab.engine.start()
    yield lab
    await lab.engine.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def untied(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    """An output layer of its own, and no stop token: generations are as long as asked for."""
    lab = Lab(tmp_path_factory.mktemp("untied"), run=RUN, tied=False)
    await lab.engine.start()
    yield lab
    await lab.engine.aclose()


@pytest.fixture(params=["tied", "untied"])
def lab(request: pytest.FixtureRequest, tied: Lab, untied: Lab) -> Lab:
    return {"tied": tied, "untied": untied}[request.param]


async def test_the_first_prompt_may_be_a_short_one_and_its_weights_are_the_checkpoints(tied: Lab) -> None:
    assert tied.engine.version == -1
    generation = await tied.generate([40, 41, 42], 24)
    assert {span.version for span in generation.spans} == {-1}
    assert tied.error([40, 41, 42], generation) < EXACT


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_log_probabilities_are_of_the_distribution_that_was_sampled_from(lab: Lab, temperature: float) -> None:
    prompts = [prompt_of(3 + 5 * index, index) for index in range(8)]
    generations = await asyncio.gather(*(lab.generate(prompt, 40, temperature=temperature) for prompt in prompts))
    for prompt, generation in zip(prompts, generations, strict=True):
        assert lab.error(prompt, generation, temperature=temperature) < EXACT
        assert lab.error(prompt, generation, temperature=1.5 * temperature) > FAR


async def test_more_long_prompts_than_one_step_reads_keep_their_seeds(untied: Lab) -> None:
    prompts = [prompt_of(300, index) for index in range(24)]
    requests = [GenerationRequest(f"long{index}", prompt, 4, seed=index) for index, prompt in enumerate(prompts)]
    generations = await asyncio.gather(*(untied.engine.generate(request) for request in requests))
    for prompt, generation in zip(prompts, generations, strict=True):
        assert untied.error(prompt, generation) < EXACT


async def test_the_stop_token_is_part_of_the_completion(tied: Lab) -> None:
    generations = await asyncio.gather(*(tied.generate(prompt_of(6, index), 200) for index in range(16)))
    stopped = [generation for generation in generations if generation.finish_reason == "stop"]
    assert stopped
    for generation in stopped:
        assert generation.tokens[-1] in STOP_TOKENS
        assert not set(generation.tokens[:-1].tolist()) & set(STOP_TOKENS)


async def test_a_prefix_is_context_and_not_part_of_the_answer(untied: Lab) -> None:
    prompt, prefix = prompt_of(5, 1), prompt_of(9, 2)
    generation = await untied.generate(prompt, 12, prefix=prefix)
    assert len(generation.tokens) == 12
    assert generation.finish_reason == "length"
    assert untied.error([*prompt, *prefix], generation) < EXACT


@pytest.mark.parametrize("interruption", ["keep", "recompute"])
async def test_tokens_after_an_update_come_from_the_new_weights(lab: Lab, interruption: Interruption) -> None:
    for index in range(3):
        version = await lab.update(interruption)
        prompt = prompt_of(10, index)
        generation = await lab.generate(prompt, 40)
        assert generation.spans == [VersionSpan(version, 0, len(generation.tokens))]
        assert lab.error(prompt, generation) < EXACT


async def test_an_output_layer_that_stayed_old_would_be_seen(tied: Lab) -> None:
    version = await tied.update("keep")
    prompt = prompt_of(10, 3)
    generation = await tied.generate(prompt, 40)
    stale = Qwen2ForCausalLM(tied.models[version].config).eval()
    stale.load_state_dict(tied.models[version].state_dict())
    stale.lm_head.weight = torch.nn.Parameter(tied.models[version - 1].lm_head.weight.clone())
    new, tied.models[version] = tied.models[version], stale
    assert tied.error(prompt, generation) > FAR
    tied.models[version] = new
    assert tied.error(prompt, generation) < EXACT


@pytest.mark.parametrize("interruption", ["keep", "recompute"])
async def test_requests_in_flight_go_on_and_every_segment_is_of_its_version(
    untied: Lab, interruption: Interruption, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_spans = record_own_spans(monkeypatch)
    prompts = [prompt_of(4 + index, index) for index in range(6)]
    running = [asyncio.create_task(untied.generate(prompt, 400)) for prompt in prompts]
    for _ in range(3):
        await more_tokens(untied, 60 * len(prompts))
        await untied.update(interruption)
    generations = await asyncio.gather(*running)
    for prompt, generation in zip(prompts, generations, strict=True):
        assert len(generation.tokens) == 400
        assert len(generation.spans) == 4
        assert untied.error(prompt, generation, keep=interruption == "keep") < EXACT
        assert untied.error(prompt, generation, keep=interruption != "keep") > FAR
    assert own_spans == [generation.spans for generation in generations]


async def test_a_prefix_cached_under_old_weights_is_not_used_under_new_ones(
    untied: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = record_cached_tokens(monkeypatch)
    prompt = prompt_of(2 * PREFIX_BLOCK + 20, 9)
    await untied.generate(prompt, 4)
    await untied.generate(prompt, 4)
    old = untied.engine.version
    new = await untied.update("keep")
    generation = await untied.generate(prompt, 40)
    assert cached == [0, 2 * PREFIX_BLOCK, 0]
    assert untied.error(prompt, generation) < EXACT

    cache = DynamicCache()
    log_softmax(untied.models[old], prompt[: 2 * PREFIX_BLOCK], cache, 1.0)
    rest = [*prompt[2 * PREFIX_BLOCK :], *generation.tokens.tolist()]
    mixed = log_softmax(untied.models[new], rest[:-1], cache, 1.0)[-40:]
    mixed_logprobs = mixed.gather(1, torch.tensor(generation.tokens, dtype=torch.long)[:, None])[:, 0].numpy()
    assert np.abs(mixed_logprobs - generation.logprobs).max() > FAR


async def test_requests_submitted_around_updates_are_exact_prompt_included(untied: Lab) -> None:
    prompt = prompt_of(PREFIX_BLOCK + 30, 11)
    running = []
    for _ in range(3):
        running += [asyncio.create_task(untied.generate(prompt, 30)) for _ in range(8)]
        await asyncio.sleep(0.01)
        await untied.update("keep")
    generations = await asyncio.gather(*running)
    assert untied.engine.load().running == untied.engine.load().waiting == 0
    for generation in generations:
        assert untied.error(prompt, generation) < EXACT


async def test_a_cancelled_request_leaves_the_engine(untied: Lab) -> None:
    running = asyncio.create_task(untied.generate(prompt_of(4, 1), 900))
    await more_tokens(untied, 10)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert untied.engine.load().running == 0
    assert len((await untied.generate(prompt_of(4, 2), 5)).tokens) == 5


async def test_weights_that_are_not_there_or_do_not_fit_are_refused_and_generation_goes_on(untied: Lab) -> None:
    version = untied.engine.version
    with pytest.raises(WeightsError, match="does not hold version 99"):
        await untied.engine.update_weights(
            HeldWeights.in_store(untied.store.path, epoch=0, version=99), interruption="keep"
        )
    other = WeightStore.create(store_path(RUN, "other"), layout_of([("model.norm.weight", "float32", [64])]))
    other.begin()
    other.commit(WeightVersion(0, 99))
    with pytest.raises(WeightsCorrupt, match="missing in the weights"):
        await untied.engine.update_weights(HeldWeights.in_store(other.path, epoch=0, version=99), interruption="keep")
    generation = await untied.generate(prompt_of(10, 5), 10)
    assert untied.engine.version == version
    assert untied.error(prompt_of(10, 5), generation) < EXACT


async def test_a_request_that_does_not_fit_the_context_is_refused(untied: Lab) -> None:
    with pytest.raises(EngineError, match="request r"):
        await untied.generate(prompt_of(1100, 5), 10)


async def test_an_engine_with_half_loaded_weights_never_generates_again(
    tied: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = [asyncio.create_task(tied.generate(prompt_of(4, index), 900)) for index in range(32)]
    await more_tokens(tied, 32)

    async def half_load(*_: object) -> None:
        raise WeightsCorrupt("overwritten while it was read")

    monkeypatch.setattr(tied.engine, "_load", half_load)
    with pytest.raises(EngineError, match="did not finish: WeightsCorrupt: overwritten"):
        await tied.update("keep")
    outcomes = await asyncio.gather(*running, return_exceptions=True)  # some came to a stop token before the update
    failures = [outcome for outcome in outcomes if not isinstance(outcome, Generation)]
    assert failures
    assert all(isinstance(failure, EngineError) and "stays paused" in str(failure) for failure in failures)
    with pytest.raises(EngineError, match="stays paused"):
        await tied.generate(prompt_of(4, 1), 5)


async def test_the_death_of_the_engine_ends_its_requests_and_an_update_with_an_engine_error(untied: Lab) -> None:
    running = asyncio.create_task(untied.generate(prompt_of(4, 1), 900))
    await more_tokens(untied, 10)
    processes = untied.engine._llm.engine_core.resources.engine_manager.processes
    for process in processes:
        os.kill(process.pid, signal.SIGSTOP)  # so that the update waits for an answer
    updating = asyncio.create_task(untied.update("keep"))
    await asyncio.sleep(0.2)
    assert not updating.done()
    for process in processes:
        process.kill()
    async with asyncio.timeout(20):
        with pytest.raises(EngineError, match="EngineDeadError"):
            await running
        with pytest.raises(EngineError, match=r"did not finish: EngineError: .* engine died"):
            await updating


async def more_tokens(lab: Lab, count: int) -> None:
    target = lab.engine.load().generated_tokens + count
    async with asyncio.timeout(30):
        while lab.engine.load().generated_tokens < target:
            await asyncio.sleep(0.005)


def record_own_spans(monkeypatch: pytest.MonkeyPatch) -> list[list[VersionSpan]]:
    """What an engine without `weight_versions` would report, in the order of completion."""
    recorded: list[list[VersionSpan]] = []
    original = requests.generation_of

    def spy(output: Any, active: requests.EngineRequest) -> Generation:
        recorded.append(active.spans.spans(len(output.outputs[0].token_ids)))
        return original(output, active)

    monkeypatch.setattr(engine, "generation_of", spy)
    return recorded


def record_cached_tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Prompt tokens that each request took from the prefix cache."""
    recorded: list[int] = []
    original = requests.generation_of

    def spy(output: Any, active: requests.EngineRequest) -> Generation:
        recorded.append(output.num_cached_tokens)
        return original(output, active)

    monkeypatch.setattr(engine, "generation_of", spy)
    return recorded
