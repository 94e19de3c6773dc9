"""The text of a stream arrives once it is final, and equals the text of its tokens."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from rollout_server.http.detokenizer import TextStream


def decode(tokens: list[int]) -> str:
    return bytes(tokens).decode(errors="replace")


def pieces(text: str, stops: Sequence[str] = ()) -> tuple[list[str], TextStream]:
    stream = TextStream(decode, stops)
    return [*(stream.push([token]) for token in text.encode()), stream.finish()], stream


@given(st.text("a \nß€𝄞\u200d", max_size=30))
def test_the_pieces_add_up_to_the_text(text: str) -> None:
    assert "".join(pieces(text)[0]) == text


def test_a_character_of_several_tokens_arrives_complete() -> None:
    assert pieces("aß€")[0] == ["a", "", "ß", "", "", "€", ""]


def test_an_incomplete_character_arrives_at_the_end() -> None:
    stream = TextStream(decode)
    assert stream.push([0xE2, 0x82]) == ""
    assert stream.finish() == "\ufffd"


def test_invalid_bytes_are_not_held_back_forever() -> None:
    stream = TextStream(decode)
    text = stream.push([0x80] * 20)
    assert len(text) >= 12


def test_no_text_follows_a_stop_text() -> None:
    out, stream = pieces("one END two", ["END"])
    assert "".join(out) == "one "
    assert stream.is_stopped


def test_a_possible_start_of_a_stop_text_is_held_back() -> None:
    out, stream = pieces("EN route", ["END"])
    assert out[:4] == ["", "", "EN ", "r"]
    assert not stream.is_stopped


def test_the_first_of_several_stop_texts_counts() -> None:
    assert "".join(pieces("ab cd ef", ["ef", "cd"])[0]) == "ab "


@given(st.text("ab", max_size=40), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3))
def test_the_text_ends_before_the_first_stop_text(text: str, stops: list[str]) -> None:
    ends = [position for stop in stops if (position := text.find(stop)) >= 0]
    out, stream = pieces(text, stops)
    assert stream.is_stopped == bool(ends)
    if not ends:
        assert "".join(out) == text
    else:
        assert text.startswith("".join(out))
        assert not any(stop in "".join(out) for stop in stops)
