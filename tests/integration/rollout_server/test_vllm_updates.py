"""After every update the engine multiplies with exactly the weights of the store, bit for bit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from async_grpo.wire import VersionSpan
from rollout_server.engines.base import Generation, GenerationRequest
from rollout_server.engines.vllm.engine import VllmEngine
from tests.support.vllm_lab import EXACT, Lab, engine_of, prompt_of, started_lab

pytestmark = pytest.mark.asyncio(loop_scope="session")

MODEL_BYTES = 608_512  # of the reference model, without a tied output layer
MLP = "model.layers.1.mlp"
ATTENTION = "model.layers.0.self_attn"

Weights = dict[str, npt.NDArray[np.float32]]


async def test_every_weight_equals_the_store_after_each_update(lab: Lab) -> None:
    assert_same(await engine_weights(lab), expected_weights(lab, lab.engine.version))
    for _ in range(4):
        version = await lab.update("keep")
        assert_same(await engine_weights(lab), expected_weights(lab, version))


@pytest.mark.parametrize(
    "moved",
    [
        [f"{ATTENTION}.k_proj.weight"],
        [f"{MLP}.up_proj.weight"],
        [f"{ATTENTION}.q_proj.bias", f"{MLP}.down_proj.weight", "model.norm.weight"],
        ["model.embed_tokens.weight"],
        [],
    ],
    ids=["part of a fused matrix", "part of another", "several", "embedding", "nothing"],
)
async def test_partial_and_full_updates_give_the_same_weights(lab: Lab, moved: list[str]) -> None:
    version = await lab.update("keep", moved=moved, noted=moved)
    assert_same(await engine_weights(lab), expected_weights(lab, version))
    generation = await lab.generate(prompt_of(10, 1), 30)
    assert [span.version for span in generation.spans] == [version]
    assert lab.error(prompt_of(10, 1), generation) < EXACT


async def test_updates_keep_tensor_addresses(lab: Lab) -> None:
    (before,) = await lab.engine._llm.collective_rpc("addresses")
    await lab.update("keep")
    await lab.update("keep", moved=[f"{MLP}.up_proj.weight"], noted=[f"{MLP}.up_proj.weight"])
    assert len(before) > 4
    assert await lab.engine._llm.collective_rpc("addresses") == [before]


@pytest.mark.slow
async def test_a_compiled_engine_uses_the_new_weights(tmp_path: Path) -> None:
    async with started_lab(tmp_path, tied=False, enforce_eager=False) as compiled:
        assert compiled.engine.note == ""
        for how in ("keep", "recompute"):
            await compiled.update(how)
            generation = await compiled.generate(prompt_of(10, 1), 40)
            assert compiled.error(prompt_of(10, 1), generation) < EXACT


async def test_tensors_noted_as_unchanged_are_not_loaded(lab: Lab) -> None:
    before = await lab.update("keep")
    after = await lab.update("keep", moved=None, noted=[f"{MLP}.gate_proj.weight"])
    old, new = expected_weights(lab, before), expected_weights(lab, after)
    mixed = {name: new[name] if name.startswith(MLP) else old[name] for name in old}
    assert_same(await engine_weights(lab), mixed)
    version = await lab.update("keep")  # without a note: everything is loaded
    assert_same(await engine_weights(lab), expected_weights(lab, version))


@pytest.mark.parametrize("share", [1.0, 0.5], ids=["a room for all", "a room for half"])
async def test_staged_versions_are_loaded_exactly_from_the_buffer(share: float, tmp_path: Path) -> None:
    staging_gib = share * 1.2 * MODEL_BYTES / (1 << 30)
    async with started_lab(tmp_path, tied=False, staging_gib=staging_gib) as lab:
        running = asyncio.create_task(lab.generate(prompt_of(5, 9), 400))
        for moved in (None, [f"{MLP}.up_proj.weight"], None):
            version = await lab.update("keep", moved=moved, noted=moved)
            assert_same(await engine_weights(lab), expected_weights(lab, version))
            (staged,) = await lab.engine._llm.collective_rpc("staged_bytes")
            assert 0 < staged <= share * 1.2 * MODEL_BYTES
        assert len((await running).tokens) == 400
        held = lab.publish(moved=None, noted=None)
        transfer, llm = lab.engine._transfer, lab.engine.async_llm
        await transfer.stage_weights(llm, held)
        # Staging alone does not change the model.
        assert_same(await engine_weights(lab), expected_weights(lab, version))
        await llm.collective_rpc("clear_staged")
        await transfer.announce_update(llm)
        await transfer.load_weights(llm, held)
        zeros = [name for name, weights in (await engine_weights(lab)).items() if not weights.any()]
        assert zeros  # the zeroed buffer was loaded


@pytest.mark.slow
async def test_an_updated_engine_samples_like_a_fresh_one(untied_lab: Lab, tmp_path: Path) -> None:
    lab = untied_lab
    await lab.update("keep")
    version = await lab.update("keep", moved=[f"{MLP}.up_proj.weight"], noted=[f"{MLP}.up_proj.weight"])
    lab.models[version].save_pretrained(tmp_path)
    fresh = engine_of(tmp_path)
    await fresh.start()
    try:
        for seed in range(3):
            request = GenerationRequest(f"same{seed}", prompt_of(20, seed), 60, seed=seed)
            updated, reference = await lab.engine.generate(request), await fresh.generate(request)
            assert updated.tokens.tolist() == reference.tokens.tolist()
            assert updated.logprobs.tobytes() == reference.logprobs.tobytes()
    finally:
        await fresh.aclose()


@pytest.mark.slow
async def test_two_workers_load_their_shards_from_one_store(tmp_path: Path) -> None:
    async with started_lab(tmp_path, tied=True, tensor_parallel=2, multiprocessing=True, staging_gib=0.01) as lab:
        moved = [f"{ATTENTION}.v_proj.weight", "model.embed_tokens.weight"]
        running = asyncio.create_task(lab.generate(prompt_of(5, 9), 400))
        await lab.update("keep")
        await lab.update("recompute", moved=moved, noted=moved)
        for weights in await shards(lab):
            rows = weights["model.embed_tokens.weight"].shape[0]
            assert rows == lab.models[-1].config.vocab_size // 2
        generation = await lab.generate(prompt_of(10, 1), 40)
        assert generation.spans == [VersionSpan(1, 0, 40)]
        assert lab.error(prompt_of(10, 1), generation) < EXACT
        assert len((await running).tokens) == 400


async def test_updates_lose_or_cut_no_request_and_spans_are_exact(untied_lab: Lab) -> None:
    lab = untied_lab
    ended = asyncio.Event()
    done: list[tuple[int, Generation]] = []

    async def stream(index: int) -> None:
        random = np.random.default_rng(index)
        while not ended.is_set():
            asked = int(random.integers(50, 201))
            done.append((asked, await lab.generate(prompt_of(16, index), asked)))

    async with asyncio.timeout(120), asyncio.TaskGroup() as streams:
        for index in range(32):
            streams.create_task(stream(index))
        for _ in range(9):
            await lab.update("keep")
            await asyncio.sleep(0.5)
        ended.set()
    assert any(len(generation.spans) > 1 for _, generation in done)
    assert lab.engine.disputed_spans == 0
    for asked, generation in done:
        assert (len(generation.tokens), generation.finish_reason) == (asked, "length")
        edges = [0, *(span.end for span in generation.spans)]
        versions = [span.version for span in generation.spans]
        assert [span.start for span in generation.spans] == edges[:-1] and edges[-1] == asked
        assert versions == sorted(set(versions))


async def test_a_lagging_front_end_labels_tokens_correctly(untied_lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = untied_lab
    disputed = lab.engine.disputed_spans
    with front_end_lagging_in_pauses(lab.engine, monkeypatch):
        requests = [asyncio.create_task(lab.generate(prompt_of(4, index), 400)) for index in range(8)]
        while lab.engine.load().running < len(requests):
            await asyncio.sleep(0.001)
        version = await lab.update("keep")
        made = await asyncio.gather(*requests)
    versions = [[span.version for span in generation.spans] for generation in made]
    assert versions == [[version - 1, version]] * len(made)
    assert lab.engine.disputed_spans == disputed


@contextmanager
def front_end_lagging_in_pauses(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make vLLM's front end take 15 ms for each of the next 24 outputs after a pause is requested, yielding after each.

    It is then further behind than the 20 ms that vLLM waits at the end of a pause.
    """
    import vllm.envs

    llm = engine.async_llm
    process, pause = llm.output_processor.process_outputs, llm.pause_generation
    slow_outputs = 0

    def process_slowly(*arguments: Any, **options: Any) -> Any:
        nonlocal slow_outputs
        if slow_outputs:
            slow_outputs -= 1
            time.sleep(0.015)
        return process(*arguments, **options)

    async def pause_generation(**options: Any) -> None:
        nonlocal slow_outputs
        slow_outputs = 24
        await pause(**options)

    with monkeypatch.context() as patch:
        patch.setattr(llm.output_processor, "process_outputs", process_slowly)
        patch.setattr(llm, "pause_generation", pause_generation)
        patch.setattr(vllm.envs, "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE", 1)
        restart_output_handler(llm)
        yield
    restart_output_handler(llm)


def restart_output_handler(llm: Any) -> None:
    llm.output_handler.cancel()
    llm.output_handler = None
    llm._run_output_handler()


async def shards(lab: Lab) -> list[Weights]:
    """Weights that every worker multiplies with."""
    answers = await lab.engine._llm.collective_rpc("read_weights")
    return [
        {name: np.frombuffer(data, np.float32).reshape(shape) for name, (shape, data) in answer.items()}
        for answer in answers
    ]


async def engine_weights(lab: Lab) -> Weights:
    (weights,) = await shards(lab)
    return weights


def expected_weights(lab: Lab, version: int) -> Weights:
    """The store's tensors under vLLM's names, fused as vLLM fuses them."""
    tensors = lab.tensors(version)
    expected = {name: tensor for name, tensor in tensors.items() if "norm" in name}
    for layer in range(2):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        for kind, key in (("weight", "packed"), ("bias", "bias")):
            parts = [tensors[f"{attention}.{part}_proj.{kind}"] for part in "qkv"]
            expected[f"{attention}.qkv_proj.{key}"] = np.concatenate(parts)
        expected[f"{mlp}.gate_up_proj.packed"] = np.concatenate(
            [tensors[f"{mlp}.gate_proj.weight"], tensors[f"{mlp}.up_proj.weight"]]
        )
        expected[f"{attention}.o_proj.packed"] = tensors[f"{attention}.o_proj.weight"]
        expected[f"{mlp}.down_proj.packed"] = tensors[f"{mlp}.down_proj.weight"]
    embedding = tensors["model.embed_tokens.weight"]
    head = tensors.get("lm_head.weight", embedding)
    return expected | {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "lm_head.packed": head}


def assert_same(actual: Weights, expected: Weights) -> None:
    """`model.embed_tokens.packed` is never multiplied with."""
    assert actual.keys() - {"model.embed_tokens.packed"} == expected.keys()
    differing = [name for name in expected if not np.array_equal(actual[name], expected[name])]
    assert differing == []
