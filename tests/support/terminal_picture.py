"""The terminal of a finished run as an animated SVG, replayed from its folder:

    python -m tests.support.terminal_picture runs/quickstart docs/images/terminal.svg

The append-only file of the run's own server holds every change of the buffer in order, and every heartbeat with its
time. Its commands are given to a new server one after another. At each heartbeat the buffer and the board are asked as
`async-grpo run` asks them, and `LiveView` draws what it showed at that moment.
"""

from __future__ import annotations

import asyncio
import io
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

from redis.asyncio import Redis
from rich.console import Console
from rich.terminal_theme import MONOKAI

from async_grpo.app.report.live_state import LiveState, RoleState
from async_grpo.app.report.live_view import LiveView
from async_grpo.config import RunConfig, load
from async_grpo.telemetry.jsonl import read_rows
from async_grpo.telemetry.rows import Row, latest_rows, rows_of_kind
from async_grpo.wire import decode
from async_grpo.wire.board import ServerBeat
from buffer import EmbeddedServer, connect_board, open_run

COLUMNS = 104
FRAMES = 12
FRAME_S = 1.2
_EXPIRY = {b"PX", b"EX", b"PXAT", b"EXAT"}
_FRAME = """\
<g class="frame" style="animation-delay: {delay}s">
<style>{{styles}} .{{unique_id}}-matrix {{{{ font: {{char_height}}px Menlo, Consolas, monospace; }}}}</style>
<defs>{{lines}}</defs>{{chrome}}
<g transform="translate({{terminal_x}}, {{terminal_y}})">{{backgrounds}}
<g class="{{unique_id}}-matrix">{{matrix}}</g></g>
</g>"""
_PICTURE = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{label}">
<style>
.frame {{ visibility: hidden; animation: shown {total}s steps(1) infinite; }}
.frame:last-child {{ visibility: visible; }}
@keyframes shown {{ 0% {{ visibility: visible; }} {share:.4f}% {{ visibility: hidden; }} }}
@media (prefers-reduced-motion: reduce) {{ .frame {{ animation: none; }} }}
</style>
{frames}
</svg>
"""


def logged_commands(file: Path) -> Iterator[list[bytes]]:
    """The commands of an append-only file, without transactions and expiry."""
    data = file.read_bytes()
    at = 0
    while at < len(data):
        end = data.index(b"\r\n", at)
        count = int(data[at + 1 : end]) if data[at : at + 1] == b"*" else 0
        at = end + 2
        words: list[bytes] = []
        for _ in range(count):
            end = data.index(b"\r\n", at)
            size = int(data[at + 1 : end])
            words.append(data[end + 2 : end + 2 + size])
            at = end + size + 4
        if words and words[0].upper() not in (b"MULTI", b"EXEC", b"SELECT"):
            yield words[:3] if words[0].upper() == b"SET" and _EXPIRY & set(words[3:]) else words


async def states(run_dir: Path, config: RunConfig) -> AsyncIterator[LiveState]:
    """What the run's terminal showed at each heartbeat of its servers; `elapsed_s` is the time of the clock."""
    rows = latest_rows(rows_of_kind(read_rows(run_dir / "metrics.jsonl"), "step"), "step")
    (log,) = (run_dir / "server" / "appendonlydir").glob("*.incr.aof")
    buffer = await open_run(config)
    board = await connect_board(config.redis, config.name)
    client = Redis.from_url(config.redis.url or "")
    pipe = client.pipeline(transaction=False)
    for words in logged_commands(log):
        pipe.execute_command(*words)
        board_key, is_beat, name = words[1].partition(b":server:")
        if words[0].upper() == b"SET" and is_beat:
            await pipe.sadd(board_key + b":servers", name).execute()
            stats = await buffer.stats()
            yield LiveState(
                step=_newest(rows, stats.version),
                steps_done=stats.version,
                evaluations=await board.evaluations(),
                waiting=stats.waiting,
                inflight=stats.inflight,
                ready=stats.ready,
                taken=stats.taken,
                active=stats.active,
                capacity=config.capacity_groups,
                servers=await board.live_servers(),
                counters=await board.counters(),
                roles=[RoleState("trainer", "running"), RoleState("rollout-0", "running")],
                elapsed_s=decode(words[2], ServerBeat).time_s,
            )
    await asyncio.gather(buffer.aclose(), board.aclose(), client.aclose())


def _newest(rows: list[Row], version: int) -> Row | None:
    return next((row for row in reversed(rows) if row["step"] <= version), None)


def picture(config: RunConfig, shown: list[LiveState]) -> str:
    """FRAMES of the states, evenly spaced and the last of them included, as one animated SVG."""
    count = min(FRAMES, len(shown))
    chosen = {round((number + 1) * len(shown) / count) - 1 for number in range(count)}
    console = Console(record=True, force_terminal=True, width=COLUMNS, file=io.StringIO(), legacy_windows=False)
    view = LiveView(config, console)
    frames: list[str] = []
    for number, state in enumerate(shown):
        view.update(state)
        if number in chosen:
            console.print(view.render())
            frame = _FRAME.format(delay=f"{(len(frames) - count) * FRAME_S:.1f}")
            text = console.export_svg(
                title="async-grpo run configs/quickstart.yaml",
                theme=MONOKAI,
                code_format=frame + "<!-- {width} {height} -->",
                unique_id=f"f{len(frames)}",
            )
            text, _, size = text.rpartition("<!-- ")
            frames.append(text)
    width, height = size.split()[:2]
    total = f"{len(frames) * FRAME_S:.1f}"
    label = f"The terminal while {config.name} runs"
    return _PICTURE.format(
        width=width, height=height, label=label, total=total, share=100 / len(frames), frames="\n".join(frames)
    )


async def main(run_dir: Path, target: Path) -> None:
    config = load(run_dir / "config.yaml")
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedServer(Path(folder), config.redis)
        try:
            config = config.model_copy(update={"redis": config.redis.model_copy(update={"url": server.start()})})
            shown = [state async for state in states(run_dir, config)]
        finally:
            server.stop()
    began_s = shown[-1].elapsed_s - json.loads((run_dir / "summary.json").read_text())["wall_s"]
    training = (state for state in shown if state.steps_done < config.steps)
    shown = [replace(state, elapsed_s=state.elapsed_s - began_s) for state in training]
    target.write_text(picture(config, shown), encoding="utf-8")
    print(f"{target}: {len(shown)} heartbeats, {target.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
