"""`async-grpo buffer`: look into the buffer of a live run, bring it to rest, take its groups out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from async_grpo.app.cli.common import exit_with
from async_grpo.errors import ConfigError

if TYPE_CHECKING:
    from buffer.inspector import Inspector, Overview

app = typer.Typer(
    help="Look into the buffer of a live run. Say which run by the CONFIG and -o it was started with, or by --run-dir.",
    no_args_is_help=True,
)

ConfigArgument = Annotated[Path | None, typer.Argument(metavar="CONFIG", help="Of the run; not with --run-dir.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("-o", "--override", metavar="KEY=VALUE", help="As the run was started; may be repeated."),
]
RunDir = Annotated[Path | None, typer.Option("--run-dir", metavar="DIR", help="For example runs/quickstart.")]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON, for programs.")]


@app.command()
def stats(
    config: ConfigArgument = None,
    override: Overrides = None,
    run_dir: RunDir = None,
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until Ctrl-C.")] = False,
    every_s: Annotated[float, typer.Option("--every", min=0.1, metavar="SECONDS", help="Of --watch.")] = 1.0,
) -> None:
    """Counters, window fill, head version, releases by reason, ages, oldest lease, the server's memory.

    Nothing is changed. With --watch --json: one line of JSON a look.
    """
    from async_grpo.app.inspector.export import plain_overview
    from async_grpo.app.inspector.views import overview_view

    async def look(inspector: Inspector) -> None:
        if as_json:
            while True:
                print(json.dumps(plain_overview(await inspector.overview()), indent=None if watch else 2), flush=True)
                if not watch:
                    return
                await asyncio.sleep(every_s)
        view = overview_view(await inspector.overview())
        if not watch:
            return Console().print(view)
        with Live(view, console=Console(), auto_refresh=False) as live:
            while True:
                await asyncio.sleep(every_s)
                live.update(overview_view(await inspector.overview()), refresh=True)

    _attached(config, override, run_dir, look)


@app.command()
def inspect(
    words: Annotated[list[str] | None, typer.Argument(metavar="[CONFIG] [ID]", help="ID: a sequence number.")] = None,
    override: Overrides = None,
    run_dir: RunDir = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Groups listed of each state.")] = 20,
    characters: Annotated[int, typer.Option("--characters", min=1, help="Of a text, in a record.")] = 400,
    as_json: AsJson = False,
) -> None:
    """List the groups by state, or show every record of the group (or waiting task) ID.

    Records are decoded without their schema, so those of a newer release can be read as well. Text is
    shown escaped: nothing that a model wrote reaches the terminal as a command. Nothing is changed.
    """
    config, ident = _config_and_id(words or [], run_dir)

    async def look(inspector: Inspector) -> None:
        await (
            _show_groups(inspector, limit, as_json) if ident is None else _show(inspector, ident, characters, as_json)
        )

    _attached(config, override, run_dir, look)


@app.command()
def drain(
    config: ConfigArgument = None,
    override: Overrides = None,
    run_dir: RunDir = None,
    timeout_s: Annotated[float, typer.Option("--timeout", min=0, metavar="SECONDS")] = 600.0,
    discard_ready: Annotated[
        bool, typer.Option("--discard-ready", help="At the end, release all READY groups untrained (stale).")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Undo it: admission goes on as before.")] = False,
) -> None:
    """Stop admission, and wait until nothing is in flight.

    1. The horizon of the run is set to 0 (and a limit of the ratio is lifted), so that no new group is
    admitted, whatever is released. Processes that join or restart with the same configuration do not undo it.

    2. Groups in flight come to their end: their servers insert or discard them, and those of a server that died
    go to the next server when their lease expires. This command waits for that, at most --timeout seconds.

    3. READY groups stay: the trainer takes them as long as they fill its batches, then it waits for more, and
    ends with an error after trainer.take_timeout_s. Waiting tasks stay as well.

    --resume puts horizon and limit back. What --discard-ready released stays released: those slots are filled
    anew. A run that is resumed with other parameters, more steps for example, is open again, too.
    """

    async def move(inspector: Inspector) -> None:
        if resume:
            return _say_resumed(await inspector.resume_admission())
        from async_grpo.app.inspector.export import wait_until_drained

        stopped = await inspector.stop_admission()
        _say("admission is stopped" if stopped else "admission was stopped already")
        with _progress() as progress:
            overview = await wait_until_drained(inspector, timeout_s, _follow(progress))
        if discard_ready:
            return _say(f"nothing is in flight; {await inspector.discard_ready()} READY groups were released as stale")
        _say(f"nothing is in flight; {overview.stats.ready} READY groups are left for the trainer")

    _attached(config, override, run_dir, move)


@app.command()
def export(
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="FILE.jsonl or FILE.msgpack.")],
    config: ConfigArgument = None,
    override: Overrides = None,
    run_dir: RunDir = None,
    state: Annotated[
        list[str] | None, typer.Option("--state", help="ready, taken or kept; may be repeated. All of them else.")
    ] = None,
) -> None:
    """Write the stored groups to a file, in the order of their sequence. Nothing is changed.

    READY groups wait for the trainer, TAKEN ones are being trained, KEPT ones were trained and stay until a
    checkpoint contains them. Each entry has seq, state, step (that it was taken for) and group, the record:
    kind, format, seq, attempt, task, samples (tokens, logprobs, spans, text, rewards, ...), server, times.

    .jsonl: one JSON object a line, arrays as lists of numbers. .msgpack: a stream of maps, arrays as raw
    little-endian bytes (int32 token ids, float32 log-probabilities).
    """

    async def move(inspector: Inspector) -> None:
        from async_grpo.app.inspector.export import export as write
        from async_grpo.app.inspector.export import format_of

        format_of(to)
        groups = await inspector.groups(_states(state))
        with _progress() as progress:
            bar = progress.add_task("groups", total=len(groups))
            done = await write(inspector, groups, to, lambda: progress.advance(bar))
        gone = f"; {done.gone} had ended before their turn" if done.gone else ""
        _say(f"{done.groups} groups, {done.size_bytes:,} bytes in {to}{gone}")

    _attached(config, override, run_dir, move)


def _attached(
    config: Path | None, override: list[str] | None, run_dir: Path | None, do: Callable[[Inspector], Awaitable[Any]]
) -> None:
    """Find the run, attach without changing it, and do something with it. Ctrl-C ends it quietly."""
    from async_grpo.app.launch.run_folder import find_run

    async def work() -> None:
        async with _inspector(find_run(config, override or [], run_dir)) as inspector:
            await do(inspector)

    def interruptible() -> int:
        try:
            asyncio.run(work())
        except KeyboardInterrupt:
            return 130
        return 0

    exit_with(interruptible)


@asynccontextmanager
async def _inspector(config: Any) -> AsyncIterator[Inspector]:
    from buffer.inspector import Inspector

    inspector = await Inspector.attach(config.redis, config.name)
    try:
        yield inspector
    finally:
        await inspector.aclose()


def _config_and_id(words: list[str], run_dir: Path | None) -> tuple[Path | None, int | None]:
    """CONFIG comes first, and is left out with --run-dir."""
    config = Path(words[0]) if words and run_dir is None else None
    rest = words[1:] if config else words
    if not rest:
        return config, None
    if len(rest) > 1 or not rest[0].isdecimal():
        exit_with(lambda: _refuse(f"{' '.join(rest)!r} is no ID: give one sequence number, as `inspect` lists them"))
    return config, int(rest[0])


def _refuse(why: str) -> int:
    raise ConfigError(why)


async def _show_groups(inspector: Inspector, limit: int, as_json: bool) -> None:
    from dataclasses import asdict

    from async_grpo.app.inspector.export import to_jsonable
    from async_grpo.app.inspector.views import groups_view

    groups = await inspector.groups()
    if as_json:
        return print(json.dumps([to_jsonable(asdict(group)) for group in groups], indent=2))
    head_version = (await inspector.overview()).stats.version
    Console().print(groups_view(groups, head_version, limit))


async def _show(inspector: Inspector, seq: int, characters: int, as_json: bool) -> None:
    """Every record of one group."""
    from async_grpo.app.inspector.export import decode_untyped, to_jsonable
    from async_grpo.app.inspector.views import record_view

    records = await inspector.records(seq)
    if not records:
        raise ConfigError(
            f"nothing is stored of group {seq}: it was never put, or it has ended and a checkpoint contains it. "
            "`async-grpo buffer inspect` without ID lists what is there"
        )
    unpacked = {kind: decode_untyped(payload) for kind, payload in records.items()}
    if as_json:
        return print(json.dumps(to_jsonable(unpacked), indent=2))
    for kind, record in unpacked.items():
        Console().print(record_view(f"{kind} {seq}: {len(records[kind]):,} bytes", record, characters))


def _states(names: list[str] | None) -> Any:
    from async_grpo.app.inspector.export import EXPORTABLE

    known = {state.value: state for state in EXPORTABLE}
    if unknown := sorted(set(names or ()) - known.keys()):
        raise ConfigError(f"--state {unknown[0]}: there is no such state of stored groups. Known: {', '.join(known)}")
    return [known[name] for name in names or known]


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True))


def _follow(progress: Progress) -> Callable[[Overview], None]:
    """A bar from the groups that are in flight now to none."""
    bar = progress.add_task("groups ended")
    begun_with: list[int] = []

    def show(overview: Overview) -> None:
        begun_with.append(overview.stats.inflight)
        progress.update(bar, total=begun_with[0], completed=begun_with[0] - overview.stats.inflight)

    return show


def _say(what: str) -> None:
    Console().print(escape(what), highlight=False)


def _say_resumed(resumed: bool) -> None:
    _say("admission goes on" if resumed else "admission was not stopped by `buffer drain`: nothing is changed")
