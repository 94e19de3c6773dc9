"""The stages of `async-grpo accept`: what each requests from the two programs, and which metrics must pass.

    doctor -> collectives -> numbers -> graphs -> behaviour -> weights -> publish -> resume -> run

Each stage is a function of the StageContext that returns metrics. A stage fails if a metric is outside its limit, or if
the function raises.
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
from async_grpo.lab.accept.context import HOST_RANKS, STEPS, TEMPERATURE, StageContext
from async_grpo.lab.doctor import machine_checks
from async_grpo.telemetry.jsonl import read_rows
from async_grpo.telemetry.rows import rows_of_kind

PROMPTS = 16
NEW_TOKENS = 48
MAX_SERVERS = 4


@dataclass(frozen=True, slots=True)
class StageMetric:
    """A value that a stage has measured. It passes (`ok`) unless it is above `at_most` or below `at_least`."""

    name: str
    value: float | str
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None
    ok: bool = True
    fix: str = ""
    """What to do if it fails; "" for the advice of the stage."""

    def __str__(self) -> str:
        value = f"{self.value:.3g}" if isinstance(self.value, float) else str(self.value)
        text = f"{self.name} {value}"
        if self.unit:
            text += f" {self.unit}"
        if self.at_least is not None:
            text += f" (at least {self.at_least:g})"
        elif self.at_most is not None:
            text += f" (at most {self.at_most:g})"
        return text


def require_true(name: str, condition: bool, fix: str = "") -> StageMetric:
    """Metric that passes if `condition` is true."""
    return StageMetric(name, "yes" if condition else "NO", ok=condition, fix=fix)


def require_at_most(name: str, value: float | str, at_most: float, fix: str = "") -> StageMetric:
    """Metric with an upper limit. NaN fails, and so does the text of an error instead of a number."""
    passes = not isinstance(value, str) and value <= at_most
    return StageMetric(name, value, at_most=at_most, ok=passes, fix=fix)


def require_at_least(name: str, value: float, at_least: float, unit: str = "") -> StageMetric:
    """Metric with a lower limit. NaN fails."""
    return StageMetric(name, value, unit, at_least=at_least, ok=value >= at_least)


def require_no_tensors(name: str, tensors: list[str]) -> StageMetric:
    """Metric that passes if the list of tensor names is empty; it shows the first three."""
    if tensors:
        name = f"{name}: {', '.join(tensors[:3])}"
    return require_at_most(name, len(tensors), 0.0, STALE_WEIGHTS)


@dataclass(frozen=True, slots=True)
class Tolerances:
    """Largest errors that rounding explains at one precision of the weights."""

    attention: float
    gradient: float
    logprob_mean: float
    logprob_max: float


TOLERANCES = {
    "float32": Tolerances(attention=1e-5, gradient=1e-4, logprob_mean=2e-5, logprob_max=1e-3),
    "bfloat16": Tolerances(attention=2e-2, gradient=5e-2, logprob_mean=2e-2, logprob_max=0.3),
}
"""bfloat16 has 8 bits of mantissa: half a unit in the last place is 0.4%, and several roundings follow one another."""

DROPPED_FLOAT64 = (
    "all_reduce drops float64 results: a package replaces torch.distributed.all_reduce, as MindSpeed does. The trainer "
    "does not reduce float64 with it. Your own functions (trainer.objective) must not either"
)
RAW_LOGPROBS = (
    "the engine's log-probabilities are not those of the sampled distribution. At this temperature every importance "
    "weight would be biased. Check that rollout.vllm.extra does not set logprobs_mode, and compare the versions with "
    "docs/platforms.md"
)
STALE_WEIGHTS = (
    "the engine multiplies with old weights after an update (a tied lm_head that keeps its packed or captured copy "
    "looks like this). Set rollout.vllm.enforce_eager to true and repeat --stage weights: if that fixes it, captured "
    "graphs read other memory than the update writes"
)


async def doctor(context: StageContext) -> list[StageMetric]:
    """Run the checks of `async-grpo doctor`."""
    findings = [await asyncio.to_thread(check) for check in machine_checks(context.platform.name)]
    return [
        StageMetric(finding.name, finding.found, ok=finding.ok is not False, fix=finding.fix) for finding in findings
    ]


async def collectives(context: StageContext) -> list[StageMetric]:
    """Run every collective over all devices, in every dtype that the trainer sends."""
    ranks = len(context.devices) or HOST_RANKS
    for old in context.work.glob("rank-*.json"):
        old.unlink()
    config = context.build_config("accept", ranks=ranks)
    model = await context.load_model()
    argv = context.program_argv(context.programs.rank, config, model, "--collectives", str(context.work))
    await context.run_program("collectives", argv, trains=True)

    errors_by_rank = [json.loads((context.work / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    metrics = [StageMetric("ranks", ranks)]
    for name in errors_by_rank[0]:
        largest = max((errors[name] for errors in errors_by_rank), key=_error_size)
        if name != "all_reduce float64 on the host":
            metrics.append(require_at_most(name, largest, 0.0))
            continue

        metric = require_at_most(name, largest, 0.0, DROPPED_FLOAT64)
        # MindSpeed drops float64 results on every npu. Nothing here relies on them, so we report it without failing.
        if not metric.ok and context.platform.name == "npu":
            metric = StageMetric(f"{name}: dropped, as MindSpeed does", largest)
        metrics.append(metric)
    return metrics


def _error_size(error: float | str) -> float:
    """Sort key: the text of an exception is worse than any number."""
    return math.inf if isinstance(error, str) else error


async def numbers(context: StageContext) -> list[StageMetric]:
    """Compare attention, log-probabilities and gradients of the platform's layers with the CPU in float64."""
    errors = await context.request("rank", "numbers")
    allowed = TOLERANCES[context.precision]
    return [
        require_at_most("attention, relative error", errors["attention"], allowed.attention),
        require_at_most("gradients of attention, relative error", errors["attention_gradient"], allowed.attention),
        require_at_most("log-probability, mean error", errors["logprob_mean"], allowed.logprob_mean),
        require_at_most("log-probability, largest error", errors["logprob_max"], allowed.logprob_max),
        require_at_most("gradients of the model, largest relative error", errors["gradient"], allowed.gradient),
        StageMetric("tokens", errors["tokens"]),
        require_at_most("peak memory", errors["peak_gib"], errors["total_gib"]),
    ]


async def graphs(context: StageContext) -> list[StageMetric]:
    """Check that captured graphs follow weight updates, and that the engine detects graphs that do not.

    The first engine loads two versions and decodes with each. The second one has a planted layer that graphs do not
    follow: the engine's own check must find it and fall back to running without graphs.
    """
    # Both requests start an engine with graphs. The engine of the other stages has to release its memory first.
    await context.stop_program("engine")
    normal = await context.request("engine", "graphs", planted=False)
    planted = await context.request("engine", "graphs", planted=True)
    await context.stop_program("engine")

    metrics = [
        require_true("captured graphs follow an update", not normal["note"], normal["note"]),
        require_true("a planted stale layer is detected", "decoded tokens differ" in planted["note"]),
    ]
    if not context.devices:
        metrics.append(StageMetric("graphs", "none on a CPU; the planted layer imitates one"))
    check = normal["check"]
    if check:
        metrics += [
            require_at_most("decoded tokens after an update, mean gap", check["gap"], check["allowed"]),
            StageMetric("distance of the two versions", check["distance"]),
            StageMetric("two loads", check["load_s"], "s"),
            StageMetric("the whole check", check["check_s"], "s"),
        ]
    metrics.append(StageMetric("the planted engine", planted["note"] or "runs with captured graphs"))
    return metrics


async def behaviour(context: StageContext) -> list[StageMetric]:
    """Compare the engine's log-probabilities with the trainer's, on completions sampled at T = 0.8."""
    proof = await context.request("engine", "start")
    metrics = await _measure_gap(context, 0, RAW_LOGPROBS)
    if proof:
        metrics.append(StageMetric("self-check of the engine, largest gap", proof["gap_max"]))
    return metrics


async def weights(context: StageContext) -> list[StageMetric]:
    """Publish and load the weights of two training steps; compare every byte and what the engine then samples."""
    eager = context.build_config("accept").rollout.vllm.is_eager
    metrics = [StageMetric("captured graphs", "no" if eager else "yes")]
    for version in (1, 2):
        update = await _update_engine(context, version)
        published = update.sent["digests"]
        received = await context.request("engine", "weights")
        changed = sorted(name for name, digest in published.items() if received["digests"].get(name) != digest)
        metrics += [
            StageMetric("tensors", len(published)),
            require_no_tensors("tensors that changed in transit", changed),
            require_no_tensors("tensors that the engine does not multiply with", received["differing"]),
            *await _measure_gap(context, version, STALE_WEIGHTS),
        ]
    return metrics


async def publish(context: StageContext) -> list[StageMetric]:
    """Time one weight update, from the trainer's call to the engine's next token."""
    update = await _update_engine(context, 3)
    sent, received = update.sent, update.received
    seconds = sent["stall_s"] + received["seconds"]
    return [
        StageMetric("bytes", sent["bytes"]),
        StageMetric("from the trainer's call until the engine resumes", seconds, "s"),
        StageMetric("rate", sent["bytes"] / 1e9 / seconds, "GB/s"),
        StageMetric("stall of the trainer", sent["stall_s"], "s"),
        StageMetric("transfer, from the manifest until everything is received", received["transfer_s"], "s"),
        StageMetric("pause of the engine", received["pause_s"], "s"),
        StageMetric("of the pause, loading the weights", received["load_s"], "s"),
    ]


async def resume(context: StageContext) -> list[StageMetric]:
    """Train, save a checkpoint, train one more step and kill the trainer during the next; then resume and compare."""
    await context.stop_program("engine")
    saved = await context.request("rank", "steps", versions=[10, 11])
    await context.request("rank", "save", version=12)
    before = await context.request("rank", "steps", versions=[12])

    # SIGKILL while step 13 runs: what the checkpoint has must suffice.
    context.send_request("rank", "steps", versions=[13])
    await context.stop_program("rank")
    loaded = await context.request("rank", "load", version=12)
    after = await context.request("rank", "steps", versions=[12])

    pairs = zip(before["logprobs"], after["logprobs"], strict=True)
    difference = max(abs(first - second) for first, second in pairs)
    # Device kernels may add in another order from one process to the next. The CPU has to be exact.
    allowed = TOLERANCES[context.precision].logprob_max / 10 if context.devices else 0.0
    return [
        require_true("weights, masters and moments are loaded bit for bit", saved["digest"] == loaded["digest"]),
        require_at_most("log-probabilities after the next step, largest difference", difference, allowed),
        StageMetric("the next step is the same bit for bit", "yes" if before["digest"] == after["digest"] else "no"),
        require_true("a step changes the weights", saved["digest"] != before["digest"]),
    ]


async def run(context: StageContext) -> list[StageMetric]:
    """Train ten steps with `async-grpo run` and check its metrics."""
    half = max(1, len(context.devices) // 2)
    servers = max(1, min(len(context.devices) - half, MAX_SERVERS))
    config = context.build_config("ten-steps", ranks=half, servers=servers)
    summary = await run_to_end(context, config)

    rows = rows_of_kind(read_rows(config.run_dir / "metrics.jsonl"), "step")
    ages = [int(age) for row in rows for age, tokens in row["age_histogram"].items() if tokens]
    gap = summary["logprob_gap_mean"]
    allowed = TOLERANCES[context.precision]
    return [
        require_true(f"{STEPS} steps, each once", sorted(row["version"] for row in rows) == [*range(STEPS)]),
        require_at_most("age of the oldest trained token", max(ages, default=math.inf), config.max_staleness),
        require_at_most(
            "gap of log-probabilities, mean", math.inf if gap is None else gap, allowed.logprob_mean, RAW_LOGPROBS
        ),
        StageMetric("tokens of the gap", summary["gap_tokens"]),
        require_true("every group is accounted for", bool(summary["balanced"])),
        require_true("some gradients are not zero", any(row["grad_norm"] > 0 for row in rows)),
        require_at_most("restarts of roles", sum(summary["restarts"].values()), 0),
        StageMetric("wall time", summary["wall_s"], "s"),
    ]


async def run_to_end(context: StageContext, config: RunConfig) -> dict[str, Any]:
    """Run a configuration with `async-grpo run` and return its summary. Its logs are copied into the report's."""
    # The child programs hold device memory that the run needs.
    await context.stop_all_programs()
    argv = [sys.executable, "-m", "async_grpo.app.cli.main", "run", str(context.write_config(config))]
    try:
        await context.run_program("run", argv, trains=False)
    finally:
        if (config.run_dir / "logs").is_dir():
            shutil.copytree(config.run_dir / "logs", context.logs / config.name, dirs_exist_ok=True)
    summary: dict[str, Any] = json.loads((config.run_dir / "summary.json").read_text())
    return summary


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage, its time limit, and what to do if it fails."""

    work: Callable[[StageContext], Awaitable[list[StageMetric]]]
    limit_s: float
    fix: str
    needs: tuple[str, ...] = ()
    """Stages whose error (not a failed metric) makes this one pointless."""

    @property
    def name(self) -> str:
        """Name on the command line."""
        return self.work.__name__


def stages_by_name(*stages: Stage) -> dict[str, Stage]:
    """Return the stages by name, in their order."""
    return {stage.name: stage for stage in stages}


STAGES = stages_by_name(
    Stage(doctor, limit_s=300.0, fix="run the command shown for each finding, and repeat"),
    Stage(
        collectives,
        limit_s=180.0,
        fix="run it with --devices and two devices, then with more. If it hangs, check HCCL_SOCKET_IFNAME or "
        "NCCL_SOCKET_IFNAME and the links between the devices (npu-smi info -t topo, nvidia-smi topo -m)",
    ),
    Stage(
        numbers,
        limit_s=240.0,
        fix="the platform's layers compute wrong values. On CUDA uninstall transformer-engine and repeat: if that "
        "fixes it, its version is at fault; otherwise send this report",
    ),
    Stage(
        graphs,
        limit_s=900.0,
        fix="engines run without captured graphs, or would not detect that graphs keep old weights. Send this report",
    ),
    Stage(behaviour, limit_s=420.0, fix=RAW_LOGPROBS),
    Stage(weights, limit_s=420.0, fix=STALE_WEIGHTS, needs=("behaviour",)),
    Stage(
        publish,
        limit_s=120.0,
        fix="read the logs of both programs; /dev/shm needs four times the size of the weights",
        needs=("behaviour",),
    ),
    Stage(
        resume,
        limit_s=300.0,
        fix="a run would not survive a restart. Compare the versions of megatron-core and MindSpeed with "
        "docs/platforms.md, and send this report",
        needs=("numbers",),
    ),
    Stage(run, limit_s=420.0, fix="logs/run.log names the role that failed; its log is in logs/ten-steps"),
)


async def _measure_gap(context: StageContext, version: int, fix: str) -> list[StageMetric]:
    """Sample at T = 0.8 and let the trainer, which has the weights of `version`, evaluate the same tokens."""
    generator = random.Random(version)
    vocabulary = context.model_sizes["vocab_size"]
    prompts = [[generator.randrange(3, vocabulary) for _ in range(3 + 5 * index)] for index in range(PROMPTS)]
    samples = await context.request(
        "engine", "generate", prompts=prompts, max_tokens=NEW_TOKENS, temperature=TEMPERATURE
    )
    gap = await context.request("rank", "gap", version=version, samples=samples)
    if not gap["gap_tokens"]:
        raise RoleFailed("the log-probability gap covers no token: nothing was compared")

    allowed = TOLERANCES[context.precision]
    name = f"gap at T = {TEMPERATURE}, version {version}"
    return [
        require_at_most(f"{name}, mean", gap["logprob_gap_mean"], allowed.logprob_mean, fix),
        require_at_most(f"{name}, largest", gap["logprob_gap_max"], allowed.logprob_max, fix),
        StageMetric("tokens", gap["gap_tokens"]),
    ]


@dataclass(frozen=True, slots=True)
class EngineUpdate:
    """Answers of the two programs to one weight update."""

    sent: dict[str, Any]
    received: dict[str, Any]


async def _update_engine(context: StageContext, version: int) -> EngineUpdate:
    """Train one step, publish its weights and load them into the engine."""
    await context.request("engine", "start")
    await context.request("rank", "steps", versions=[version])
    sent = await context.request("rank", "publish", version=version)
    received = await context.request("engine", "receive", address=sent["address"])
    return EngineUpdate(sent, received)
