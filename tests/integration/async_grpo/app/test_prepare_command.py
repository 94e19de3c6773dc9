"""`async-grpo prepare` as a process: what it says, that killing it leaves nothing half made, and what it holds."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from async_grpo.app.cli.main import app
from async_grpo.config.model import RandomModelConfig
from async_grpo.data.prepared_dataset import open_prepared_folder
from async_grpo.models.tiny.random_qwen2 import train_tokenizer

ROOT = Path(__file__).parents[4]
MANY = 8000
PREPARE = """
import sys
from pathlib import Path
from async_grpo.config.data import PrepareConfig
from async_grpo.data.prepare.pipeline import prepare_dataset
from tests.support.tokenizers import Bytes
rows, out = map(Path, sys.argv[1:])
prepare_dataset(PrepareConfig(files=[rows], out=out, model=out, held_out=10), Bytes(), lambda done: None)
"""
READ = """
import sys
from pathlib import Path
from async_grpo.config import RunConfig
from async_grpo.data import make_source
from tests.support.tokenizers import Bytes
data = {"kind": "jsonl", "path": sys.argv[1]}
lengths = {"sampling": {"max_tokens": 32}, "rollout": {"vllm": {"max_model_len": 600}}, "eval": {"prompts": 2}}
config = RunConfig.model_validate({"name": "test", "model": {"random": {}}, "data": data, **lengths})
source = make_source(config, Bytes())
for index in range(int(sys.argv[2])):
    source.task(index)
status = Path("/proc/self/status").read_text()
print(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1])
"""


def write_rows(path: Path, count: int) -> Path:
    with path.open("w") as file:
        for number in range(count):
            row = {"question": f"{number}: " + "how many eggs are left? " * 8, "answer": f"#### {number}"}
            file.write(json.dumps(row) + "\n")
    return path


def start(code: str, *arguments: Path | str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> str:
    """What it printed; it must have succeeded."""
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return printed


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("many") / "rows.jsonl", MANY)


def sizes(draft: Path, name: str) -> Iterator[int]:
    """Of a file of the draft, as it grows; ends when the draft has become something else."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            yield (draft / name).stat().st_size
        except FileNotFoundError:
            yield 0
        time.sleep(0.002)


@pytest.mark.parametrize("stage", ["staged_train.tokens", "train.tokens", "held_out.index"])
def test_killed_at_any_moment_it_leaves_nothing_that_could_be_taken_for_whole(
    tmp_path: Path, many: Path, stage: str
) -> None:
    out, draft = tmp_path / "out", tmp_path / ".out.draft"
    process = start(PREPARE, many, out)
    for size in sizes(draft, stage):
        if size > 16 or process.poll() is not None:
            break
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    if not out.exists():  # it may just have been done
        assert draft.is_dir()
        ended(start(PREPARE, write_rows(tmp_path / "few.jsonl", 100), out))
    found = open_prepared_folder(out)
    assert len(found.train) in (90, MANY - 10)
    assert not draft.exists()


def test_two_at_once_do_not_mix(tmp_path: Path, many: Path) -> None:
    out = tmp_path / "out"
    first = start(PREPARE, many, out)
    assert next(size for size in sizes(tmp_path / ".out.draft", "staged_train.tokens") if size > 16)
    second = start(PREPARE, many, out)
    _, errors = second.communicate(timeout=60)
    assert "another process is preparing" in errors or "out exists" in errors
    ended(first)
    assert len(open_prepared_folder(out).train) == MANY - 10


def test_reading_takes_no_more_memory_for_twenty_times_as_many_rows(tmp_path: Path, many: Path) -> None:
    used = []
    for rows in (write_rows(tmp_path / "few.jsonl", MANY // 20), many):
        out = tmp_path / rows.parent.name
        ended(start(PREPARE, rows, out))
        used.append(int(ended(start(READ, out, "600"))))
    assert sum(file.stat().st_size for file in out.iterdir()) > 8 << 20
    assert abs(used[1] - used[0]) < 3 << 10  # KiB


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder as far as its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(RandomModelConfig(vocab_size=400), ["how many eggs are left?"])
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def type_in(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "300"})


@pytest.mark.parametrize("template", ["raw", "qwen_r1", "chat"])
def test_the_command_makes_a_folder_and_says_what_is_in_it(tmp_path: Path, model: Path, template: str) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", 40)
    with rows.open("a") as file:
        file.write("not json\n")
    words = ("prepare", rows, "--out", tmp_path / "out", "--model", model, "--held-out", 8, "--template", template)
    result = type_in(*words)
    assert result.exit_code == 0, result.output
    for words_of_it in (
        "32",
        "8",
        "rejected: unreadable row",
        "1, first rows.jsonl, line 41",
        f"data.path={tmp_path}/out",
    ):
        assert words_of_it in result.output
    assert len(open_prepared_folder(tmp_path / "out").train) == 32


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "/nowhere"], "--model: /nowhere"),
        (["--held-out", "-1"], "--held-out: "),
        (["--held-out", "40"], "--held-out keeps 40"),
        (["--template", "gone"], "raw, qwen_r1, chat"),
        (["--format", "generic"], "--prompt-field"),
        (["--format", "alpaca"], "'instruction'"),
    ],
)
def test_a_mistake_is_explained_without_a_traceback(
    tmp_path: Path, model: Path, words: list[str], message: str
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", 40)
    result = type_in("prepare", rows, "--out", tmp_path / "out", "--model", model, "--held-out", 8, *words)
    assert result.exit_code == 1
    assert message in result.output and "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


def test_a_quick_bench_of_the_data_measures_both_figures(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.data", "--quick", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(file.read_text())["figures"]
    assert [figure["unit"] for figure in figures] == ["rows/s", "s"]
    assert all(figure["value"] > 0 and figure["baseline"] > 0 and figure["ratio"] > 0 for figure in figures)
