"""`python -m benchmarks.data`: preparing data.

- rows a second of `async-grpo prepare` (reading, filters, duplicates, template, tokens, shuffling, checksums, files
  on the disk) beside a plain loop in one process that only parses each line, fills the template and tokenizes
- seconds until a run has its data from a prepared folder, beside tokenizing the JSON-lines file again

Both sides of a figure take turns on the same rows with the same tokenizer; the ratio is the median over the pairs.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

from rich.progress import Progress

from async_grpo.config import RunConfig
from async_grpo.config.data import PrepareConfig
from async_grpo.config.model import RandomModelConfig
from async_grpo.data.jsonl import JsonlSource
from async_grpo.data.prepare.pipeline import prepare_dataset
from async_grpo.data.prepared_source import PreparedSource
from async_grpo.data.tokenizer import Tokenizer
from async_grpo.lab.bench.measure import Measurement, Stopwatch, progress_bar
from async_grpo.models.tiny.random_qwen2 import train_tokenizer
from benchmarks.harness import main, make_parser

_TEXT = "sum of apples and pears that each child buys per day for a price in dollars after the half third part"
_WORDS = _TEXT.split()
_FULL_ROWS, _FULL_PAIRS = 20_000, 5
_QUICK_ROWS, _QUICK_PAIRS = 500, 1
_TEMPLATE = "Question: {prompt}\nAnswer:"
_LONGEST = 512


async def measure(progress: Progress, *, quick: bool) -> list[Measurement]:
    """All figures; `quick` only shows that the bench works."""
    return await asyncio.to_thread(_measure, progress, quick)


def _measure(progress: Progress, quick: bool) -> list[Measurement]:
    rows, pairs = (_QUICK_ROWS, _QUICK_PAIRS) if quick else (_FULL_ROWS, _FULL_PAIRS)
    step = progress_bar(progress, "preparing data", 2 * pairs)

    def seconds(work: Callable[[], object]) -> float:
        with Stopwatch() as spent:
            work()
        return spent.seconds

    def timed(ours: Callable[[], object], theirs: Callable[[], object]) -> list[tuple[float, float]]:
        found = []
        for _ in range(pairs):
            found.append((seconds(ours), seconds(theirs)))
            step()
        return found

    with tempfile.TemporaryDirectory(prefix="async-grpo-bench-") as name:
        bench = _Bench(Path(name), rows)
        preparing = timed(bench.prepare, bench.loop)
        opening = timed(bench.open, bench.load)
    return [
        Measurement.paired(
            f"prepare, {rows:,} rows",
            "rows/s",
            [(rows / ours_s, rows / theirs_s) for ours_s, theirs_s in preparing],
            "a loop that parses and tokenizes line by line, one process, and keeps nothing",
        ),
        Measurement.paired(
            f"a run's data at hand, {rows:,} rows", "s", opening, "the JSON-lines file, tokenized when it is loaded"
        ),
    ]


class _Bench:
    """Made-up rows, a tokenizer trained on some of them, and the two sides of each figure."""

    def __init__(self, folder: Path, rows: int) -> None:
        self._folder = folder
        self._file = folder / "rows.jsonl"
        self._template = folder / "template.jinja"
        self._template.write_text(_TEMPLATE.replace("{prompt}", "{{ question }}"))
        questions = _write_rows(self._file, rows)
        self._tokenizer: Tokenizer = train_tokenizer(RandomModelConfig(vocab_size=4096), questions[:2000])
        self._made = 0

    def prepare(self) -> None:
        self._made += 1
        config = PrepareConfig(
            files=[self._file],
            out=self._out,
            model=self._folder,
            template=str(self._template),
            held_out=64,
            max_prompt_tokens=_LONGEST,
        )
        prepare_dataset(config, self._tokenizer, lambda done: None)

    def loop(self) -> int:
        tokens = 0
        with self._file.open(encoding="utf-8") as file:
            for line in file:
                row = json.loads(line)
                tokens += len(self._tokenizer.encode(_TEMPLATE.replace("{prompt}", row["question"])))
        return tokens

    def open(self) -> object:
        return PreparedSource(self._config(self._out), self._tokenizer).task(0)

    def load(self) -> object:
        return JsonlSource(self._config(self._file, template=_TEMPLATE), self._tokenizer).task(0)

    @property
    def _out(self) -> Path:
        return self._folder / f"prepared-{self._made}"

    @staticmethod
    def _config(path: Path, **data: str) -> RunConfig:
        return RunConfig.model_validate(
            {
                "name": "bench",
                "model": {"random": {}},
                "data": {"kind": "jsonl", "path": path, "max_prompt_tokens": _LONGEST, **data},
                "sampling": {"max_tokens": 512},
                "rollout": {"vllm": {"max_model_len": 1024}},
                "eval": {"prompts": 64},
            }
        )


def _write_rows(path: Path, rows: int) -> list[str]:
    """Questions of 45 words on average, as long as those of GSM8K."""
    rng = random.Random(1)
    questions = [
        " ".join(rng.choice(_WORDS) if rng.random() < 0.9 else str(rng.randint(2, 999)) for _ in range(words)) + "?"
        for words in (rng.randint(15, 75) for _ in range(rows))
    ]
    with path.open("w", encoding="utf-8") as file:
        for question in questions:
            file.write(json.dumps({"question": question, "answer": f"#### {rng.randint(1, 999)}"}) + "\n")
    return questions


if __name__ == "__main__":
    main("python -m benchmarks.data", make_parser(__doc__), measure)
