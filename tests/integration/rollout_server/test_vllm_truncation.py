"""Truncated sampling by the real vLLM: the reported tokens and log-probabilities against Hugging Face in float64."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from async_grpo.wire import Sample
from rollout_server.engines.base import Generation, GenerationRequest, Truncation
from rollout_server.engines.proof import kept_tokens, prove_logprobs
from rollout_server.workflows.session import SampleSession
from tests.support.vllm_lab import EXACT, STOP_TOKENS, VOCABULARY, Lab, prompt_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

TEMPERATURE = 0.8
MINDRLHF = Truncation(20, top_p=0.8, repetition_penalty=1.05)
TRUNCATIONS = [Truncation(20), Truncation(20, top_p=0.9), Truncation(20, min_p=0.05), MINDRLHF]


def scaled_logits(lab: Lab, context: Sequence[int], truncation: Truncation) -> np.ndarray:
    """log-probabilities [V] of the token after `context` before truncation, with penalty and temperature."""
    model = lab.models[lab.engine.version].double()
    with torch.no_grad():
        logits = model(torch.tensor([list(context)])).logits[0, -1]
    model.float()
    repeated = torch.zeros_like(logits, dtype=torch.bool)
    repeated[torch.tensor(sorted(set(context)))] = True
    penalty = truncation.repetition_penalty
    penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
    return (torch.where(repeated, penalised, logits) / TEMPERATURE).log_softmax(-1).numpy()


def errors(
    lab: Lab, prompt: Sequence[int], generation: Generation, truncation: Truncation, *, since: int = 0
) -> tuple[float, float]:
    """Largest errors of the reported log-probabilities, over the kept tokens and over the whole vocabulary."""
    assert generation.sampling_mask is not None
    over_kept, over_all = [0.0], [0.0]
    tokens = generation.tokens.tolist()
    for position in range(since, len(tokens)):
        scaled = scaled_logits(lab, [*prompt, *tokens[:position]], truncation)
        kept = generation.sampling_mask.slice_rows(position, position + 1).token_ids.tolist()
        inner = kept_tokens(scaled, truncation, slack=-1e-4)
        assert inner <= set(kept) <= kept_tokens(scaled, truncation, slack=1e-4)
        expected = scaled[tokens[position]] - np.log(np.exp(scaled[kept]).sum())
        over_kept.append(abs(float(generation.logprobs[position]) - expected))
        over_all.append(abs(float(generation.logprobs[position]) - scaled[tokens[position]]))
    return max(over_kept), max(over_all)


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
async def test_reported_tokens_and_logprobs_are_those_of_the_truncated_distribution(
    tied_lab: Lab, truncation: Truncation
) -> None:
    prompts = [prompt_of(3 + 5 * index, index) for index in range(6)]
    requests = [
        GenerationRequest(f"cut{index}", prompt, 24, TEMPERATURE, seed=index, truncation=truncation)
        for index, prompt in enumerate(prompts)
    ]
    generations = await asyncio.gather(*(tied_lab.engine.generate(request) for request in requests))
    for prompt, generation in zip(prompts, generations, strict=True):
        over_kept, over_all = errors(tied_lab, prompt, generation, truncation)
        assert over_kept < EXACT
        assert over_all > 100 * EXACT  # without the mask, each token would be off by the mass that was cut


@pytest.mark.parametrize("truncation", [TRUNCATIONS[1], MINDRLHF], ids=str)
async def test_a_resumed_completion_of_several_turns_has_one_mask(tied_lab: Lab, truncation: Truncation) -> None:
    """The first session is left in the middle of its second turn; another one continues from its sample."""
    prompt = prompt_of(9, 4)
    observation = prompt_of(5, 5)

    def session(max_tokens: int, prior: Sample | None = None) -> SampleSession:
        return SampleSession(
            tied_lab.engine,
            f"session{max_tokens}",
            prompt,
            seed=3,
            temperature=TEMPERATURE,
            max_tokens=max_tokens,
            prior=prior,
            truncation=truncation,
        )

    async def observe() -> list[int]:
        return observation

    short = session(12)
    await short.turn()
    first = short.sample("")
    # As if the engine had been interrupted after 12 tokens: the turn has no finish reason, so it is continued.
    prior = replace_sample(first, finish_reason="")
    long = session(30, prior)
    await long.turn()
    whole = long.sample("")
    whole.validate()
    assert whole.token_ids()[:12].tolist() == first.token_ids().tolist()

    mask = whole.sampling_mask()
    assert mask is not None
    generation = Generation(whole.token_ids(), whole.token_logprobs(), whole.spans, "", mask)
    assert errors(tied_lab, prompt, generation, truncation)[0] < EXACT

    talk = session(60)
    talk.limit(60)
    await talk.turn()
    await talk.observe(observe)
    written = talk.sample("")
    written.validate()
    rows = written.sampling_mask()
    assert rows is not None and len(rows) == written.length


def replace_sample(sample: Sample, **fields: object) -> Sample:
    from msgspec import structs

    return structs.replace(sample, **fields)


async def test_the_proof_passes_and_refuses_an_engine_that_ignores_top_p(tied_lab: Lab) -> None:
    async def prove(truncation: Truncation) -> object:
        return await prove_logprobs(
            tied_lab.engine,
            vocabulary=VOCABULARY,
            temperature=TEMPERATURE,
            precision="float32",
            timeout_s=60,
            truncation=truncation,
        )

    for truncation in TRUNCATIONS:
        assert await prove(truncation) is not None


async def test_a_request_in_flight_shows_its_kept_tokens(tied_lab: Lab) -> None:
    truncation = Truncation(20, top_p=0.9)
    request = GenerationRequest("peeked", prompt_of(6, 1), 200, TEMPERATURE, seed=1, truncation=truncation)
    generating = asyncio.create_task(tied_lab.engine.generate(request))
    partial = None
    while partial is None and not generating.done():
        await asyncio.sleep(0.01)
        partial = tied_lab.engine.peek("peeked")
    final = await generating
    assert partial is not None and partial.sampling_mask is not None and final.sampling_mask is not None
    count = len(partial.tokens)
    head = final.sampling_mask.slice_rows(0, count)
    assert head.token_ids.tolist() == partial.sampling_mask.token_ids.tolist()
    assert final.logprobs[:count].tolist() == partial.logprobs.tolist()


async def test_no_stop_token_can_be_sampled_before_min_tokens(tied_lab: Lab) -> None:
    """The prefix counts, and the log-probabilities are over the tokens that are left."""
    truncation = Truncation(64, min_tokens=6)
    prompt, prefix = prompt_of(5, 3), prompt_of(2, 8)
    requests = [
        GenerationRequest(f"least{index}", prompt, 8, TEMPERATURE, index, prefix=prefix, truncation=truncation)
        for index in range(12)
    ]
    generations = await asyncio.gather(*(tied_lab.engine.generate(request) for request in requests))
    stop_tokens, later = set(STOP_TOKENS), set()
    for generation in generations:
        assert len(generation.tokens) >= 4 and generation.sampling_mask is not None
        for position in range(len(generation.tokens)):
            kept = set(generation.sampling_mask.slice_rows(position, position + 1).token_ids.tolist())
            if position < 4:
                assert not kept & stop_tokens
            else:
                later |= kept & stop_tokens
            context = [*prompt, *prefix, *generation.tokens[:position].tolist()]
            scaled = scaled_logits(tied_lab, context, truncation)
            token = int(generation.tokens[position])
            expected = scaled[token] - np.log(np.exp(scaled[sorted(kept)]).sum())
            assert abs(float(generation.logprobs[position]) - expected) < EXACT
    assert later


async def test_truncated_and_whole_requests_share_an_engine(tied_lab: Lab) -> None:
    prompt = prompt_of(7, 2)
    whole = GenerationRequest("whole", prompt, 20, TEMPERATURE, seed=2)
    cut = replace(whole, request_id="cut", truncation=Truncation(5))
    together = await asyncio.gather(*(tied_lab.engine.generate(request) for request in (whole, cut)))
    alone = await tied_lab.engine.generate(replace(whole, request_id="again"))
    assert together[0].sampling_mask is None
    assert together[0].tokens.tolist() == alone.tokens.tolist()
    assert together[1].sampling_mask is not None and int(together[1].sampling_mask.counts.max()) <= 6
