"""The commands in README.md and the documentation, and how each is checked.

async-grpo ...   parsed by the real command line: the command, its options and arguments, `-o` and `--grid` keys,
                 configuration files. EXECUTED are also run (tests/integration/docs)
make ...         the target exists
python ...       the module or the file exists
anything else    stands in NOT_RUN with its reason
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/zh").glob("*.md"))]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS, ROOT / "deploy/README.md"]
GENERATED = ("reference.md",)

NOT_RUN = {
    r"docker\b": "needs Docker; `make test-deploy` brings the same services up",
    r"export [A-Z_]+=": "sets the secrets of a cluster",
    r"\. \.venv/bin/activate": "activates the environment of `make`",
    r"curl\b": "asks a server of a live run; tests/unit/rollout_server/http asks the same routes",
    r"tensorboard\b": "a page of another package",
    r"(kubectl|srun|ssh|redis-cli|promtool)\b": "needs a cluster or another program",
    r"pip install\b": "installs; the test of the wheel does the same",
    r"msrun\b|wandb\b|mlflow\b|swanlab\b|trackio\b": "a command of another package",
}
"""Commands of other programs: pattern -> why no test runs them."""

_FIRST = (
    r"(async-grpo|make|python|python3|docker|pip|curl|tensorboard|kubectl|srun|ssh|redis-cli|promtool|msrun|export)"
)
_START = re.compile(rf"(?:\$ )?(?P<environment>(?:[A-Z_]+=(?:\"[^\"]*\"|\S+) )*)(?P<command>{_FIRST} .+|\. \S+)")
_INLINE = re.compile(r"`((?:async-grpo|make) [^`\n]+)`")


@dataclass(frozen=True, slots=True)
class DocCommand:
    """One command of a page."""

    page: str
    line: int
    text: str
    inline: bool
    """In the running text, where arguments are often left out."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def commands() -> list[DocCommand]:
    """Every command of every page, in order; generated pages are left out."""
    return [command for page in PAGES if page.name not in GENERATED for command in _commands_of_page(page)]


def _commands_of_page(page: Path) -> Iterator[DocCommand]:
    name = str(page.relative_to(ROOT))
    fenced = False
    pending = ""
    start = 0
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
            pending = ""
        elif fenced:
            start = start if pending else number
            pending += line.strip()
            if pending.endswith("\\"):
                pending = pending[:-1]
                continue
            if (match := _START.fullmatch(pending)) and "<--" not in pending:
                yield DocCommand(name, start, _without_remark(match["command"]), inline=False)
            pending = ""
        else:
            yield from (DocCommand(name, number, found, inline=True) for found in _INLINE.findall(line))


def _without_remark(text: str) -> str:
    """`async-grpo chat   talk to it` and `make test  # tests` -> the command alone."""
    return re.split(r"\s{2,}|\s#\s", text)[0].strip()


def spellings(text: str) -> list[list[str]]:
    """The words that a notation stands for: `[--x]` is given, of `a | b` and `a|b` each is one spelling, and a word in
    capitals is a value.

    >>> spellings("async-grpo doctor [--platform cpu|npu]")
    [['async-grpo', 'doctor', '--platform', 'cpu'], ['async-grpo', 'doctor', '--platform', 'npu']]
    """
    text = re.sub(r"\s*\.\.\.", "", text)
    chosen = [part.split(" | ") if part.startswith("[") else [part] for part in re.split(r"(\[[^\]]*\])", text)]
    found: list[list[str]] = []
    for parts in product(*chosen):
        chunks = "".join(parts).replace("[", "").replace("]", "").split(" | ")
        for number, chunk in enumerate(chunks):
            words = chunk.split()
            found += [list(each) for each in product(*(_values(word) for word in _completed(chunks, number, words)))]
    return found


def _completed(chunks: list[str], number: int, words: list[str]) -> list[str]:
    """`async-grpo buffer stats | inspect`: the second is `async-grpo buffer inspect`."""
    if number == 0:
        return words
    first = chunks[0].split()
    if first[0] == "make":
        return words if words[0] == "make" else ["make", *words]
    grouped = first[1] in ("buffer", "bench", "runs", "configs")
    return [*first[: 2 if grouped else 1], *words]


def _values(word: str) -> list[str]:
    if "=" in word or "'" in word:
        return [word]
    return [
        "1" if re.fullmatch(r"[A-Z][A-Z_.a-z]*", each) and not each.endswith(".md") else each
        for each in word.split("|")
    ]
