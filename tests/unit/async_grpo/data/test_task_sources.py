"""Contract of every task source: an endless stream, a function of seed and index, and held-out tasks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from async_grpo.data import make_source
from async_grpo.data.arithmetic import ArithmeticSource
from async_grpo.data.base import TaskSource
from async_grpo.data.jsonl import JsonlSource
from async_grpo.data.prepared_source import PreparedSource
from tests.support.data_cases import config_of, prepared, questions, written
from tests.support.tokenizers import Bytes

KINDS = {"arithmetic": ArithmeticSource, "jsonl": JsonlSource, "prepared": PreparedSource}


@pytest.fixture(params=KINDS)
def source_of(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., TaskSource]:
    """A source with 20 rows to train on, by seed."""
    data = {"arithmetic": {}, "jsonl": {"path": tmp_path / "d.jsonl"}, "prepared": {"path": tmp_path / "out"}}
    written(tmp_path / "d.jsonl", questions(22))
    prepared(tmp_path, questions(22))

    def make(seed: int = 1) -> TaskSource:
        source = make_source(config_of(seed=seed, **data[request.param]), Bytes())
        assert isinstance(source, KINDS[request.param])
        return source

    return make


def test_a_later_server_continues_with_the_same_tasks(source_of: Callable[..., TaskSource]) -> None:
    """The index is the only state of the stream."""
    source, later, other = source_of(), source_of(), source_of(seed=2)
    stream = [source.task(index) for index in range(60)]
    assert [later.task(index) for index in range(33, 60)] == stream[33:]
    assert [task.index for task in stream] == [*range(60)]
    assert [other.task(index).prompt for index in range(60)] != [task.prompt for task in stream]
    assert later.task(10**12).answer
    for task in stream:
        assert bytes(task.prompt_ids().tolist()).decode() == task.prompt
        assert task.answer == (task.prompt[1:] if task.prompt[0] == "q" else str(eval(task.prompt.rstrip("="))))  # noqa: S307


def test_held_out_tasks_are_never_trained(source_of: Callable[..., TaskSource]) -> None:
    source = source_of()
    held_out = {task.prompt for task in source.held_out()}
    assert len(held_out) == 2 and source.dropped == {}
    assert held_out.isdisjoint(source.task(index).prompt for index in range(60))


def test_each_pass_visits_every_row_once_in_another_order(source_of: Callable[..., TaskSource]) -> None:
    source = source_of()
    first, second = ([source.task(index).prompt for index in range(start, start + 20)] for start in (0, 20))
    assert first != second and len(set(first)) == 20
    assert isinstance(source, ArithmeticSource) or sorted(first) == sorted(second)
