"""Log-probabilities reported by vLLM's own sampler."""

from __future__ import annotations

import pytest
import torch

from rollout_server.engines.vllm.compat import report_sampled_logprobs

TEMPERATURE = 0.8


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_a_sampler_in_any_mode_is_switched_to_logprobs_at_the_temperature(mode: str) -> None:
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler

    rows, vocabulary = 3, 11
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(1))
    none = torch.zeros(rows)
    metadata = SamplingMetadata(
        temperature=torch.full((rows,), TEMPERATURE),
        all_greedy=False,
        all_random=True,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=0,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=none,
        presence_penalties=none,
        repetition_penalties=none,
        output_token_ids=[[] for _ in range(rows)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    sampler = Sampler(mode)
    report_sampled_logprobs(sampler)
    output = sampler(logits.clone(), metadata)
    expected = (logits / TEMPERATURE).log_softmax(-1).gather(1, output.sampled_token_ids.long())
    torch.testing.assert_close(output.logprobs_tensors.logprobs[:, :1], expected)
