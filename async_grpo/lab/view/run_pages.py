"""Routes of runs, curves, sweeps and reports: JSON for the page, and reports as HTML for a frame without scripts."""

from __future__ import annotations

import json
import re
import time
from collections import deque
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
from async_grpo.lab.view.catalog import SWEEP_RECORD, RunsRoot, ViewedRun
from async_grpo.lab.view.columns import READ_S, describe_chart, downsample, group_curves
from async_grpo.lab.view.vendor import UPLOT, is_unpacked
from async_grpo.telemetry.charts import (
    AGES,
    BUFFER,
    FAMILIES,
    HELD_OUT,
    IDLE,
    OVERVIEW,
    RELEASED,
    ROLLOUT_IDLE,
    TOKENS_BY_AGE,
    TRAINER_IDLE,
)
from async_grpo.utils.dotted import look_up
from async_grpo.utils.files import read_end

LOG_BYTES = 64 << 10
"""Maximum bytes of a log that are shown, from its end."""
MAX_LOG_LINES = 500
"""Maximum lines that a search in a log returns."""
LogLevel = Literal["any", "warning", "error"]
LOG_RANKS = {"warning": 1, "error": 2, "critical": 3}
_LOG_LEVEL = re.compile(r'(?i)(?:^|[\s"])(debug|info|warning|error|critical)(?=[\s":])')
"""The level in a line of `telemetry.logging`, as text or JSON, and of most libraries."""
_DETAILS_TAG = re.compile(r"<details><summary>(.+)</summary>|</details>")
"""A line that opens or closes a collapsible section of a report."""
SHOWN_BY_MEAN = (TRAINER_IDLE, ROLLOUT_IDLE, "tokens_per_s", *(series.key for series in BUFFER.series))
"""Curves summarised by their mean. Their last value means little: at the end of a run one side always waits, the buffer
is empty, and the last step waits for an evaluation."""
Axis = Literal["step", "time"]
Runs = Annotated[list[str], Query(max_length=50)]
Keys = Annotated[list[str], Query(max_length=200)]


def run_routes(root: RunsRoot) -> APIRouter:
    """Return the routes of the list of runs and of a single run."""
    routes = APIRouter()

    @routes.get("/api/runs")
    def runs() -> list[dict[str, Any]]:
        """Return all runs, the latest first."""
        until = time.monotonic() + READ_S  # shared by all runs
        viewed = root.viewed_runs()
        differing = find_settings_of_points(root, viewed)
        return [{**run.list_entry(until - time.monotonic()), "differing": differing.get(run.id, {})} for run in viewed]

    @routes.get("/api/run-names")
    def run_names() -> list[str]:
        """Return the ids of all runs, the latest first. Reads no metrics, so it is fast for any folder."""
        return [run.id for run in root.viewed_runs()]

    @routes.get("/api/runs/{name}")
    def run_details(name: str) -> dict[str, Any]:
        """Return verdict, progress, settings, evaluations and warnings of a run."""
        return root.find_run(name).details()

    @routes.get("/api/runs/{name}/advice")
    def advice(name: str) -> dict[str, Any]:
        """Return the main cause of waiting and the advice for it, as `async-grpo why` prints them."""
        return root.find_run(name).advice()

    @routes.get("/api/runs/{name}/staleness")
    def staleness(name: str, x: Axis = "step") -> dict[str, Any]:
        """Return shares of tokens by age, the buffer's capacity, and the outcomes of a finished run's groups."""
        run = root.find_run(name)
        entry = run.list_entry(0)  # the page requests curves in parallel, and that request reads
        return {
            "ages": run.columns.age_shares(x),
            "capacity": entry["capacity"],
            "totals": run.run.written_summary().get("groups"),
        }

    @routes.get("/api/runs/{name}/logs/{role}")
    def log(name: str, role: str, q: str = "", level: LogLevel = "any") -> dict[str, Any]:
        """Return the end of a role's log; with `q` or `level`, the last matching lines of the whole log."""
        file = _file_in(root.find_run_folder(name), "logs", f"{role}.log")
        if q or level != "any":
            return {"role": role, **search_log(file, q, level)}
        text = read_end(file, LOG_BYTES).decode("utf-8", "replace")
        return {"role": role, "text": text, "cut": file.stat().st_size > LOG_BYTES}

    @routes.get("/api/runs/{name}/logs/{role}/file")
    def log_file(name: str, role: str) -> FileResponse:
        """Return a role's whole log as a download."""
        file = _file_in(root.find_run_folder(name), "logs", f"{role}.log")
        return FileResponse(file, media_type="text/plain; charset=utf-8", filename=f"{name}-{role}.log")

    return routes


def search_log(file: Path, text: str, level: LogLevel) -> dict[str, Any]:
    """Return the last lines that contain `text`, in either case, and have at least this level.

    A line without a level, such as one of a traceback, belongs to the line before it.
    """
    wanted = text.lower()
    rank = 0
    lines: deque[str] = deque(maxlen=MAX_LOG_LINES)
    matches = 0
    with file.open(encoding="utf-8", errors="replace") as log:
        for line in log:
            match = _LOG_LEVEL.search(line[:200])
            if match is not None:
                rank = LOG_RANKS.get(match[1].lower(), 0)
            if rank >= LOG_RANKS.get(level, 0) and wanted in line.lower():
                matches += 1
                lines.append(line)
    return {"text": "".join(lines), "cut": matches > len(lines)}


def curve_routes(root: RunsRoot) -> APIRouter:
    """Return the routes that compare runs: their curves and their settings."""
    routes = APIRouter()

    @routes.get("/api/metrics")
    def metrics() -> dict[str, Any]:
        """Return the charts of the page; `charts` is true if the chart library is installed."""
        return {
            "groups": group_curves(),
            "families": [describe_chart(chart) for chart in FAMILIES],
            "held_out": describe_chart(HELD_OUT),
            "staleness": [describe_chart(chart) for chart in (AGES, IDLE, BUFFER, RELEASED)],
            "tokens_by_age": describe_chart(TOKENS_BY_AGE),
            "overview": {
                question: [describe_chart(chart) for chart in charts] for question, charts in OVERVIEW.items()
            },
            "charts": is_unpacked(UPLOT),
        }

    @routes.get("/api/curves")
    def run_curves(run: Runs, key: Keys, x: Axis = "step") -> Response:
        """Return the curves of each run, key -> [x, y], and its evaluations."""
        until = time.monotonic() + READ_S
        curves = [read_curves(root.find_run(run_id), key, x, until - time.monotonic()) for run_id in run]
        # msgspec encodes 20 times as fast as FastAPI.
        return Response(msgspec.json.encode(curves), media_type="application/json")

    @routes.get("/api/differences")
    def differences(run: Runs) -> list[dict[str, Any]]:
        """Return the settings in which the runs differ: a key, and its value in each run."""
        return find_differences([root.find_run(run_id) for run_id in run])

    return routes


def report_routes(root: RunsRoot) -> APIRouter:
    """Return the routes of reports and their plots, and of the list of sweeps."""
    routes = APIRouter()

    @routes.get("/api/sweeps")
    def sweeps() -> list[dict[str, Any]]:
        """Return the sweeps, the newest first."""
        runs = root.viewed_runs()
        return [_sweep_entry(root, path, runs) for path in root.sweep_folders()]

    @routes.get("/reports/{kind}/{name}/report")
    def report(kind: Literal["runs", "sweeps"], name: str, theme: Literal["light", "dark"] = "light") -> HTMLResponse:
        """Return report.md as a page."""
        file = _file_in(find_folder(kind, name), "report.md")
        text = file.read_text("utf-8", "replace")
        return HTMLResponse(render_markdown(text, theme, lambda href: linked_report(file, href)))

    @routes.get("/reports/{kind}/{name}/plots/{plot}")
    def plot(kind: Literal["runs", "sweeps"], name: str, plot: str) -> FileResponse:
        """Return a plot of a report."""
        if not plot.endswith(".png"):
            raise HTTPException(404, "plots are PNG files")
        return FileResponse(_file_in(find_folder(kind, name), "plots", plot))

    def find_folder(kind: str, name: str) -> Path:
        return root.find_run_folder(name) if kind == "runs" else root.find_sweep_folder(name)

    def linked_report(file: Path, href: str) -> str | None:
        """Return the page of the run whose report.md is linked from `file`; None for any other link."""
        target = (file.parent / href).resolve()
        is_run_report = target.name == file.name and is_run(target.parent) and target.is_relative_to(root.path)
        if not is_run_report:
            return None
        return f"/#/run/{quote(root.make_id(target.parent), safe='')}/report"

    return routes


def read_curves(run: ViewedRun, keys: list[str], axis: Axis, budget_s: float) -> dict[str, Any]:
    """Return the curves of a run and its evaluations. A key that ends in a dot selects all keys with that prefix."""
    columns = run.columns
    until = time.monotonic() + budget_s
    entry = run.list_entry(budget_s)
    read = entry["read"]
    if ROLLOUT_IDLE in keys:
        read = min(read, columns.read_new_spans(until - time.monotonic()))

    # Other requests read new rows in parallel. All curves of an answer must have the same steps.
    with columns.lock:
        x = columns.x_values(axis)
        selected = _expand_prefixes(keys, columns.keys())
        points = {key: downsample(x, columns.column(key)) for key in selected}
        means = columns.mean_values([key for key in selected if key in SHOWN_BY_MEAN])
        evaluations = _evaluations(run, axis)

    curves = {}
    for key, (xs, ys) in points.items():
        if len(xs):
            curves[key] = [xs.tolist(), ys.tolist()]
    return {
        **{key: entry[key] for key in ("id", "name", "status", "age_bound", "max_staleness")},
        "read": read,
        "curves": curves,
        "means": means,
        "evaluations": evaluations,
    }


def _expand_prefixes(keys: list[str], existing: list[str]) -> list[str]:
    """Replace each key that ends in a dot by the existing keys that start with it."""
    expanded = []
    for key in keys:
        if key.endswith("."):
            expanded += [name for name in existing if name.startswith(key)]
        else:
            expanded.append(key)
    return expanded


def _evaluations(run: ViewedRun, axis: Axis) -> list[dict[str, Any]]:
    """Return the evaluations with their coordinate on the axis; on the time axis, when their version was trained."""
    steps = run.columns.column("step")
    times = run.columns.x_values("time")
    evaluations = []
    for row in run.run.evaluations():
        version = row["version"]
        x = version
        if axis == "time":
            index = min(int(np.searchsorted(steps, version)), len(steps) - 1)
            x = float(times[index]) if len(times) else 0.0
        evaluation = {key: row.get(key) for key in ("version", "sampled_accuracy", "greedy_accuracy")}
        evaluation["x"] = x
        evaluation["mean"] = (row.get("figures") or {}).get("mean")
        evaluations.append(evaluation)
    return evaluations


def find_differences(runs: list[ViewedRun]) -> list[dict[str, Any]]:
    """Return the dotted keys of config.yaml that differ between any two runs, with the value in each run."""
    settings = [run.settings() for run in runs]
    keys: set[str] = set()
    for other in settings[1:]:
        keys.update(differing_keys(settings[0], other, ignored=("name", "runs_dir")))
    return [{"key": key, "values": [look_up(config, key) for config in settings]} for key in sorted(keys)]


def find_settings_of_points(root: RunsRoot, runs: list[ViewedRun]) -> dict[str, dict[str, Any]]:
    """Return for each run of a sweep the settings in which its points differ: run id -> {key: value}."""
    settings: dict[str, dict[str, Any]] = {}
    for folder in root.sweep_folders():
        points = [run for run in runs if run.run.path.is_relative_to(folder)]
        for difference in find_differences(points):
            for run, value in zip(points, difference["values"], strict=True):
                settings.setdefault(run.id, {})[difference["key"]] = value
    return settings


def _sweep_entry(root: RunsRoot, path: Path, runs: list[ViewedRun]) -> dict[str, Any]:
    members = [run for run in runs if run.run.path.is_relative_to(path)]
    return {
        "id": root.make_id(path),
        "name": str(path.relative_to(root.path)) if path != root.path else path.name,
        "points": len(_read_object(path / SWEEP_RECORD).get("points") or []),
        "runs": [run.id for run in members],
        "finished": sum(run.run.status() is RunStatus.FINISHED for run in members),
        "recommended": (_read_object(path / "sweep.json").get("choice") or {}).get("label"),
        "has_report": (path / "report.md").is_file(),
        "changed_s": path.stat().st_mtime,
    }


def _read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in the file; {} if it is missing or incomplete."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _file_in(folder: Path, *parts: str) -> Path:
    """Return a file of the folder. Raises HTTPException if it does not exist, or if a link leads out of the folder."""
    path = folder.joinpath(*parts)
    is_plain = not any(part in ("", "..") or "/" in part or "\0" in part for part in parts)
    if is_plain and path.is_file() and path.resolve().is_relative_to(folder):
        return path
    raise HTTPException(404, f"{folder.name} has no {'/'.join(parts)} yet")


def render_markdown(text: str, theme: str, find_page: Callable[[str], str | None]) -> str:
    """Return Markdown as an HTML page. Markup in it is escaped, except for collapsible sections.

    Links to http and https open a new window. `find_page` returns the page for any other link, or None.
    """
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(text)
    for block in tokens:
        for token in (block, *(block.children or [])):
            # The page's Content-Security-Policy forbids inline styles, so right-aligned cells get a class.
            if token.attrs.pop("style", None) == "text-align:right":
                token.attrs["class"] = "number"
            if token.type == "link_open":
                _rewrite_link(token, find_page)
    _render_collapsible_sections(tokens)
    body = parser.renderer.render(tokens, parser.options, {})
    head = '<meta charset="utf-8"><title>Report</title><link rel="stylesheet" href="/static/page.css">'
    return f'<!doctype html><html lang="en" data-theme="{theme}"><head>{head}</head><body class="report">{body}</body>'


def _rewrite_link(token: Token, find_page: Callable[[str], str | None]) -> None:
    href = str(token.attrs["href"])
    if urlsplit(href).scheme in ("http", "https"):
        token.attrs.update(target="_blank", rel="noopener noreferrer")
        return
    page = find_page(unquote(href))
    if page:
        token.attrs.update(href=page, target="_top")  # the report is in a frame


def _render_collapsible_sections(tokens: list[Token]) -> None:
    """Turn the escaped <details> lines of a report back into HTML."""
    for index, token in enumerate(tokens):
        if token.type != "inline":
            continue
        match = _DETAILS_TAG.fullmatch(token.content)
        if match is None:
            continue
        summary = match[1]
        token.type = "html_block"
        token.children = None
        token.content = f"<details><summary>{escape(summary)}</summary>\n" if summary else "</details>\n"
        # Hide the <p> and </p> around the line: HTML does not allow <details> in a paragraph.
        tokens[index - 1].hidden = True
        tokens[index + 1].hidden = True
