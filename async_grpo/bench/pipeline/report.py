"""From results to figures for the file, and from figures to a table with a row a staleness."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table

from async_grpo.bench.figures import Figure, Machine, table
from async_grpo.bench.pipeline.observe import Observed
from async_grpo.bench.pipeline.results import Results, Spread

TOKENS, SHARE = "tokens/s", "share of the overlap bound"
LOWEST, HIGHEST = "lowest", "highest"
_SYNC = "S=0 of the same repetition"

_MEASURES: tuple[tuple[str, str, Callable[[Observed], float]], ...] = (
    ("samples/s", "samples/s", lambda one: one.samples_per_s),
    ("step", "s", lambda one: one.step_s),
    ("trainer idle", "share", lambda one: one.trainer_idle),
    ("rollout idle", "share", lambda one: one.rollout_idle),
    ("weights into the engine", "s/step", lambda one: one.update_s),
    ("generated to trained", "x", lambda one: one.generated),
    ("age, mean", "steps", lambda one: one.age_mean),
    ("age, largest", "steps", lambda one: one.age_max),
)

_COLUMNS = (TOKENS, "samples/s", "step", "trainer idle", "rollout idle", "age, mean", "age, largest")


def figures_of(results: Results) -> list[Figure]:
    """Those of every S, then those of the two sides. Values are medians over the repetitions."""
    found = [figure for staleness in results.staleness for figure in _of_staleness(results, staleness)]
    sides = results.sides
    return [
        *found,
        Figure("T_gen, S=0", Spread.of([one.gen_s for one in sides]).median, "s/step"),
        Figure("T_train, S=0", Spread.of([one.train_s for one in sides]).median, "s/step"),
        Figure("T_gen / T_train, S=0", Spread.of([one.ratio for one in sides]).median, "x"),
        Figure("overlap bound, S=0", Spread.of([one.bound for one in sides]).median, "x"),
    ]


def view(title: str, figures: Sequence[Figure], machine: Machine) -> RenderableType:
    """A row a staleness, and below it the figures that are of none."""
    rest = [figure for figure in figures if not figure.name.startswith("S=")]
    by_name = {figure.name: figure for figure in figures}
    rows = dict.fromkeys(name.partition(":")[0] for name in by_name if name.startswith("S="))
    caption = "medians of the repetitions, in brackets lowest to highest"
    shown = Table(title=title, caption=caption, caption_justify="left")
    for column in ("", TOKENS, "to S=0", "of the bound", *_COLUMNS[1:]):
        shown.add_column(column, justify="right")
    for row in rows:
        own = {column: by_name[f"{row}: {column}"] for column in _COLUMNS}
        ratio, share = own[TOKENS].ratio, by_name.get(f"{row}: {SHARE}")
        cells = ["" if ratio is None else f"{ratio:.2f}", "" if share is None else f"{share.value:.2f}"]
        shown.add_row(row, _with_spread(by_name, row, TOKENS), *cells, *(_short(own[name]) for name in _COLUMNS[1:]))
    return Group(shown, table("", rest, machine))


def _of_staleness(results: Results, staleness: int) -> list[Figure]:
    name = f"S={staleness}"
    speed = results.spread(staleness, lambda one: one.tokens_per_s)
    sync = results.spread(0, lambda one: one.tokens_per_s)
    found = [
        Figure(f"{name}: {TOKENS}", speed.median, "tokens/s", *_beside(results, staleness, sync)),
        *_ends(f"{name}: {TOKENS}", speed, "tokens/s"),
    ]
    if staleness:
        share = results.share_of_bound(staleness)
        found += [Figure(f"{name}: {SHARE}", share.median, "x"), *_ends(f"{name}: {SHARE}", share, "x")]
    return found + [
        Figure(f"{name}: {what}", results.spread(staleness, measure).median, unit) for what, unit, measure in _MEASURES
    ]


def _beside(results: Results, staleness: int, sync: Spread) -> tuple[float, str, float] | tuple[()]:
    return (sync.median, _SYNC, results.speedup(staleness).median) if staleness else ()


def _ends(name: str, spread: Spread, unit: str) -> list[Figure]:
    return [Figure(f"{name}, {LOWEST}", spread.lowest, unit), Figure(f"{name}, {HIGHEST}", spread.highest, unit)]


def _with_spread(by_name: dict[str, Figure], row: str, what: str) -> str:
    middle, low, high = (by_name[f"{row}: {what}{end}"].value for end in ("", f", {LOWEST}", f", {HIGHEST}"))
    return f"{middle:,.0f} ({low:,.0f} to {high:,.0f})"


def _short(figure: Figure) -> str:
    return f"{figure.value:.0%}" if figure.unit == "share" else f"{figure.value:.3g}"
