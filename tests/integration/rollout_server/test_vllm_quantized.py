"""Quantised engines: their matrices equal a fresh quantisation of each version, their logprobs a reference model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio
import torch

from async_grpo.config.rollout import Quantization
from async_grpo.weights.base import HeldWeights
from rollout_server.engines.base import Generation
from tests.support.vllm_lab import FAR, FIRST_PROMPT, Lab, started_lab

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

LARGEST = {"int8": 127.0, "fp8": 448.0}
ROOM_GIB = 0.02
WORKER = "rollout_server.engines.vllm.worker.WorkerExtension"


@pytest_asyncio.fixture(
    params=[("int8", 0.0), ("fp8", 0.0), ("int8", ROOM_GIB), ("fp8", ROOM_GIB)],
    ids=["int8", "fp8", "int8 staged", "fp8 staged"],
    loop_scope="session",
    scope="module",
)
async def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    kind, room_gib = request.param
    folder = tmp_path_factory.mktemp(kind)
    extra = {"worker_extension_cls": WORKER}
    async with started_lab(folder, tied=False, quantization=kind, staging_gib=room_gib, extra=extra) as started:
        yield started
        (staged,) = await started.engine.async_llm.collective_rpc("staged_bytes")
        assert (staged > 0) == (room_gib > 0)


async def test_checkpoint_and_updates_are_quantised_alike(lab: Lab) -> None:
    before = await lab.engine.vocabulary_logprobs(FIRST_PROMPT)
    await lab.update("keep", moved=())
    assert await differing(lab, 0) == []
    assert (await lab.engine.vocabulary_logprobs(FIRST_PROMPT) == before).all()


async def test_updates_equal_a_fresh_quantisation(lab: Lab) -> None:
    version = await lab.update("keep")
    assert await differing(lab, version) == []
    for moved in (
        {"model.layers.1.mlp.gate_proj.weight"},
        {"model.layers.0.self_attn.v_proj.weight", "model.layers.0.self_attn.v_proj.bias", "lm_head.weight"},
    ):
        version = await lab.update("keep", moved=moved, noted=moved)
        assert await differing(lab, version) == []


async def test_the_oracle_detects_a_different_number(lab: Lab) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    await lab.update("keep")
    held = await lab.update("keep", moved={name}, noted=set())  # the note lists no change, so nothing is loaded
    assert {differing_name.removesuffix("_scale") for differing_name in await differing(lab, held)} == {name}
    await lab.update("keep")


async def test_logprobs_equal_those_of_a_model_with_quantised_matrices(lab: Lab) -> None:
    version = await lab.update("keep")
    generations = [await lab.generate(FIRST_PROMPT, 40) for _ in range(6)]
    unquantised_error = mean_error(lab, generations)
    lab.models[version] = with_rounded_matrices(lab.models[version], lab.engine._config.quantization)
    assert mean_error(lab, generations) < unquantised_error / 100
    assert unquantised_error > FAR


@pytest.mark.parametrize("kind", ["int8", "fp8"])
async def test_two_workers_load_their_shards_of_numbers_and_scales(tmp_path: Path, kind: Quantization) -> None:
    settings = {"quantization": kind, "tensor_parallel": 2, "multiprocessing": True}
    async with started_lab(tmp_path, tied=False, extra={"worker_extension_cls": WORKER}, **settings) as lab:
        version = await lab.update("keep")
        generations = [await lab.generate(FIRST_PROMPT, 40) for _ in range(3)]
        unquantised_error = mean_error(lab, generations)
        lab.models[version] = with_rounded_matrices(lab.models[version], kind, workers=2)
        assert mean_error(lab, generations) < unquantised_error / 100


def mean_error(lab: Lab, generations: Sequence[Generation]) -> float:
    """Mean error of log-probabilities. Engine and reference sum in different orders before they round activations, so a
    number between two 8-bit values sometimes becomes the other one."""
    errors = [np.abs(sample.logprobs - lab.reference(FIRST_PROMPT, sample)) for sample in generations]
    return float(np.concatenate(errors).mean())


async def differing(lab: Lab, version: int) -> list[str]:
    held = msgspec.json.encode(HeldWeights.in_store(lab.store.path, epoch=0, version=version)).decode()
    args = (held, lab.engine._config.quantization)
    (names,) = await lab.engine.async_llm.collective_rpc("differing_weights", args=args)
    return names


def with_rounded_matrices(model: Any, kind: Quantization, workers: int = 1) -> Any:
    """Multiply weights quantised per row with inputs quantised per token, in float32. With several workers, each
    quantises its own part of a token."""

    def rounded(values: torch.Tensor) -> torch.Tensor:
        scale = values.abs().amax(-1, keepdim=True) / LARGEST[kind]
        numbers = values / scale
        return (numbers.round() if kind == "int8" else numbers.to(torch.float8_e4m3fn).float()) * scale

    def of_each_worker(values: torch.Tensor) -> torch.Tensor:
        return torch.cat([rounded(part) for part in values.chunk(workers, -1)], -1)

    for name, layer in model.model.layers.named_modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data = rounded(layer.weight.data)
            of_token = of_each_worker if name.endswith(("o_proj", "down_proj")) else rounded
            layer.register_forward_pre_hook(lambda _, inputs, of_token=of_token: (of_token(inputs[0]),))
    return model
