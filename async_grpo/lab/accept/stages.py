"""The stages of `async-grpo accept`: what each asks of the two sides, and what must come out.

    doctor -> collectives -> numbers -> graphs -> behaviour -> weights -> publish -> resume -> run

Each is a function of the lab that returns figures. A figure with a limit fails the stage when it is above it. Whatever
a stage raises is its error.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import shutil
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from async_grpo.config import RunConfig
from async_grpo.errors import RoleFailed
from async_grpo.lab.accept.lab import HOST_RANKS, STEPS, TEMPERATURE, Lab
from async_grpo.lab.doctor import checks_of
from async_grpo.telemetry.jsonl import read_rows
from async_grpo.telemetry.rows import rows_of_kind

PROMPTS, NEW_TOKENS = 16, 48
MOST_SERVERS = 4


@dataclass(frozen=True, slots=True)
class Figure:
    """Something that a stage has measured. It is right (`ok`) unless it is above `at_most` or below `at_least`."""

    name: str
    value: float | str
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None
    ok: bool = True
    fix: str = ""
    """What to do if it is not right; "" for the advice of the stage."""

    def __str__(self) -> str:
        shown = f"{self.value:.3g}" if isinstance(self.value, float) else str(self.value)
        limit = "" if self.at_most is None else f" (at most {self.at_most:g})"
        if self.at_least is not None:
            limit = f" (at least {self.at_least:g})"
        return f"{self.name} {shown}{' ' if self.unit else ''}{self.unit}{limit}"


def confirmed(name: str, truth: bool, fix: str = "") -> Figure:
    """A statement that must be true."""
    return Figure(name, "yes" if truth else "NO", ok=truth, fix=fix)


def bounded(name: str, value: float | str, at_most: float, fix: str = "") -> Figure:
    """A figure with a limit; NaN and an error in place of a number are above every limit."""
    right = not isinstance(value, str) and value <= at_most
    return Figure(name, value, at_most=at_most, ok=right, fix=fix)


def reaching(name: str, value: float, at_least: float, unit: str = "") -> Figure:
    """A figure that must not be smaller; NaN is too small."""
    return Figure(name, value, unit, at_least=at_least, ok=value >= at_least)


@dataclass(frozen=True, slots=True)
class Tolerances:
    """The largest errors that rounding explains, at one precision of the weights."""

    attention: float
    gradient: float
    logprob_mean: float
    logprob_max: float


TOLERANCES = {
    "float32": Tolerances(attention=1e-5, gradient=1e-4, logprob_mean=2e-5, logprob_max=1e-3),
    "bfloat16": Tolerances(attention=2e-2, gradient=5e-2, logprob_mean=2e-2, logprob_max=0.3),
}
"""bfloat16 has 8 bits of mantissa: half a unit in the last place is 0.4%, and there are a few roundings in a row."""

DROPPED_FLOAT64 = (
    "all_reduce drops float64 results: something replaces torch.distributed.all_reduce, as MindSpeed does. The trainer "
    "does not use it for float64, but functions of your own (trainer.objective) must not either"
)
RAW_LOGPROBS = (
    "the engine's log-probabilities are not those of the sampled distribution: at this temperature every importance "
    "weight would be biased. Check that rollout.vllm.extra leaves logprobs_mode alone, and the versions in "
    "docs/platforms.md"
)
STALE_WEIGHTS = (
    "the engine goes on multiplying with old weights after an update (a tied lm_head that keeps its packed or captured "
    "copy looks like this). Set rollout.vllm.enforce_eager to true and repeat --stage weights: if that mends it, "
    "captured graphs read other memory than the update writes"
)


async def doctor(lab: Lab) -> list[Figure]:
    """The findings of `async-grpo doctor`."""
    findings = [await asyncio.to_thread(check) for check in checks_of(lab.platform.name)]
    return [Figure(each.name, each.found, ok=each.ok is not False, fix=each.fix) for each in findings]


async def collectives(lab: Lab) -> list[Figure]:
    """Every collective over all devices, in every dtype that is sent."""
    ranks = len(lab.devices) or HOST_RANKS
    config, model = lab.config("accept", ranks=ranks), await lab.model()
    for old in lab.work.glob("rank-*.json"):
        old.unlink()
    argv = lab.program(lab.programs.rank, config, model, "--collectives", str(lab.work))
    await lab.run_program("collectives", argv, trains=True)
    told = [json.loads((lab.work / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    figures = [Figure("ranks", ranks)]
    for name in told[0]:
        worst = max((each[name] for each in told), key=lambda value: math.inf if isinstance(value, str) else value)
        dropped = name == "all_reduce float64 on the host"
        figure = bounded(name, worst, 0.0, DROPPED_FLOAT64 if dropped else "")
        known = dropped and lab.platform.name == "npu"  # MindSpeed's doing, which nothing here relies on
        figures.append(Figure(f"{name}: dropped, as MindSpeed does", worst) if known and not figure.ok else figure)
    return figures


async def numbers(lab: Lab) -> list[Figure]:
    """Attention, log-probabilities and gradients of the platform's layers against the CPU in float64."""
    found, allowed = await lab.ask("rank", "numbers"), TOLERANCES[lab.precision]
    return [
        bounded("attention, relative error", found["attention"], allowed.attention),
        bounded("its gradients, relative error", found["attention_gradient"], allowed.attention),
        bounded("log-probability, mean error", found["logprob_mean"], allowed.logprob_mean),
        bounded("log-probability, largest error", found["logprob_max"], allowed.logprob_max),
        bounded("gradients of the model, largest relative error", found["gradient"], allowed.gradient),
        Figure("tokens", found["tokens"]),
        bounded("memory at its peak", found["peak_gib"], found["total_gib"]),
    ]


async def graphs(lab: Lab) -> list[Figure]:
    """An engine with captured graphs loads two versions, and decodes what each of them does; one with a planted layer
    that graphs do not follow must be found, and run without graphs."""
    await lab.end("engine")
    right = await lab.ask("engine", "graphs", planted=False)
    wrong = await lab.ask("engine", "graphs", planted=True)
    await lab.end("engine")
    figures = [] if lab.devices else [Figure("graphs", "none on a CPU; the planted layer imitates one")]
    if check := right["check"]:
        figures += [
            bounded("decoded tokens after an update, mean gap", check["gap"], check["allowed"]),
            Figure("distance of the two versions", check["distance"]),
            Figure("two loads", check["load_s"], "s"),
            Figure("the whole check", check["check_s"], "s"),
        ]
    return [
        confirmed("captured graphs follow an update", not right["note"], right["note"]),
        confirmed("a planted layer that stays behind is found", "decoded tokens differ" in wrong["note"]),
        *figures,
        Figure("the planted engine", wrong["note"] or "runs with captured graphs"),
    ]


async def behaviour(lab: Lab) -> list[Figure]:
    """The engine's log-probabilities against the trainer's, of completions sampled at T = 0.8."""
    proof = await lab.ask("engine", "start")
    figures = [Figure("proof of the engine alone, largest gap", proof["gap_max"])] if proof else []
    return [*await _gap(lab, 0, RAW_LOGPROBS), *figures]


async def weights(lab: Lab) -> list[Figure]:
    """Two steps of the trainer, each published and loaded: every byte, and what the engine then samples."""
    figures = [Figure("captured graphs", "no" if lab.config("accept").rollout.vllm.is_eager else "yes")]
    for number in (1, 2):
        version = await _publish(lab, number)
        published, arrived = version["sent"]["digests"], await lab.ask("engine", "weights")
        broken = sorted(name for name, digest in published.items() if arrived["digests"].get(name) != digest)
        figures += [
            Figure("tensors", len(published)),
            _none("tensors that arrived otherwise", broken),
            _none("tensors that the engine does not multiply with", arrived["differing"]),
            *await _gap(lab, number, STALE_WEIGHTS),
        ]
    return figures


async def publish(lab: Lab) -> list[Figure]:
    """One publication, timed from the trainer's call to the engine's next token."""
    version = await _publish(lab, 3)
    sent, taken = version["sent"], version["taken"]
    seconds = sent["stall_s"] + taken["seconds"]
    return [
        Figure("bytes", sent["bytes"]),
        Figure("from the trainer's call until the engine goes on", seconds, "s"),
        Figure("rate", sent["bytes"] / 1e9 / seconds, "GB/s"),
        Figure("stall of the trainer", sent["stall_s"], "s"),
        Figure("transfer, from the manifest until everything is received", taken["transfer_s"], "s"),
        Figure("pause of the engine", taken["pause_s"], "s"),
        Figure("of it, loading the weights", taken["load_s"], "s"),
    ]


async def resume(lab: Lab) -> list[Figure]:
    """Steps, a checkpoint, one more step, SIGKILL in the middle of the next; then all of it again from the disk."""
    await lab.end("engine")
    saved = await lab.ask("rank", "steps", versions=[10, 11])
    await lab.ask("rank", "save", version=12)
    before = await lab.ask("rank", "steps", versions=[12])
    lab.tell("rank", "steps", versions=[13])
    await lab.end("rank")
    loaded = await lab.ask("rank", "load", version=12)
    after = await lab.ask("rank", "steps", versions=[12])
    far = max(abs(one - other) for one, other in zip(before["logprobs"], after["logprobs"], strict=True))
    exact = 0.0 if not lab.devices else TOLERANCES[lab.precision].logprob_max / 10
    return [
        confirmed("weights, masters and moments are loaded bit for bit", saved["digest"] == loaded["digest"]),
        bounded("log-probabilities after the next step, largest difference", far, exact),
        Figure("the next step is the same bit for bit", "yes" if before["digest"] == after["digest"] else "no"),
        confirmed("a step changes the weights", saved["digest"] != before["digest"]),
    ]


async def run(lab: Lab) -> list[Figure]:
    """Ten steps by `async-grpo run`, and its books."""
    half = max(1, len(lab.devices) // 2)
    config = lab.config("ten-steps", ranks=half, servers=max(1, min(len(lab.devices) - half, MOST_SERVERS)))
    summary = await finished_run(lab, config)
    rows = rows_of_kind(read_rows(config.run_dir / "metrics.jsonl"), "step")
    ages = [int(age) for row in rows for age, tokens in row["age_histogram"].items() if tokens]
    gap, allowed = summary["logprob_gap_mean"], TOLERANCES[lab.precision]
    return [
        confirmed(f"{STEPS} steps, each once", sorted(row["version"] for row in rows) == [*range(STEPS)]),
        bounded("age of the oldest trained token", max(ages, default=math.inf), config.max_staleness),
        bounded("gap of log-probabilities, mean", math.inf if gap is None else gap, allowed.logprob_mean, RAW_LOGPROBS),
        Figure("tokens of the gap", summary["gap_tokens"]),
        confirmed("every group is accounted for", bool(summary["balanced"])),
        confirmed("there are gradients", any(row["grad_norm"] > 0 for row in rows)),
        bounded("restarts of roles", sum(summary["restarts"].values()), 0),
        Figure("wall time", summary["wall_s"], "s"),
    ]


async def finished_run(lab: Lab, config: RunConfig) -> dict[str, Any]:
    """Run a configuration by `async-grpo run` to its end; returns its summary. Its logs go into those of the report."""
    await lab.end()
    argv = [sys.executable, "-m", "async_grpo.app.cli.main", "run", str(lab.file(config))]
    try:
        await lab.run_program("run", argv, trains=False)
    finally:
        if (config.run_dir / "logs").is_dir():
            shutil.copytree(config.run_dir / "logs", lab.logs / config.name, dirs_exist_ok=True)
    summary: dict[str, Any] = json.loads((config.run_dir / "summary.json").read_text())
    return summary


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage, the seconds that it may take, and what to do if it fails."""

    work: Callable[[Lab], Awaitable[list[Figure]]]
    limit_s: float
    fix: str
    needs: tuple[str, ...] = ()
    """Stages whose error (not: whose figures) makes this one pointless."""

    @property
    def name(self) -> str:
        """Its name on the command line."""
        return self.work.__name__


STAGES = {
    stage.name: stage
    for stage in (
        Stage(doctor, 300.0, "type what stands behind each finding, and repeat"),
        Stage(
            collectives,
            180.0,
            "run it with --devices and two devices, then with more. If it hangs, check HCCL_SOCKET_IFNAME or "
            "NCCL_SOCKET_IFNAME and the links between the devices (npu-smi info -t topo, nvidia-smi topo -m)",
        ),
        Stage(
            numbers,
            240.0,
            "the platform's layers do not compute what they should. On CUDA uninstall transformer-engine and repeat: "
            "if that mends it, its version is at fault; else send this report",
        ),
        Stage(
            graphs,
            900.0,
            "engines run without captured graphs, or would not notice that graphs keep old weights. Send this report",
        ),
        Stage(behaviour, 420.0, RAW_LOGPROBS),
        Stage(weights, 420.0, STALE_WEIGHTS, needs=("behaviour",)),
        Stage(
            publish, 120.0, "see the logs of both sides; /dev/shm needs four times the weights", needs=("behaviour",)
        ),
        Stage(
            resume,
            300.0,
            "a run would not survive a restart. Check megatron-core and MindSpeed against docs/platforms.md, and send "
            "this report",
            needs=("numbers",),
        ),
        Stage(run, 420.0, "logs/run.log names the role that failed; its own log is in logs/ten-steps"),
    )
}


async def _gap(lab: Lab, version: int, fix: str) -> list[Figure]:
    """Sample at T = 0.8, and have the trainer, whose weights are those of `version`, evaluate the same tokens."""
    drawn, vocabulary = random.Random(version), lab.sizes["vocab_size"]
    prompts = [[drawn.randrange(3, vocabulary) for _ in range(3 + 5 * place)] for place in range(PROMPTS)]
    samples = await lab.ask("engine", "generate", prompts=prompts, max_tokens=NEW_TOKENS, temperature=TEMPERATURE)
    gap = await lab.ask("rank", "gap", version=version, samples=samples)
    allowed = TOLERANCES[lab.precision]
    if not gap["gap_tokens"]:
        raise RoleFailed("the gap covers no token: nothing was compared")
    return [
        bounded(
            f"gap at T = {TEMPERATURE}, version {version}, mean", gap["logprob_gap_mean"], allowed.logprob_mean, fix
        ),
        bounded(
            f"gap at T = {TEMPERATURE}, version {version}, largest", gap["logprob_gap_max"], allowed.logprob_max, fix
        ),
        Figure("tokens", gap["gap_tokens"]),
    ]


async def _publish(lab: Lab, version: int) -> dict[str, Any]:
    """One step of the trainer, and its weights in the engine."""
    await lab.ask("engine", "start")
    await lab.ask("rank", "steps", versions=[version])
    sent = await lab.ask("rank", "publish", version=version)
    return {"sent": sent, "taken": await lab.ask("engine", "receive", address=sent["address"])}


def _none(name: str, found: list[str]) -> Figure:
    """A list that must be empty; a few of its names are shown."""
    return bounded(f"{name}{': ' if found else ''}{', '.join(found[:3])}", len(found), 0.0, STALE_WEIGHTS)
