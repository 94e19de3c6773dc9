"""Restart policy."""

from __future__ import annotations

import pytest

from async_grpo.app.launch.supervisor import RestartDecision, decide_restart
from async_grpo.errors import EXIT_CONFIG


@pytest.mark.parametrize(
    ("case", "decision"),
    [
        ({"code": 0, "stopping": False, "needed": False, "restarts": 0}, RestartDecision.DONE),
        ({"code": 0, "stopping": False, "needed": True, "restarts": 0}, RestartDecision.RESTART),
        ({"code": -9, "stopping": False, "needed": True, "restarts": 0}, RestartDecision.RESTART),
        ({"code": 1, "stopping": False, "needed": False, "restarts": 1}, RestartDecision.RESTART),
        ({"code": -9, "stopping": False, "needed": True, "restarts": 2}, RestartDecision.GIVE_UP),
        ({"code": EXIT_CONFIG, "stopping": False, "needed": True, "restarts": 0}, RestartDecision.GIVE_UP),
        ({"code": -9, "stopping": True, "needed": True, "restarts": 2}, RestartDecision.DONE),
    ],
)
def test_restart_decisions(case: dict[str, int], decision: RestartDecision) -> None:
    assert decide_restart(**case, over=False, limit=2) is decision


@pytest.mark.parametrize("code", [0, 1, -9])
def test_a_role_with_nothing_left_to_do_is_not_restarted(code: int) -> None:
    assert (
        decide_restart(code=code, stopping=False, over=True, needed=True, restarts=2, limit=2) is RestartDecision.DONE
    )
