"""`python -m benchmarks.data`: speed of data preparation.

- rows per second of `async-grpo prepare` (reading, filters, duplicates, template, tokens, shuffling, checksums, files
  on disk), compared with a plain loop in one process that only parses each line, fills the template and tokenizes
- seconds until a run has its data from a prepared folder, compared with tokenizing the JSON-lines file again

Both sides of a comparison alternate on the same rows with the same tokenizer. The ratio is the median over the pairs.
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
from async_grpo.lab.bench.measure import Measurement, Step, Stopwatch, add_progress_bar
from async_grpo.models.tiny.random_qwen2 import train_tokenizer
from benchmarks.harness import main, make_parser

_TEXT = "sum of apples and pears that each child buys per day for a price in dollars after the half third part"
_WORDS = _TEXT.split()
_FULL_ROWS = 20_000
_FULL_PAIRS = 5
_QUICK_ROWS = 500
_QUICK_PAIRS = 1
_TEMPLATE = "Question: {prompt}\nAnswer:"
_MAX_PROMPT_TOKENS = 512


async def measure(progress: Progress, *, quick: bool) -> list[Measurement]:
    """Measure everything. `quick` only shows that the bench works."""
    return await asyncio.to_thread(_measure, progress, quick)


def _measure(progress: Progress, quick: bool) -> list[Measurement]:
    rows = _QUICK_ROWS if quick else _FULL_ROWS
    pairs = _QUICK_PAIRS if quick else _FULL_PAIRS
    step = add_progress_bar(progress, "preparing data", 2 * pairs)

    with tempfile.TemporaryDirectory(prefix="async-grpo-bench-") as name:
        bench = _DataBench(Path(name), rows)
        prepare_s = _time_pairs(bench.prepare, bench.tokenize_lines, pairs, step)
        # Opens what the last `prepare` has written.
        open_s = _time_pairs(bench.open_prepared, bench.load_jsonl, pairs, step)

    return [
        Measurement.paired(
            f"prepare, {rows:,} rows",
            "rows/s",
            [(rows / ours_s, rows / baseline_s) for ours_s, baseline_s in prepare_s],
            "a loop that parses and tokenizes line by line, one process, and keeps nothing",
        ),
        Measurement.paired(
            f"a run's data at hand, {rows:,} rows", "s", open_s, "the JSON-lines file, tokenized when it is loaded"
        ),
    ]


def _time_pairs(
    ours: Callable[[], object], baseline: Callable[[], object], pairs: int, step: Step
) -> list[tuple[float, float]]:
    """Call both sides alternately. Returns the seconds of each pair."""
    seconds = []
    for _ in range(pairs):
        seconds.append((_time_call(ours), _time_call(baseline)))
        step()
    return seconds


def _time_call(call: Callable[[], object]) -> float:
    with Stopwatch() as stopwatch:
        call()
    return stopwatch.seconds


class _DataBench:
    """Generated rows, a tokenizer trained on some of them, and both sides of each comparison."""

    def __init__(self, folder: Path, rows: int) -> None:
        self._folder = folder
        self._file = folder / "rows.jsonl"
        self._template = folder / "template.jinja"
        self._template.write_text(_TEMPLATE.replace("{prompt}", "{{ question }}"))
        questions = _write_rows(self._file, rows)
        self._tokenizer: Tokenizer = train_tokenizer(RandomModelConfig(vocab_size=4096), questions[:2000])
        self._prepared_folders = 0

    def prepare(self) -> None:
        self._prepared_folders += 1
        config = PrepareConfig(
            files=[self._file],
            out=self._newest_folder,
            model=self._folder,
            template=str(self._template),
            held_out=64,
            max_prompt_tokens=_MAX_PROMPT_TOKENS,
        )
        prepare_dataset(config, self._tokenizer, lambda done: None)

    def tokenize_lines(self) -> int:
        """Parse and tokenize each line, as the baseline of `prepare`. Returns the number of tokens."""
        tokens = 0
        with self._file.open(encoding="utf-8") as file:
            for line in file:
                row = json.loads(line)
                tokens += len(self._tokenizer.encode(_TEMPLATE.replace("{prompt}", row["question"])))
        return tokens

    def open_prepared(self) -> object:
        return PreparedSource(self._make_config(self._newest_folder), self._tokenizer).task(0)

    def load_jsonl(self) -> object:
        return JsonlSource(self._make_config(self._file, template=_TEMPLATE), self._tokenizer).task(0)

    @property
    def _newest_folder(self) -> Path:
        return self._folder / f"prepared-{self._prepared_folders}"

    @staticmethod
    def _make_config(path: Path, **data: str) -> RunConfig:
        return RunConfig.model_validate(
            {
                "name": "bench",
                "model": {"random": {}},
                "data": {"kind": "jsonl", "path": path, "max_prompt_tokens": _MAX_PROMPT_TOKENS, **data},
                "sampling": {"max_tokens": 512},
                "rollout": {"vllm": {"max_model_len": 1024}},
                "eval": {"prompts": 64},
            }
        )


def _write_rows(path: Path, rows: int) -> list[str]:
    """Write questions of 45 words on average, the length of those of GSM8K. Returns the questions."""
    rng = random.Random(1)
    questions = []
    for _ in range(rows):
        words = []
        for _ in range(rng.randint(15, 75)):
            words.append(rng.choice(_WORDS) if rng.random() < 0.9 else str(rng.randint(2, 999)))
        questions.append(" ".join(words) + "?")
    with path.open("w", encoding="utf-8") as file:
        for question in questions:
            file.write(json.dumps({"question": question, "answer": f"#### {rng.randint(1, 999)}"}) + "\n")
    return questions


if __name__ == "__main__":
    main("python -m benchmarks.data", make_parser(__doc__), measure)
