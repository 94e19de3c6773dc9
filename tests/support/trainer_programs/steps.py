"""Steps of one or several updates, with a reference model, streamed, skipped, or resumed: one case after another.

    python -m tests.support.trainer_programs.steps CASES.json

A case: {"config": FILE, "model": FOLDER, "out": FILE} and, of `Case`, what differs from the default. `out` gets what is
to be compared as JSON; the weights lie beside it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from async_grpo.config import RunConfig
from async_grpo.errors import TrainingError
from async_grpo.telemetry.jsonl import read_rows
from async_grpo.wire import Batch, Ticket
from buffer.memory import InMemoryBuffer
from tests.support.trainer_programs.batches import make_aged_batch, make_batch
from tests.support.trainer_programs.running import run_cases
from trainer.platform import Platform


@dataclass(frozen=True)
class Case:
    """`aged`: the batch with everything in it, whose version is 5; else a batch of its own for each of `versions`."""

    config: str
    model: str
    out: str
    aged: bool = False
    truncated: bool = False
    """The samples of the aged batch have a sampling mask."""
    backwards: bool = False
    """The groups in reverse order."""
    versions: list[int] = field(default_factory=lambda: [0])
    parts: list[int] | None = None
    """Groups that arrive together, if the step is streamed."""
    buffered: bool = False
    """They come from a replay buffer."""
    poisoned: list[int] = field(default_factory=list)
    save_at: int | None = None
    resume: bool = False
    die: bool = False
    """End by SIGKILL."""
    logprobs: bool = False
    """Evaluate the tokens of batch 0 first; on a single rank."""
    swap: bool = False
    """Enter and leave the reference's weights once more, after the steps."""


class Scripted:
    """In place of the coordinator: hands out the case's groups."""

    devices = SimpleNamespace(engines_asleep=nullcontext)

    def __init__(self, case: Case) -> None:
        self._case = case

    def take_batch(self, version: int) -> Batch:
        if self._case.aged:
            batch = make_aged_batch(truncated=self._case.truncated)
        else:
            batch = make_batch(version, poisoned=version in self._case.poisoned)
        return replace(batch, groups=batch.groups[::-1]) if self._case.backwards else batch

    def take_batch_part(self, version: int, have: int) -> Batch:
        batch = self.take_batch(version)
        parts = self._case.parts
        assert parts is not None
        ends = [sum(parts[: number + 1]) for number in range(len(parts))]
        end = min(end for end in ends if end > have)
        return replace(batch, groups=batch.groups[have:end], missing=ends[-1] - end)


class Buffered:
    """Like the coordinator, with the in-memory buffer, into which more groups are put before each call."""

    devices = SimpleNamespace(engines_asleep=nullcontext)

    def __init__(self, config: RunConfig, case: Case) -> None:
        assert case.parts is not None
        self._parts = iter(case.parts)
        self._runner = asyncio.Runner()
        self._buffer = InMemoryBuffer(config.replay_policy, lease_s=60.0, max_attempts=3)
        self._groups = Scripted(case).take_batch(0).groups
        self._tickets = self._runner.run(self._open())

    async def _open(self) -> list[Ticket]:
        await self._buffer.put_tasks([replace(group.task, index=place) for place, group in enumerate(self._groups)])
        await self._buffer.rollback(0)
        return await self._buffer.admit_groups(len(self._groups), holder="scripted", timeout_s=5.0)

    def take_batch_part(self, version: int, have: int) -> Batch:
        return self._runner.run(self._put_and_take(version, have))

    async def _put_and_take(self, version: int, have: int) -> Batch:
        end = have + next(self._parts)
        for ticket, group in zip(self._tickets[have:end], self._groups[have:end], strict=True):
            await self._buffer.insert_group(ticket, replace(group, seq=ticket.seq))
        return await self._buffer.take_batch_part(epoch=1, version=version, have=have, timeout_s=5.0)


def run(config: RunConfig, case: Case, platform: Platform) -> None:
    from safetensors.torch import save_file

    from trainer.checkpoint.folder import CheckpointFolder
    from trainer.model.policy import load_policy
    from trainer.model.reference import load_reference
    from trainer.ranks.distributed import is_rank_zero

    policy = load_policy(config, Path(case.model), platform)
    reference = load_reference(config, policy, Path(case.model), platform)
    checkpoints = CheckpointFolder(config.run_dir / "checkpoints", config.trainer.checkpoint, reference)
    states = {"untouched": weights_of(policy)}
    if case.resume:
        newest = checkpoints.newest_version()
        assert newest == case.versions[0]
        checkpoints.load(policy, newest)
    values = logprobs(policy, config) if case.logprobs else []
    found = steps(config, case, policy, reference, checkpoints, states) | {"logprobs": values}
    if case.die:
        os.kill(os.getpid(), signal.SIGKILL)
    if case.swap:
        found["swap"] = swap(policy, reference)
    states["trained"] = weights_of(policy)
    if is_rank_zero():
        out = Path(case.out)
        for state, weights in states.items():
            save_file(weights, out.with_suffix(f".{state}.safetensors"))
        out.write_text(json.dumps(found))


def steps(
    config: RunConfig, case: Case, policy: Any, reference: Any, checkpoints: Any, states: dict[str, Any]
) -> dict[str, Any]:
    """Figures of each step, None for those that were skipped; and whether the weights of those stayed."""
    import torch
    from megatron.core.fusions.fused_bias_swiglu import SwiGLUFunction

    from trainer.loop import TrainerRun, train_next_version
    from trainer.ranks.distributed import is_rank_zero
    from trainer.run_logger import TrainerLogger

    logger = TrainerLogger(config)
    coordinator: Any = Buffered(config, case) if case.buffered else Scripted(case)
    run = TrainerRun(config, Path(case.model), policy, coordinator, checkpoints, logger, 0, reference=reference)
    found: dict[str, Any] = {"steps": [], "stayed": [], "stopped": ""}
    before = weights_of(policy)
    for version in case.versions:
        try:
            run.version = version
            run.has_trained = True
            made = train_next_version(run)
        except TrainingError as error:
            found["stopped"] = str(error)
            break
        assert made is not None
        after = weights_of(policy)
        states.setdefault("first", after)
        found["steps"].append(made.values)
        found["stayed"].append(all(torch.equal(tensor, before[name]) for name, tensor in after.items()))
        before = after
        if version + 1 == case.save_at:
            checkpoints.save(policy, version + 1, epoch=1)
    checkpoints.poll_saved(wait=True)
    found["passes"] = sorted(logger.phases.seconds)
    classes = {SwiGLUFunction, policy.model.rotation, *(type(layer) for layer in policy.model.modules())}
    found["layers"] = sorted(f"{each.__module__.partition('.')[0]}.{each.__name__}" for each in classes)
    logger.close()
    rows = read_rows(config.run_dir / "metrics.jsonl") if is_rank_zero() else []
    return found | {"warnings": [row["message"] for row in rows if row["kind"] == "warning"]}


def swap(policy: Any, reference: Any) -> dict[str, Any]:
    """Whether the weights inside are others, and whether everything outside came back bit for bit."""
    import torch

    from trainer.model.optimizer_state import parameter_states

    def everything() -> list[Any]:
        states = [tensor for _, state in parameter_states(policy.optimizer) for tensor in state.values()]
        masters = [parameter for parameter, _ in parameter_states(policy.optimizer)]
        return [tensor.detach().clone() for tensor in (*policy.model.parameters(), *masters, *states)]

    before = everything()
    with reference.activate_weights() as other:
        inside = weights_of(other)
    back = all(torch.equal(was, is_) for was, is_ in zip(before, everything(), strict=True))
    moved = [name for name, tensor in weights_of(policy).items() if not torch.equal(tensor, inside[name])]
    return {"back": back, "others": len(moved), "compared": len(before)}


def logprobs(policy: Any, config: RunConfig) -> list[float]:
    """Log-probabilities of the trained tokens of batch 0, in their packed order."""
    from trainer.batch.packing import own_micro_batches

    packed = own_micro_batches(make_batch(0), config)
    found = policy.run_micro_batches(
        packed, lambda values_N, _entropy, _batch: (values_N.sum(), values_N.tolist()), train=False
    )
    return [value for part in found for value in part]


def weights_of(policy: Any) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in policy.export_trained()}


if __name__ == "__main__":
    run_cases(lambda config, case, platform: run(config, Case(**case), platform))
