"""The index of samples and its pages: filters, sorting, search, paging, files that grow or are torn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from async_grpo.lab.view import followed, sample_search
from async_grpo.lab.view.sample_search import RunSamples, SamplesQuery, make_matcher


def completion(text: str = "", version: int = 0, tokens: int = 4, **facts: Any) -> dict[str, Any]:
    return {"text": text, "reward": 0.0, "finish_reason": "stop", "spans": [[version, 0, tokens]], "age": 0, **facts}


def write(folder: Path, *rows: dict[str, Any], name: str = "rollout-0") -> Path:
    path = folder / "samples" / f"{name}.jsonl"
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        for row in rows:
            file.write(json.dumps({"server": name, "prompt": "p", "answer": "", **row}, ensure_ascii=False) + "\n")
    return path


def seqs(samples: RunSamples, **query: Any) -> list[int]:
    return [item["seq"] for item in samples.search(SamplesQuery(**query))["items"]]


@pytest.fixture
def samples(tmp_path: Path) -> RunSamples:
    write(
        tmp_path,
        {"seq": 0, "time_s": 10.0, "prompt": "One", "completions": [completion("a wait", reward=1.0), completion("b")]},
        {"seq": 1, "time_s": 20.0, "completions": [completion("WAIT 漢", version=3, age=2, finish_reason="length")]},
    )
    write(
        tmp_path,
        {"seq": 2, "time_s": 15.0, "completions": [completion("c", version=5, tokens=9, reward=None)]},
        name="rollout-1",
    )
    (tmp_path / "trained.jsonl").write_text(
        '{"step": 1, "groups": {"0": [0.7, -0.7]}}\n{"step": 6, "groups": {"1": [0.0]}}\n'
    )
    return RunSamples(tmp_path)


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({}, [1, 2, 0]),
        ({"sort": "oldest"}, [0, 2, 1]),
        ({"sort": "reward"}, [0, 1, 2]),
        ({"sort": "spread"}, [0, 1, 2]),
        ({"sort": "length"}, [2, 0, 1]),
        ({"sort": "age"}, [1, 0, 2]),
        ({"sort": "step"}, [0, 1, 2]),
        ({"reward_min": 0.5}, [0]),
        ({"reward_max": 0.5}, [1, 0]),
        ({"reward_max": 0.0, "sort": "oldest"}, [0, 1]),
        ({"age_max": 2, "age_min": 2}, [1]),
        ({"age_min": 1}, [1]),
        ({"version_min": 3, "version_max": 4}, [1]),
        ({"finish": "length"}, [1]),
        ({"finish": "unheard of"}, []),
        ({"server": "rollout-1"}, [2]),
        ({"state": "unverifiable"}, [2]),
        ({"state": "untrained"}, [2]),
        ({"state": "trained"}, [1, 0]),
        ({"step_min": 2}, [1]),
        ({"step_max": 5}, [0]),
        ({"q": "wait"}, [1, 0]),
        ({"q": "wait", "regex": True}, [0]),
        ({"q": "(?i)^WAIT", "regex": True}, [1]),
        ({"q": "one", "within": "completion"}, []),
        ({"q": "one", "within": "prompt"}, [0]),
        ({"q": "漢"}, [1]),
        ({"q": "a wait", "reward_max": 0.5}, []),
    ],
)
def test_a_query_selects_groups(samples: RunSamples, query: dict[str, Any], found: list[int]) -> None:
    assert seqs(samples, **query) == found


def test_a_page_lists_the_matching_completions(samples: RunSamples) -> None:
    (found,) = samples.search(SamplesQuery(q="B", sort="oldest"))["items"]
    assert (found["matches"], found["snippet"], found["rewards"]) == ([1], ["", "b", ""], [1.0, 0.0])
    (of_prompt,) = samples.search(SamplesQuery(q="One"))["items"]
    assert of_prompt["matches"] == [0, 1] and "snippet" not in of_prompt


def test_ages_are_measured_at_the_step_that_trained_the_group(tmp_path: Path) -> None:
    write(tmp_path, *[{"seq": seq, "completions": [completion(version=3, age=1)]} for seq in (0, 1)])
    (tmp_path / "trained.jsonl").write_text('{"step": 6, "groups": {"0": [0.0]}}\n')
    samples = RunSamples(tmp_path)
    page = samples.search(SamplesQuery(sort="age"))
    assert [(item["seq"], item["age"]) for item in page["items"]] == [(0, 2), (1, 1)] and page["facts"]["age"] == 2
    assert seqs(samples, age_min=2) == [0] and seqs(samples, age_max=1) == [1]


def test_the_mean_reward_ignores_completions_without_reward(tmp_path: Path) -> None:
    half = [completion(reward=0.8), completion(reward=None), completion(reward=None)]
    write(tmp_path, {"seq": 0, "completions": [completion(reward=0.7)]}, {"seq": 1, "completions": half})
    write(tmp_path, {"seq": 2, "completions": [completion(reward=0.4), completion(reward=0.9)]})
    assert seqs(RunSamples(tmp_path), sort="reward") == [1, 0, 2]


def test_the_next_page_continues_the_previous_one(samples: RunSamples) -> None:
    first = samples.search(SamplesQuery(limit=2))
    second = samples.search(SamplesQuery(limit=2, start=first["next"]))
    assert [[item["seq"] for item in page["items"]] for page in (first, second)] == [[1, 2], [0]]
    assert second["next"] is None and first["matching"] == 3


def test_a_group_is_found_by_its_identity(samples: RunSamples) -> None:
    item = samples.search(SamplesQuery(sort="oldest"))["items"][0]
    found = samples.read_group(item["id"])
    assert found is not None and found["row"]["prompt"] == "One"
    assert found["trained"] == {"step": 1, "skipped": None, "mask_below": None, "advantages": [0.7, -0.7]}
    for wrong in ("rollout-0.jsonl@1", "../rollout-0.jsonl@0", "@", "rollout-0.jsonl@" + "9" * 99):
        assert samples.read_group(wrong) is None


def test_new_rows_appear_once_they_are_complete(tmp_path: Path, samples: RunSamples) -> None:
    assert len(seqs(samples)) == 3
    path = write(tmp_path, {"seq": 7, "time_s": 30.0, "completions": [completion()]})
    with path.open("a") as file:
        file.write('{"seq": 8, "completions"')
    assert seqs(samples) == [7, 1, 2, 0]
    assert samples.search(SamplesQuery())["indexed"] == 1, "a torn line is not waited for"
    with path.open("a") as file:
        file.write(': [], "time_s": 1.0}\nnot json\n{"seq": "wrong", "completions": []}\n')
    page = samples.search(SamplesQuery(sort="oldest"))
    assert page["unreadable"] == 2 and page["groups"] == 5


def test_pages_are_shown_while_the_index_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed, "SLICE_BYTES", 600)
    monkeypatch.setattr(sample_search, "INDEX_S", 0.0)
    write(tmp_path, *[{"seq": seq, "completions": [completion()]} for seq in range(20)])
    samples = RunSamples(tmp_path)
    pages = [samples.search(SamplesQuery())["groups"] for _ in range(20)]
    assert 0 < pages[0] < 20 and pages[-1] == 20


def test_a_search_out_of_time_returns_where_to_continue(samples: RunSamples, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_search, "SEARCH_S", 0.0)
    page = samples.search(SamplesQuery(q="wait"))
    assert page["items"] == [] and page["next"] == 0


def test_a_pattern_that_takes_too_long_is_abandoned() -> None:
    endless = make_matcher("(a|aa)+$", True)
    assert endless is not None and endless("a" * 64 + "b") is None


def test_an_invalid_pattern_is_reported() -> None:
    with pytest.raises(ValueError, match=r"'\(' .*regular expression"):
        make_matcher("(", True)


def test_growth_starts_at_the_first_window_with_half_more_tokens(tmp_path: Path) -> None:
    lengths = [10] * 40 + [20] * 40
    write(
        tmp_path,
        *[{"seq": n, "time_s": n, "completions": [completion(tokens=long)]} for n, long in enumerate(lengths)],
    )
    growth = RunSamples(tmp_path).search(SamplesQuery())["facts"]["growth"]
    assert (growth["seq"], growth["from_tokens"], growth["to_tokens"]) == (55, 10.0, 15.0)


def test_a_run_without_samples_has_an_empty_page(tmp_path: Path) -> None:
    page = RunSamples(tmp_path).search(SamplesQuery())
    assert (page["items"], page["groups"], page["indexed"], page["facts"]["growth"]) == ([], 0, 1.0, None)
