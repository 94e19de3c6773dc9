"""Commands of the documentation, run as they stand there, in order, on a run of two steps.

`EXECUTED` are texts of the pages; a text that a page no longer has fails. What is replaced stands beside it: a name
that a reader has to choose, or the step of a longer run.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.doc_commands import ROOT, commands
from tests.support.whole_run import COMMAND, CONFIG

pytestmark = pytest.mark.slow

EXECUTED: dict[str, dict[str, str]] = {
    "async-grpo run configs/quickstart.yaml -o max_staleness=0": {" -o max_staleness=0": ""},
    "async-grpo run configs/quickstart.yaml -o seed=2": {},
    "async-grpo eval configs/quickstart.yaml": {},
    "async-grpo eval configs/quickstart.yaml --samples 16 --temperature 0.7 --json f.json --save completions.jsonl": {},
    "async-grpo eval --run-dir runs/NAME --checkpoint runs/NAME/checkpoints/hf-00000050": {
        "NAME": "quickstart",
        "00000050": "00000002",
    },
    "async-grpo chat configs/quickstart.yaml --prompt '123+456=' --answer 579 --temperature 0": {},
    "async-grpo convert Qwen/folder megatron/folder": {},
    "async-grpo convert megatron/folder back/folder": {},
    "async-grpo export runs/NAME out/folder --version 40": {"NAME": "quickstart", "40": "2"},
    "async-grpo runs list [RUNS]": {" [RUNS]": ""},
    "async-grpo runs show runs/NAME": {"NAME": "quickstart"},
    "async-grpo runs compare runs/A runs/B": {"runs/A": "runs/quickstart", "runs/B": "runs/quickstart-seed.2"},
    "async-grpo runs samples runs/NAME --worst -n 5": {"NAME": "quickstart"},
    "async-grpo runs report runs/NAME": {"NAME": "quickstart"},
    "async-grpo runs clean --keep-last 10": {},
    "async-grpo resume runs/NAME --steps 200": {"NAME": "quickstart", "200": "3"},
    "async-grpo prepare gsm8k/train.jsonl --held-out-from gsm8k/test.jsonl --model MODEL --template qwen_r1 "
    "--max-prompt-tokens 512 --out data/gsm8k": {"MODEL": "Qwen/folder"},
    "async-grpo sweep configs/quickstart.yaml --grid max_staleness=0,1,2,4,8 --dry-run": {},
    "async-grpo run configs/qwen2.5_0.5b_gsm8k_one_gpu.yaml --dry-run": {},
    "async-grpo import-config grpo_qwen25_7b_A3.yaml --from mindspeed-rl -o my-run.yaml": {},
    "async-grpo import-config run_qwen3_8b_fsdp.sh --from verl --set n_trainer_devices=8 -o other-run.yaml": {},
    "async-grpo run my-run.yaml --dry-run": {},
}
SCRIPT = """\
case "$DEVICE" in gpu) n_trainer_devices=8 ;; esac
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=5 \\
    actor_rollout_ref.model.path=Qwen/Qwen3-8B trainer.n_gpus_per_node=${n_trainer_devices} "$@"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What a reader has: the configurations (the quickstart a tiny one), a data set, files of other systems."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "configs").mkdir()
    small = CONFIG.format(steps=2, max_tokens=8).replace("name: small", "name: quickstart")
    small = small.replace("checkpoint: {every_steps: 2}", "checkpoint: {every_steps: 1, export_every_steps: 2}")
    (folder / "configs/quickstart.yaml").write_text(small)
    (folder / "gsm8k").mkdir()
    for name, first in (("train", 10), ("test", 60)):
        rows = [{"question": f"{n} plus 1 is", "answer": f"one more #### {n + 1}"} for n in range(first, first + 20)]
        (folder / f"gsm8k/{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    published = ROOT / "tests/support/published/mindspeed_rl_grpo_qwen25_7b.yaml"
    (folder / "grpo_qwen25_7b_A3.yaml").write_text(published.read_text())
    (folder / "run_qwen3_8b_fsdp.sh").write_text(SCRIPT)
    (folder / "Qwen").mkdir()
    (folder / "Qwen/folder").symlink_to(folder / "runs/quickstart/checkpoints/hf")
    yield folder


@pytest.mark.parametrize("text", EXECUTED)
def test_a_documented_command_runs(folder: Path, text: str) -> None:
    assert text in {command.text for command in commands()}, "no page has this command any more"
    typed = text
    for written, chosen in EXECUTED[text].items():
        typed = typed.replace(written, chosen)
    environment = {**os.environ, "ASYNC_GRPO_CACHE": str(folder / "cache"), "COLUMNS": "160", "PYTHONPATH": str(ROOT)}
    words = [*COMMAND, *shlex.split(typed)[1:]]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f"{typed}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
