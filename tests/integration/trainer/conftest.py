"""The ranks are started once for each number of them, whatever the number of test modules: a start takes seconds.

A module whose tests need ranks has a function `runs`: folder of the models -> {number of ranks: {name: Run}}. Its
fixtures `one_rank`, `two_ranks` and `four_ranks` hold the outcomes by name. Runs on one rank come first, so that others
can resume from their checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.support.trainer_programs.launching import Outcome, Run, run_all

Outcomes = dict[str, Outcome]


class Starts:
    """The outcomes of the runs of some test modules."""

    def __init__(self, folder: Path, modules: set[ModuleType]) -> None:
        self._folder = folder
        self._runs = {self._folder_of(module): module.runs(folder) for module in modules}
        self._found: dict[int, dict[Path, Outcomes]] = {}

    def outcomes(self, module: ModuleType, ranks: int) -> Outcomes:
        if ranks > 1 and any(1 in runs for runs in self._runs.values()):
            self._start(1)
        self._start(ranks)
        return self._found[ranks][self._folder_of(module)]

    def _start(self, ranks: int) -> None:
        if ranks not in self._found:
            wanted: dict[Path, dict[str, Run]] = {
                folder: runs[ranks] for folder, runs in self._runs.items() if ranks in runs
            }
            self._found[ranks] = run_all(wanted, ranks)

    def _folder_of(self, module: ModuleType) -> Path:
        folder = self._folder / module.__name__.rpartition(".")[2]
        folder.mkdir(exist_ok=True)
        return folder


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """On a busy machine two threads wait for each other longer than they work on matrices this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the models."""
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture(scope="session")
def starts(request: pytest.FixtureRequest, folder: Path) -> Starts:
    here = Path(__file__).parent
    modules = {item.getparent(pytest.Module).obj for item in request.session.items if item.path.parent == here}
    return Starts(folder, {module for module in modules if hasattr(module, "runs")})


@pytest.fixture(scope="module")
def one_rank(starts: Starts, request: pytest.FixtureRequest) -> Outcomes:
    return starts.outcomes(request.module, 1)


@pytest.fixture(scope="module")
def two_ranks(starts: Starts, request: pytest.FixtureRequest) -> Outcomes:
    return starts.outcomes(request.module, 2)


@pytest.fixture(scope="module")
def four_ranks(starts: Starts, request: pytest.FixtureRequest) -> Outcomes:
    return starts.outcomes(request.module, 4)
