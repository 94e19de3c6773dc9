"""What --grid and --seeds say."""

from __future__ import annotations

import pytest

from async_grpo.app.sweep.plan import Axis, combinations, parse_axes, parse_axis, parse_seeds
from async_grpo.errors import ConfigError


def test_an_axis_is_a_key_and_its_values_as_they_were_typed() -> None:
    assert parse_axis("max_staleness=0, 2 ,1e1") == Axis("max_staleness", ("0", "2", "1e1"))


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("k=[a,b],[c]", ("[a,b]", "[c]")),
        ("k={x: 1, y: [2, 3]},null", ("{x: 1, y: [2, 3]}", "null")),
        ('k="a,b",c', ('"a,b"', "c")),
        ("k='[',]", ("'['", "]")),
        ("k=a=b,c", ("a=b", "c")),
    ],
)
def test_a_comma_inside_brackets_or_quotes_belongs_to_its_value(text: str, values: tuple[str, ...]) -> None:
    assert parse_axis(text).values == values


@pytest.mark.parametrize("text", ["max_staleness", "=1,2", "max_staleness=", "max_staleness=0,,2", "max_staleness=0,"])
def test_what_is_no_axis_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="key=value,value"):
        parse_axis(text)


@pytest.mark.parametrize(("key", "fix"), [("seed", "--seeds"), ("name", "-o name="), ("runs_dir", "--out")])
def test_what_the_sweep_sets_itself_is_no_axis(key: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=fix):
        parse_axis(f"{key}=1,2")


def test_a_value_that_stands_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="value 2 stands twice"):
        parse_axis("max_staleness=2,0,2")


def test_a_key_belongs_to_one_grid_option_and_to_no_override() -> None:
    with pytest.raises(ConfigError, match="stands twice"):
        parse_axes(["a=1", "a=2"], [])
    with pytest.raises(ConfigError, match="both in --grid and in -o"):
        parse_axes(["a=1"], ["b=1", "a=3"])


def test_a_sweep_without_an_axis_is_refused() -> None:
    with pytest.raises(ConfigError, match="something to vary"):
        parse_axes([], [])


def test_the_last_axis_turns_fastest() -> None:
    axes = parse_axes(["s=0,1", "p=x,y"], [])
    assert [tuple(choice.values()) for choice in combinations(axes)] == [("0", "x"), ("0", "y"), ("1", "x"), ("1", "y")]


def test_seeds_are_whole_numbers_and_differ() -> None:
    assert parse_seeds("3, 1") == (3, 1)
    for text in ("", "1,", "a", "-1", "1.5", "1,1"):
        with pytest.raises(ConfigError, match="--seeds"):
            parse_seeds(text)
