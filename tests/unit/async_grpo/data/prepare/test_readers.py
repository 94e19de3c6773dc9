"""Rows of published files: what is read, what is a problem of one row, and what ends reading."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.data.prepare import readers
from async_grpo.data.prepare.readers import detect_kind, read_raw_rows
from async_grpo.errors import DataError


def written(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "data"
    path.write_bytes(data)
    return path


def test_json_lines_keep_line_numbers_and_the_text_of_numbers(tmp_path: Path) -> None:
    long = "1" * 5000
    last = f'{{"a": 18.0, "b": {long}, "c": 1e3, "d": true}}'
    path = written(tmp_path, b'\xef\xbb\xbf{"a": "1"}\r\n\n  {"a": "2"}  \n' + last.encode())
    rows = list(read_raw_rows(path))
    assert [(row.line, row.fields, row.problem) for row in rows] == [
        (1, {"a": "1"}, ""),
        (3, {"a": "2"}, ""),
        (4, {"a": "18.0", "b": long, "c": "1e3", "d": True}, ""),
    ]
    assert rows[-1].position == path.stat().st_size


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{", "not JSON"),
        (b'{"a": NaN}', "not JSON"),
        (b'{"a": 1} {}', "not JSON"),
        (b"[" * 200_000, "not JSON"),
        (b'"text"', "not an object but a str"),
        (b"[1]", "not an object but a list"),
        (b'{"a": "\xff"}', "not UTF-8"),
    ],
)
def test_an_unreadable_line_is_a_row_with_a_problem(tmp_path: Path, line: bytes, problem: str) -> None:
    before, bad, after = read_raw_rows(written(tmp_path, b'{"a": "1"}\n' + line + b'\n{"a": "2"}\n'))
    assert (before.fields, after.fields) == ({"a": "1"}, {"a": "2"})
    assert (bad.line, bad.fields) == (2, {}) and problem in bad.problem


def test_a_line_that_is_too_long_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "MAX_ROW_BYTES", 50)
    monkeypatch.setattr(readers, "_CHUNK_BYTES", 16)
    path = written(tmp_path, b'{"a": "' + b"x" * 500 + b'"}\n{"a": "2"}\n')
    long, after = read_raw_rows(path)
    assert long.problem == "above 50 bytes" and len(long.shown) <= 200
    assert (after.line, after.fields, after.position) == (2, {"a": "2"}, path.stat().st_size)


json_values = st.recursive(
    st.none() | st.booleans() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=30, deadline=None)
@given(
    elements=st.lists(st.dictionaries(st.text(max_size=5), json_values, max_size=3), max_size=8),
    indent=st.sampled_from([None, 0, 2]),
    chunk=st.integers(1, 40),
    ascii_only=st.booleans(),
)
def test_an_array_is_read_in_chunks_of_any_size(
    tmp_path_factory: pytest.TempPathFactory, elements: list[Any], indent: int | None, chunk: int, ascii_only: bool
) -> None:
    text = json.dumps(elements, indent=indent, ensure_ascii=ascii_only)
    path = written(tmp_path_factory.mktemp("array"), text.encode(errors="surrogatepass"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "_CHUNK_BYTES", chunk)
        assert [row.fields for row in read_raw_rows(path)] == elements


def test_array_elements_have_the_line_where_they_start(tmp_path: Path) -> None:
    path = written(tmp_path, b'[\n  {"a":\n "1"},\n  7,\n\n  {"a": "2"}\n]\n')
    assert [(row.line, row.problem) for row in read_raw_rows(path)] == [
        (2, ""),
        (4, "not an object but a str"),
        (6, ""),
    ]


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ('[{"a": "1"},\n{"a": "2"', 2, "no value"),
        ('[{"a": "1"}\n{"a": "2"}]', 2, "instead of a comma"),
        ('[{"a": "1"},\n\n]', 3, "no value"),
        ('[{"a": "1"}', 1, "instead of a comma"),
        ("[" * 100_000, 1, "no value"),
        ('[{"a": "\udcff"}]', 1, "not UTF-8"),
    ],
)
def test_a_damaged_array_is_refused_with_its_line(tmp_path: Path, text: str, line: int, what: str) -> None:
    with pytest.raises(DataError, match=rf"line {line}: .*{what}"):
        list(read_raw_rows(written(tmp_path, text.encode(errors="surrogateescape"))))


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (gzip.compress(b"{}", mtime=0), "a gzip file"),
        (b"PK\x03\x04rest", "a zip file"),
        (b"AGRPODAT" + bytes(8), "a part of a prepared folder"),
    ],
)
def test_other_and_missing_files_are_refused(tmp_path: Path, data: bytes, kind: str) -> None:
    path = written(tmp_path, data)
    assert detect_kind(path) == kind
    with pytest.raises(DataError, match=f"is {kind}"):
        read_raw_rows(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_raw_rows(tmp_path / "gone")


def test_parquet_is_read_row_by_row(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the extra `parquet` is not installed")
    import pyarrow.parquet as parquet

    chat = [{"role": "user", "content": "1 + 1?"}]
    table = pyarrow.Table.from_pylist([{"prompt": chat, "reward_model": {"ground_truth": str(i)}} for i in range(3000)])
    path = tmp_path / "data.parquet"
    parquet.write_table(table, path)
    rows = list(read_raw_rows(path))
    assert [row.line for row in rows] == list(range(1, 3001))
    assert rows[7].fields == {"prompt": chat, "reward_model": {"ground_truth": "7"}}
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="damaged Parquet"):
        list(read_raw_rows(path))
