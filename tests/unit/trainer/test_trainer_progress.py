"""What the trainer's page knows of it: from the start over the takeover and the replay to weights that are served."""

from __future__ import annotations

from trainer.metrics_server import TrainerProgress

ROW = {"step": 3, "epoch": 2, "skipped_steps": 0, "replayed": True, "groups": 4}


def test_a_trainer_that_has_not_taken_over_has_no_epoch() -> None:
    assert (TrainerProgress().epoch, TrainerProgress().ready) == (0, False)


def test_a_trainer_that_replays_counts_its_steps_and_is_not_ready() -> None:
    found = TrainerProgress().joined(2, 2).after(ROW)
    assert (found.ready, found.epoch, found.version) == (False, 2, 3)
    assert (found.steps, found.replayed, found.groups) == (1, 1, 4)


def test_a_trainer_stays_ready_from_its_first_weights_on() -> None:
    served = TrainerProgress().joined(2, 2).after(ROW).serving()
    assert served.ready
    assert (served.epoch, served.version) == (2, 3)
    assert served.after({**ROW, "step": 4}).ready
