"""Real runs, one after another: each an `async-grpo run` in a process of its own, by the crew of a sweep.

points --> Crew --> DIR/runs/NAME   the first that fails stops the rest, and is an error of the bench
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from async_grpo.config import RunConfig
from async_grpo.errors import RoleFailed
from async_grpo.sweep.crew import Crew, Ending, Fate
from async_grpo.sweep.folder import SweepFolder
from async_grpo.sweep.plan import Point
from async_grpo.sweep.progress import SweepState
from async_grpo.sweep.sweep import INTERRUPTED, run_argv


async def run_all(folder: Path, configs: Sequence[RunConfig], show: Callable[[str, int], None]) -> None:
    """See every run to its end. `show` is told, twice a second, what runs and how many have finished.

    Raises RoleFailed for a run that failed; on Ctrl-C, exits with 130 once what ran has stopped.
    """
    points = [Point({"run": config.name}, config) for config in configs]
    files = SweepFolder(folder)
    files.write_configs(points)
    endings: list[Ending] = []

    def ended(ending: Ending) -> None:
        endings.append(ending)
        if ending.fate is not Fate.FINISHED:
            crew.stop()

    crew = Crew(
        points,
        files,
        argv=lambda point: run_argv(files.config_file(point.name)),
        total=len(points),
        at_once=1,
        pool=None,
        show=lambda state: show(_in_words(state), state.finished),
        ended=ended,
    )
    await crew.work()
    if failed := [ending for ending in endings if ending.fate is Fate.FAILED]:
        raise RoleFailed(f"the run {failed[0].point.name} of the bench failed: {failed[0].error}")
    if crew.stopping:
        raise SystemExit(INTERRUPTED)


def _in_words(state: SweepState) -> str:
    for run in state.running:
        name = run.label.partition(",")[0].removeprefix("run=")
        return f"{name} at step {run.step} of {run.steps}"
    return "starting"
