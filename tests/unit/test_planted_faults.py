"""The faults of `tests.support.planted_faults` can be planted: a line that has moved would plant nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.planted_faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_its_text_stands_once_and_its_tests_are_there(fault: Fault) -> None:
    assert (ROOT / fault.file).read_text().count(fault.old) == 1
    assert all((ROOT / test.partition("::")[0]).exists() for test in fault.tests)
