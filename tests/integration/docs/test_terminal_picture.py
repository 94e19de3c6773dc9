"""The README's picture of the terminal: replayed from a run folder, and free of foreign addresses."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from xml.etree import ElementTree

from async_grpo.config import RunConfig
from async_grpo.wire.board import ServerBeat
from buffer import EmbeddedServer, connect_board, open_run
from tests.support.buffer_cases import admit, finish, tasks
from tests.support.terminal_picture import FRAMES, main, states

ROOT = Path(__file__).parents[3]
CONFIG = RunConfig.model_validate({"name": "demo", "model": {"random": {}}, "steps": 9, "groups_per_step": 2})


def on(server: EmbeddedServer) -> RunConfig:
    redis = CONFIG.redis.model_copy(update={"url": server.start()})
    return CONFIG.model_copy(update={"redis": redis})


async def live_a_little(config: RunConfig) -> None:
    """Two heartbeats: after five tickets, and after two of their groups are finished."""
    buffer, board = await open_run(config), await connect_board(config.redis, config.name)
    await buffer.put_tasks(tasks(0, 20))
    tickets = await admit(buffer, 5)
    await board.announce_server(ServerBeat(name="rollout-0", pid=1, version=0, running=40, time_s=1000.0), ttl_s=0.001)
    await finish(buffer, *tickets[:2])
    await board.announce_server(ServerBeat(name="rollout-0", pid=1, version=0, running=24, time_s=1002.5), ttl_s=0.001)
    await asyncio.gather(buffer.aclose(), board.aclose())


def a_run(folder: Path) -> Path:
    server = EmbeddedServer(folder / "server", CONFIG.redis)
    asyncio.run(live_a_little(on(server)))
    server.stop()
    (folder / "config.yaml").write_text("name: demo\nmodel: {random: {}}\nsteps: 9\ngroups_per_step: 2\n")
    (folder / "metrics.jsonl").write_text("")
    (folder / "summary.json").write_text(json.dumps({"wall_s": 62.5}))
    return folder


def test_a_replay_shows_the_buffer_as_it_was_at_each_heartbeat(tmp_path: Path) -> None:
    folder, server = a_run(tmp_path / "demo"), EmbeddedServer(tmp_path / "other", CONFIG.redis)

    async def replayed() -> list[tuple[float, int, int, int, int]]:
        return [
            (state.elapsed_s, state.inflight, state.ready, state.waiting, state.servers[0].running)
            async for state in states(folder, on(server))
        ]

    try:
        assert asyncio.run(replayed()) == [(1000.0, 5, 0, 15, 40), (1002.5, 3, 2, 15, 24)]
    finally:
        server.stop()


def test_the_command_writes_a_picture(tmp_path: Path) -> None:
    asyncio.run(main(a_run(tmp_path / "demo"), tmp_path / "terminal.svg"))
    texts = "".join(ElementTree.parse(tmp_path / "terminal.svg").getroot().itertext()).replace("\xa0", " ")
    assert "3 in flight, 2 ready, 0 taken, 15 tasks left" in texts and "1:02" in texts


def test_the_picture_of_the_readme_moves_and_loads_nothing() -> None:
    picture = (ROOT / "docs/images/terminal.svg").read_text(encoding="utf-8")
    frames = ElementTree.fromstring(picture).findall("{http://www.w3.org/2000/svg}g")
    assert len(frames) == FRAMES and len(picture) < 200_000
    assert re.findall(r"https?://[^\"]*", picture) == ["http://www.w3.org/2000/svg"] and "<script" not in picture
