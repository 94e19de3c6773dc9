"""`async-grpo buffer`: inspect, drain and export the buffer of a live run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.progress import Progress

from async_grpo.app.cli.common import RunConfigFile, RunDir, RunOverride, exit_with_code, print_line, progress_bar
from async_grpo.errors import ConfigError

if TYPE_CHECKING:
    from buffer.inspector import Inspector, Overview

app = typer.Typer(
    help="Inspect the groups of a live run in its buffer, drain it, or export them.\n\n"
    "Select the run by the CONFIG and -o of its start, or by --run-dir.",
    no_args_is_help=True,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Timeout = Annotated[
    float, typer.Option("--timeout", min=0, metavar="SECONDS", help="Seconds to wait for the groups in flight.")
]
DiscardReady = Annotated[
    bool, typer.Option("--discard-ready", help="At the end, release all READY groups untrained (as stale).")
]


@app.command()
@exit_with_code()
def stats(
    config: RunConfigFile = None,
    override: RunOverride = None,
    run_dir: RunDir = None,
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until Ctrl-C.")] = False,
    every_s: Annotated[
        float, typer.Option("--every", min=0.1, metavar="SECONDS", help="Seconds between refreshes with --watch.")
    ] = 1.0,
) -> int:
    """Show how full the buffer is, how old its groups are, and why groups were released.

    Also shows the head version, the oldest lease and the server's memory. Read-only. With --watch --json, every refresh
    prints one line of JSON.
    """
    refresh_s = every_s if watch else None
    return _run_attached(config, override, run_dir, lambda inspector: _show_overview(inspector, as_json, refresh_s))


@app.command()
@exit_with_code()
def inspect(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [ID]", help="CONFIG of the run (unless --run-dir), and a group's sequence number."
        ),
    ] = None,
    override: RunOverride = None,
    run_dir: RunDir = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Maximum number of groups to list per state.")] = 20,
    characters: Annotated[
        int, typer.Option("--characters", min=1, help="Maximum number of characters to show per text.")
    ] = 400,
    as_json: AsJson = False,
) -> int:
    """List the groups by state, or show everything stored about the group or waiting task ID.

    Records are decoded without a schema, so records of newer releases are readable too. Text is escaped, so model
    output cannot control the terminal. Read-only.
    """
    config, seq = _parse_config_and_id(words or [], run_dir)
    if seq is None:
        return _run_attached(config, override, run_dir, lambda inspector: _show_groups(inspector, limit, as_json))
    return _run_attached(
        config, override, run_dir, lambda inspector: _show_records(inspector, seq, characters, as_json)
    )


@app.command()
@exit_with_code()
def drain(
    config: RunConfigFile = None,
    override: RunOverride = None,
    run_dir: RunDir = None,
    timeout_s: Timeout = 600.0,
    discard_ready: DiscardReady = False,
    resume: Annotated[bool, typer.Option("--resume", help="Undo an earlier drain: reopen admission.")] = False,
) -> int:
    """Stop admission and wait until no group is in flight.

    1. The horizon of the run is set to 0 and the limit of the replay ratio is lifted. No new groups are admitted even
    if others are released. Processes that join or restart with the same configuration do not undo this.

    2. Groups in flight finish: their servers insert or discard them. Groups of a dead server go to another server when
    their lease expires. This command waits for all of them, for at most --timeout seconds.

    3. READY groups and waiting tasks stay. The trainer takes READY groups while they fill a batch. Then it waits for
    more, and fails after trainer.take_timeout_s.

    --resume restores the horizon and the limit. Groups released by --discard-ready stay released, and new groups take
    their slots. Resuming the run with other settings, such as more steps, also reopens admission.
    """
    if resume:
        return _run_attached(config, override, run_dir, _resume_admission)
    return _run_attached(config, override, run_dir, lambda inspector: _drain(inspector, timeout_s, discard_ready))


@app.command()
@exit_with_code()
def export(
    to: Annotated[
        Path, typer.Option("--to", metavar="FILE", help="File to write; its name ends in .jsonl or .msgpack.")
    ],
    config: RunConfigFile = None,
    override: RunOverride = None,
    run_dir: RunDir = None,
    state: Annotated[
        list[str] | None,
        typer.Option("--state", help="State to export: ready, taken or kept; may be repeated (default: all three)."),
    ] = None,
) -> int:
    """Export the stored groups to a file, ordered by sequence number. Read-only.

    READY groups wait for the trainer, TAKEN groups are being trained, and KEPT groups were trained and stay until a
    checkpoint contains them. Each entry has seq, state, step (the step that takes it) and group, the record itself:
    kind, format, seq, attempt, task, samples (tokens, logprobs, spans, text, rewards, ...), server, times.

    A .jsonl file has one JSON object per line, with arrays as lists of numbers. A .msgpack file is a stream of maps,
    with arrays as raw little-endian bytes (int32 token ids, float32 log-probabilities).
    """
    return _run_attached(config, override, run_dir, lambda inspector: _export(inspector, to, state))


def _run_attached(
    config: Path | None,
    override: list[str] | None,
    run_dir: Path | None,
    action: Callable[[Inspector], Awaitable[None]],
) -> int:
    """Find the run, attach an inspector and await `action`. Returns the exit code, also after Ctrl-C."""
    from async_grpo.app.launch.run_folder import find_run
    from buffer.inspector import Inspector

    async def work() -> None:
        run = find_run(config, override or [], run_dir)
        inspector = await Inspector.attach(run.redis, run.name)
        try:
            await action(inspector)
        finally:
            await inspector.aclose()

    try:
        asyncio.run(work())
    except KeyboardInterrupt:
        return 130
    return 0


async def _show_overview(inspector: Inspector, as_json: bool, every_s: float | None) -> None:
    """Print the overview once, or refresh it every `every_s` seconds until Ctrl-C."""
    from async_grpo.lab.inspector.export import overview_as_json
    from async_grpo.lab.inspector.views import render_overview

    overview = await inspector.overview()
    if every_s is None:
        if as_json:
            return print(json.dumps(overview_as_json(overview), indent=2))
        return Console().print(render_overview(overview))
    if as_json:
        while True:
            print(json.dumps(overview_as_json(overview)), flush=True)
            await asyncio.sleep(every_s)
            overview = await inspector.overview()
    with Live(render_overview(overview), console=Console(), auto_refresh=False) as live:
        while True:
            await asyncio.sleep(every_s)
            live.update(render_overview(await inspector.overview()), refresh=True)


async def _resume_admission(inspector: Inspector) -> None:
    resumed = await inspector.resume_admission()
    print_line("admission is open again" if resumed else "admission was not stopped, so nothing changed")


async def _drain(inspector: Inspector, timeout_s: float, discard_ready: bool) -> None:
    from async_grpo.lab.inspector.export import wait_until_drained

    stopped = await inspector.stop_admission()
    print_line("admission is stopped" if stopped else "admission was already stopped")
    with progress_bar() as progress:
        overview = await wait_until_drained(inspector, timeout_s, _progress_callback(progress))
    if discard_ready:
        discarded = await inspector.discard_ready()
        print_line(f"nothing is in flight; {discarded} READY groups were released as stale")
    else:
        print_line(f"nothing is in flight; {overview.stats.ready} READY groups are left for the trainer")


async def _export(inspector: Inspector, file: Path, states: list[str] | None) -> None:
    from async_grpo.lab.inspector.export import export_groups

    groups = await inspector.groups(_parse_states(states))
    with progress_bar() as progress:
        bar = progress.add_task("groups", total=len(groups))
        written = await export_groups(inspector, groups, file, lambda: progress.advance(bar))
    _print_export(file, written, missed=len(groups) - written)


def _print_export(file: Path, written: int, *, missed: int) -> None:
    note = f"; {missed} ended before they could be written" if missed else ""
    print_line(f"{written} groups, {file.stat().st_size:,} bytes in {file}{note}")


def _parse_config_and_id(words: list[str], run_dir: Path | None) -> tuple[Path | None, int | None]:
    """Parse `[CONFIG] [ID]`; with --run-dir there is no CONFIG. Raises ConfigError for an invalid ID."""
    config = Path(words[0]) if words and run_dir is None else None
    rest = words[1:] if config else words
    if not rest:
        return config, None
    if len(rest) > 1 or not rest[0].isdecimal():
        raise ConfigError(f"{' '.join(rest)!r} is not an ID. Give one sequence number, as listed by `buffer inspect`")
    return config, int(rest[0])


async def _show_groups(inspector: Inspector, limit: int, as_json: bool) -> None:
    from dataclasses import asdict

    from async_grpo.lab.inspector.export import to_jsonable
    from async_grpo.lab.inspector.views import render_groups

    groups = await inspector.groups()
    if as_json:
        return print(json.dumps([to_jsonable(asdict(group)) for group in groups], indent=2))
    head_version = (await inspector.overview()).stats.version
    Console().print(render_groups(groups, head_version, limit))


async def _show_records(inspector: Inspector, seq: int, characters: int, as_json: bool) -> None:
    """Print all records of one group."""
    from async_grpo.lab.inspector.export import decode_untyped, to_jsonable
    from async_grpo.lab.inspector.views import render_record

    records = await inspector.records(seq)
    if not records:
        raise ConfigError(
            f"the buffer has no records of group {seq}: it does not exist yet, or it has ended. "
            "`async-grpo buffer inspect` without ID lists the groups"
        )
    unpacked = {kind: decode_untyped(payload) for kind, payload in records.items()}
    if as_json:
        return print(json.dumps(to_jsonable(unpacked), indent=2))
    for kind, record in unpacked.items():
        Console().print(render_record(f"{kind} {seq}: {len(records[kind]):,} bytes", record, characters))


def _parse_states(names: list[str] | None) -> Any:
    from async_grpo.lab.inspector.export import EXPORTABLE

    states = {state.value: state for state in EXPORTABLE}
    unknown = sorted(set(names or ()) - states.keys())
    if unknown:
        raise ConfigError(f"there is no --state {unknown[0]}. Use {', '.join(states)}")
    return [states[name] for name in names or states]


def _progress_callback(progress: Progress) -> Callable[[Overview], None]:
    """Return a callback that shows how many of the groups in flight at its first call have ended."""
    bar = progress.add_task("groups ended", total=None)

    def show(overview: Overview) -> None:
        inflight = overview.stats.inflight
        total = progress.tasks[bar].total
        if total is None:
            total = inflight
        progress.update(bar, total=total, completed=total - inflight)

    return show
