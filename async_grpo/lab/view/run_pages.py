"""The routes of runs, curves, sweeps and reports: JSON for the page, and reports as HTML for a frame without
scripts."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote, unquote, urlsplit

import msgspec
import numpy as np
from fastapi import APIRouter, HTTPException, Query
from fastapi.responses import FileResponse, HTMLResponse, Response
from markdown_it import MarkdownIt
from markdown_it.token import Token

from async_grpo.app.runs.run import RunStatus, is_run
from async_grpo.config.load import differing_keys
from async_grpo.lab.view.catalog import SWEEP_RECORD, KnownRun, RunsRoot
from async_grpo.lab.view.columns import READ_S, chart_facts, curve_groups, thinned
from async_grpo.lab.view.vendor import UPLOT, is_there
from async_grpo.telemetry.charts import (
    AGES,
    BUFFER,
    FAMILIES,
    HELD_OUT,
    IDLE,
    RELEASED,
    ROLLOUT_IDLE,
    TOKENS_BY_AGE,
    TRAINER_IDLE,
)
from async_grpo.utils.dotted import look_up
from async_grpo.utils.files import read_end

LOG_BYTES = 64 << 10
"""Most bytes of a log that are shown, from its end."""
_FOLD = re.compile(r"<details><summary>(.+)</summary>|</details>")
"""A line that opens or closes a collapsible section of a report."""
SHOWN_BY_MEAN = (TRAINER_IDLE, ROLLOUT_IDLE)
"""Curves whose last value says little about the run: at its end one side always waits."""
Axis = Literal["step", "time"]
Runs = Annotated[list[str], Query(max_length=50)]
Keys = Annotated[list[str], Query(max_length=200)]


def run_routes(root: RunsRoot) -> APIRouter:
    """The routes of runs: the list, and one of them."""
    routes = APIRouter()

    @routes.get("/api/runs")
    def runs() -> list[dict[str, Any]]:
        """All runs, the latest first."""
        until = time.monotonic() + READ_S
        return [run.brief(until - time.monotonic()) for run in root.runs()]

    @routes.get("/api/runs/{name}")
    def one_run(name: str) -> dict[str, Any]:
        """Figures, settings, evaluations and warnings of a run."""
        return root.run(name).details()

    @routes.get("/api/runs/{name}/summary")
    def summary(name: str) -> dict[str, Any]:
        """The figures of the whole run, with its bottleneck and restarts; {} while it is live."""
        return root.run(name).summary()

    @routes.get("/api/runs/{name}/staleness")
    def staleness(name: str, x: Axis = "step") -> dict[str, Any]:
        """Shares of tokens by age, the buffer's capacity, and what became of the groups of a finished run."""
        run = root.run(name)
        brief = run.brief(0)  # the page asks for curves at the same time, and that reads
        return {
            "ages": run.columns.ages(x),
            "capacity": brief["capacity"],
            "totals": run.run.written_summary().get("groups"),
        }

    @routes.get("/api/runs/{name}/logs/{role}")
    def log(name: str, role: str) -> dict[str, str]:
        """The end of a role's log."""
        end = read_end(_file_in(root.find(name), "logs", f"{role}.log"), LOG_BYTES)
        return {"role": role, "text": end.decode("utf-8", "replace")}

    return routes


def curve_routes(root: RunsRoot) -> APIRouter:
    """The routes that compare runs: their curves and their settings."""
    routes = APIRouter()

    @routes.get("/api/metrics")
    def metrics() -> dict[str, Any]:
        """The charts of the page, and whether this installation has the chart library."""
        return {
            "groups": curve_groups(),
            "families": [chart_facts(chart) for chart in FAMILIES],
            "held_out": chart_facts(HELD_OUT),
            "staleness": [chart_facts(chart) for chart in (AGES, IDLE, BUFFER, RELEASED)],
            "tokens_by_age": chart_facts(TOKENS_BY_AGE),
            "charts": is_there(UPLOT),
        }

    @routes.get("/api/curves")
    def curves(run: Runs, key: Keys, x: Axis = "step") -> Response:
        """The curves of each run, key -> [x, y], and its evaluations."""
        until = time.monotonic() + READ_S
        found = [curves_of(root.run(one), key, x, until - time.monotonic()) for one in run]
        return Response(msgspec.json.encode(found), media_type="application/json")  # 20 times as fast as FastAPI's own

    @routes.get("/api/differences")
    def differences(run: Runs) -> list[dict[str, Any]]:
        """The settings in which the runs differ: a key, and its value in each."""
        return differences_of([root.run(one) for one in run])

    return routes


def report_routes(root: RunsRoot) -> APIRouter:
    """The routes of reports and their plots, and the list of sweeps."""
    routes = APIRouter()

    @routes.get("/api/sweeps")
    def sweeps() -> list[dict[str, Any]]:
        """The sweeps, the newest first."""
        runs = root.runs()
        return [_sweep_facts(root, path, runs) for path in root.sweeps()]

    @routes.get("/reports/{kind}/{name}/report")
    def report(kind: Literal["runs", "sweeps"], name: str, theme: Literal["light", "dark"] = "light") -> HTMLResponse:
        """report.md as a page."""
        file = _file_in(folder_of(kind, name), "report.md")
        return HTMLResponse(
            markdown_page(file.read_text("utf-8", "replace"), theme, lambda href: other_report(file, href))
        )

    @routes.get("/reports/{kind}/{name}/plots/{plot}")
    def plot(kind: Literal["runs", "sweeps"], name: str, plot: str) -> FileResponse:
        """A plot of a report."""
        if not plot.endswith(".png"):
            raise HTTPException(404, "plots are PNG files")
        return FileResponse(_file_in(folder_of(kind, name), "plots", plot))

    def folder_of(kind: str, name: str) -> Path:
        return root.find(name) if kind == "runs" else root.sweep(name)

    def other_report(file: Path, href: str) -> str | None:
        """The page of the run whose report.md is linked from this one; None for any other link."""
        linked = (file.parent / href).resolve()
        is_run_report = linked.name == file.name and is_run(linked.parent) and linked.is_relative_to(root.path)
        return f"/#/run/{quote(root.id_of(linked.parent), safe='')}/report" if is_run_report else None

    return routes


def curves_of(run: KnownRun, keys: list[str], axis: Axis, budget_s: float) -> dict[str, Any]:
    """The curves of a run and its evaluations. A key that ends in a dot stands for all keys that begin with it."""
    columns, until = run.columns, time.monotonic() + budget_s
    brief = run.brief(budget_s)
    read = min(brief["read"], columns.update_servers(until - time.monotonic()) if ROLLOUT_IDLE in keys else 1.0)
    facts = {key: brief[key] for key in ("id", "name", "status", "age_bound", "max_staleness")}
    with columns.lock:
        x, known = columns.x(axis), columns.keys()
        wanted = [one for key in keys for one in (known if key.endswith(".") else [key]) if one.startswith(key)]
        points = {key: thinned(x, columns.column(key)) for key in wanted}
        means = columns.means([key for key in wanted if key in SHOWN_BY_MEAN])
        evaluations = _evaluations(run, axis)
    curves = {key: [part.tolist() for part in xy] for key, xy in points.items() if len(xy[0])}
    return {**facts, "read": read, "curves": curves, "means": means, "evaluations": evaluations}


def _evaluations(run: KnownRun, axis: Axis) -> list[dict[str, Any]]:
    """The evaluations with their coordinate on the axis; on the time axis, when their version was trained."""
    steps, times = run.columns.column("step"), run.columns.x("time")
    found = []
    for row in run.run.evaluations():
        version = row["version"]
        place = min(int(np.searchsorted(steps, version)), len(steps) - 1)
        at = version if axis == "step" else float(times[place]) if len(times) else 0.0
        shown = {key: row.get(key) for key in ("version", "sampled_accuracy", "greedy_accuracy")}
        found.append({**shown, "x": at, "mean": (row.get("figures") or {}).get("mean")})
    return found


def differences_of(runs: list[KnownRun]) -> list[dict[str, Any]]:
    """The dotted keys of config.yaml that differ between any two runs, with the value in each."""
    settings = [run.run.settings() for run in runs]
    keys = {key for other in settings[1:] for key in differing_keys(settings[0], other, ignored=("name",))}
    return [{"key": key, "values": [look_up(each, key) for each in settings]} for key in sorted(keys)]


def _sweep_facts(root: RunsRoot, path: Path, runs: list[KnownRun]) -> dict[str, Any]:
    own = [run for run in runs if run.run.path.is_relative_to(path)]
    return {
        "id": root.id_of(path),
        "name": str(path.relative_to(root.path)) if path != root.path else path.name,
        "points": len(_json_of(path / SWEEP_RECORD).get("points") or []),
        "runs": [run.id for run in own],
        "finished": sum(run.run.status() is RunStatus.FINISHED for run in own),
        "recommended": (_json_of(path / "sweep.json").get("choice") or {}).get("label"),
        "has_report": (path / "report.md").is_file(),
        "changed_s": path.stat().st_mtime,
    }


def _json_of(file: Path) -> dict[str, Any]:
    """The object in the file; {} if it is missing or torn."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _file_in(folder: Path, *parts: str) -> Path:
    """A file of the folder. Raises HTTPException if it is not there, or a link leads out of it."""
    path = folder.joinpath(*parts)
    plain = not any(part in ("", "..") or "/" in part or "\0" in part for part in parts)
    if plain and path.is_file() and path.resolve().is_relative_to(folder):
        return path
    raise HTTPException(404, f"{folder.name} has no {'/'.join(parts)} yet")


def markdown_page(text: str, theme: str, page_of: Callable[[str], str | None]) -> str:
    """Markdown as HTML. Markup in it is escaped, except for collapsible sections. Links to http and https open a new
    window; `page_of` returns the page for any other link, or None if there is none."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(text)
    for token in [each for block in tokens for each in (block, *(block.children or []))]:
        if token.attrs.pop("style", None) == "text-align:right":  # which the page's policy forbids
            token.attrs["class"] = "number"
        if token.type == "link_open" and urlsplit(href := str(token.attrs["href"])).scheme in ("http", "https"):
            token.attrs.update(target="_blank", rel="noopener noreferrer")
        elif token.type == "link_open" and (page := page_of(unquote(href))):
            token.attrs.update(href=page, target="_top")
    _fold(tokens)
    body = parser.renderer.render(tokens, parser.options, {})
    head = '<meta charset="utf-8"><title>Report</title><link rel="stylesheet" href="/static/page.css">'
    return f'<!doctype html><html lang="en" data-theme="{theme}"><head>{head}</head><body class="report">{body}</body>'


def _fold(tokens: list[Token]) -> None:
    """Render the collapsible sections of a report."""
    for place, token in enumerate(tokens):
        if token.type == "inline" and (found := _FOLD.fullmatch(token.content)):
            token.type, token.children = "html_block", None
            token.content = f"<details><summary>{escape(found[1])}</summary>\n" if found[1] else "</details>\n"
            tokens[place - 1].hidden = tokens[place + 1].hidden = True  # its paragraph
