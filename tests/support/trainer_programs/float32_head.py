"""Log-probabilities and gradients of a bfloat16 model, compared with float64 numbers from the same hidden states.

    python -m tests.support.trainer_programs.float32_head CASES.json

Rank 0 computes the largest error of a log-probability, that of the gradient of its slice of the output layer relative
to the largest element, and the gradient of the last norm, to which the gradients of all slices contribute.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from async_grpo.config import RunConfig
from tests.support.trainer_programs.batches import make_batch
from tests.support.trainer_programs.running import run_cases
from trainer.platform import Platform


def run(config: RunConfig, case: dict[str, Any], platform: Platform) -> None:
    import torch
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
    from torch.nn.functional import one_hot

    from trainer.batch.packing import own_micro_batches
    from trainer.model.policy import load_policy
    from trainer.ranks.distributed import is_rank_zero

    policy = load_policy(config, Path(case["model"]), platform)
    weights = dict(policy.export_trained())
    hidden: list[torch.Tensor] = []

    def keep_hidden_states(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
        states = output.detach()
        if config.trainer.sequence_parallel:
            states = gather_from_sequence_parallel_region(states)
        hidden.append(states)

    policy.model.decoder.register_forward_hook(keep_hidden_states)
    batches = own_micro_batches(make_batch(0), config)
    policy.zero_grad()
    found = policy.run_micro_batches(
        batches, lambda logprobs_N, _entropy, _batch: (logprobs_N.sum(), logprobs_N.detach()), train=True
    )
    if not is_rank_zero():
        return

    head_VH = weights["lm_head.weight"].double()
    gradient_VH, errors = torch.zeros_like(head_VH), []
    for batch, hidden_T1H, logprobs_N in zip(batches, hidden, found, strict=True):
        hidden_NH = hidden_T1H[batch.trained_N, 0].double()
        expected_NV = (hidden_NH @ head_VH.t() / config.sampling.temperature).log_softmax(-1)
        errors.append((logprobs_N - expected_NV.gather(1, batch.labels_N[:, None])[:, 0]).abs().max().item())
        difference_NV = one_hot(batch.labels_N, len(head_VH)) - expected_NV.exp()
        gradient_VH += difference_NV.t() @ hidden_NH / config.sampling.temperature

    own_VH = policy.model.output_layer.weight.main_grad
    expected_VH = gradient_VH[: len(own_VH)]
    result = {
        "logprob_error": max(errors),
        "gradient_error": ((own_VH - expected_VH).abs().max() / expected_VH.abs().max()).item(),
        "norm_gradient": policy.model.decoder.final_layernorm.weight.main_grad.tolist(),
    }
    Path(case["out"]).write_text(json.dumps(result))


if __name__ == "__main__":
    run_cases(run)
