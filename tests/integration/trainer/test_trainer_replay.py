"""A trainer that was killed makes the steps again that servers have the weights of, and serves nothing meanwhile."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.trainer_programs.launching import launch


def test_a_trainer_that_replays_is_ready_only_when_it_has_published(tmp_path: Path) -> None:
    launch("replaying", 1, tmp_path / "told.json")
    told = json.loads((tmp_path / "told.json").read_text())
    replayed = ["logger.joined", "logger.step"]
    assert told == [*replayed, "exporter.publish", "logger.serving", "logger.step"]
