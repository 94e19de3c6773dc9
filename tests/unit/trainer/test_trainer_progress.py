"""What the trainer's page knows of it: from the start over the takeover and the replay to weights that are served."""

from __future__ import annotations

from dataclasses import replace

from trainer.metrics_server import TrainerProgress

ROW = {"step": 3, "epoch": 2, "skipped_steps": 0, "replayed": True, "groups": 4}


def test_a_trainer_has_no_epoch_before_it_takes_over_and_is_not_ready_while_it_replays() -> None:
    assert (TrainerProgress().epoch, TrainerProgress().ready) == (0, False)
    found = TrainerProgress(epoch=2, version=2).after(ROW)
    assert (found.ready, found.epoch, found.version) == (False, 2, 3)
    assert (found.steps, found.replayed, found.groups) == (1, 1, 4)
    assert replace(found, ready=True).after({**ROW, "step": 4}).ready, "it stays ready from its first weights on"
