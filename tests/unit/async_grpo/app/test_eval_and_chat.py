"""`async-grpo eval` and `chat` without an engine: what they refuse and why, how a reply is shown."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner, Result

from async_grpo.app.chat import ChatSession, PlainPrompt, TemplatePrompt, make_prompt
from async_grpo.app.cli.chat import ChatOptions, ChatTerminal, _converse, _open
from async_grpo.app.cli.evaluate import _remarks
from async_grpo.app.cli.main import app
from async_grpo.app.evaluate.evaluate import EvalReport, evaluate, facts, plan_of, rows, stated_by_the_run, with_prompts
from async_grpo.app.evaluate.policy_source import (
    Checkpoint,
    LiveRun,
    OfflineContext,
    chosen_run,
    differences,
    find_checkpoint,
    find_live,
    open_checkpoint,
)
from async_grpo.app.launch.run_folder import RunFolder, RunState
from async_grpo.config import RunConfig, dump
from async_grpo.errors import ConfigError, DataError, EngineError, WaitTimeout
from async_grpo.rewards.base import RewardInput, RewardResult
from async_grpo.wire.board import ServerBeat
from rollout_server.engines.base import GenerationRequest
from rollout_server.evaluation.eval_runner import EvalPlan, EvalRunner
from rollout_server.workflows import SingleTurn
from tests.support.http_fakes import Letters, says, scripted
from tests.support.rollout_fakes import FakePool, Yes, config_of

CONFIGS = Path(__file__).parents[4] / "configs"
HOSTILE = "\x1b[2J\x1b]0;owned\x07[red]not red[/red]\u202e\r\x9b31m"


def type_in(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})


def run_of(tmp_path: Path, **changes: Any) -> tuple[RunConfig, RunFolder]:
    """A run of which only the folder is left."""
    config = config_of(runs_dir=tmp_path, **changes)
    folder = RunFolder(config.run_dir)
    folder.path.mkdir(parents=True)
    folder.config_file.write_text(dump(config))
    return config, folder


def hugging_face(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, text in (("config.json", '{"model_type": "qwen2"}'), ("tokenizer_config.json", "{}")):
        (folder / name).write_text(text)
    save_file({"a": np.zeros(1)}, folder / "model.safetensors")
    return folder


# Which policy


def test_the_final_checkpoint_of_the_run_is_the_default(tmp_path: Path) -> None:
    _, folder = run_of(tmp_path)
    path = hugging_face(folder.path / "checkpoints" / "hf")
    assert find_checkpoint(folder, None) == Checkpoint(path, None)
    folder.write_state(RunState(finished_steps=4))
    assert find_checkpoint(folder, None) == Checkpoint(path, 4)
    assert find_checkpoint(folder, path) == Checkpoint(path, 4)


def test_a_checkpoint_says_its_version_by_its_name(tmp_path: Path) -> None:
    _, folder = run_of(tmp_path)
    path = hugging_face(folder.path / "checkpoints" / "hf-00000025")
    assert find_checkpoint(folder, path) == Checkpoint(path, 25)
    stranger = hugging_face(tmp_path / "stranger")
    assert find_checkpoint(folder, stranger) == Checkpoint(stranger, None)


def test_a_resumable_checkpoint_of_a_run_is_exported_first(tmp_path: Path) -> None:
    _, folder = run_of(tmp_path)
    path = folder.path / "checkpoints" / "00000010"
    path.mkdir(parents=True)
    assert find_checkpoint(folder, path) == Checkpoint(path, 10, resumable=True)


def test_a_checkpoint_is_known_from_inside_its_folder_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, folder = run_of(tmp_path)
    folder.write_state(RunState(finished_steps=4))
    final = hugging_face(folder.path / "checkpoints" / "hf")
    resumable = folder.path / "checkpoints" / "00000010"
    resumable.mkdir()
    monkeypatch.chdir(resumable.parent)
    assert find_checkpoint(folder, Path("hf")) == Checkpoint(final, 4)
    assert find_checkpoint(folder, Path("00000010")) == Checkpoint(resumable, 10, resumable=True)
    monkeypatch.chdir(resumable)
    for spelled in (Path(), Path("../00000010")):
        assert find_checkpoint(folder, spelled) == Checkpoint(resumable, 10, resumable=True)


async def test_an_export_that_never_ends_is_given_up_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("async_grpo.app.evaluate.policy_source.EXPORT_TIMEOUT_S", 0.01)
    _, folder = run_of(tmp_path)
    checkpoint = Checkpoint(folder.path / "checkpoints" / "00000010", 10, resumable=True)
    with pytest.raises(WaitTimeout, match=r"00000010 to be exported.*async-grpo export"):
        async with open_checkpoint(checkpoint, lambda _: None):
            pass


def test_without_a_final_checkpoint_it_says_what_there_is(tmp_path: Path) -> None:
    _, folder = run_of(tmp_path)
    with pytest.raises(ConfigError, match=r"written when the run ends.*no checkpoint at all.*--live"):
        find_checkpoint(folder, None)
    hugging_face(folder.path / "checkpoints" / "hf-00000025")
    with pytest.raises(ConfigError, match=r"There are hf-00000025: give one with --checkpoint .*hf-00000025"):
        find_checkpoint(folder, None)


def test_a_folder_that_is_no_checkpoint_is_an_error_with_the_commands(tmp_path: Path) -> None:
    _, folder = run_of(tmp_path)
    with pytest.raises(ConfigError, match=r"neither a Hugging Face folder.*async-grpo export.*async-grpo convert"):
        find_checkpoint(folder, tmp_path)


def test_a_run_folder_that_was_moved_is_found_where_it_is(tmp_path: Path) -> None:
    _, folder = run_of(tmp_path / "before")
    moved = tmp_path / "elsewhere" / "renamed"
    moved.parent.mkdir()
    folder.path.rename(moved)
    config, found = chosen_run(None, [], moved)
    assert (config.run_dir, found.path) == (moved, moved)


def test_a_configuration_that_differs_from_the_runs_is_named(tmp_path: Path) -> None:
    config, folder = run_of(tmp_path)
    assert differences(config, folder) == []
    changed = config.model_copy(update={"seed": 7, "eval": config.eval.model_copy(update={"samples": 3})})
    assert differences(changed, folder) == ["eval.samples", "seed"]


def test_a_live_run_is_its_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[ServerBeat] = []

    class Board:
        async def servers(self) -> list[ServerBeat]:
            return beats

        async def aclose(self) -> None: ...

    async def connect(*_: object) -> Board:
        return Board()

    config = config_of()
    monkeypatch.setattr("async_grpo.app.evaluate.policy_source.find_run", lambda *_: config)
    monkeypatch.setattr("async_grpo.app.evaluate.policy_source.connect_board", connect)
    with pytest.raises(ConfigError, match="no rollout server of the run test has reported"):
        asyncio.run(find_live(None, [], tmp_path))
    beats.append(ServerBeat(name="rollout-0", pid=1, version=3))
    with pytest.raises(ConfigError, match=r"rollout-0.*rollout\.http\.port is off"):
        asyncio.run(find_live(None, [], tmp_path))
    beats.append(ServerBeat(name="rollout-1", pid=1, version=4, http="http://127.0.0.1:1"))
    assert asyncio.run(find_live(None, [], tmp_path)) == LiveRun(config, {"http://127.0.0.1:1": 4})


@pytest.mark.parametrize("command", ["eval", "chat"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "which run?"),
        (["{config}"], "there is no checkpoint"),
        (["{config}", "--checkpoint", "/nowhere"], "no folder /nowhere"),
        (["{config}", "--live"], "holds no run that was started"),
        (["{config}", "--live", "--checkpoint", "x"], "two policies"),
        (["{config}", "--run-dir", "x"], "--run-dir names the run already"),
        (["--run-dir", "/nowhere"], "not the folder of a run"),
        (["{config}", "-o", "max_stalenes=1"], "Did you mean 'max_staleness'?"),
    ],
)
def test_a_mistake_is_explained_without_a_traceback(command: str, words: list[str], said: str, tmp_path: Path) -> None:
    runs = ["-o", f"runs_dir={tmp_path}"] if "{config}" in words and "--run-dir" not in words else []
    result = type_in(command, *(word.format(config=CONFIGS / "quickstart.yaml") for word in words), *runs)
    assert result.exit_code == 1
    assert said in result.output
    assert "Traceback" not in result.output


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    there = tmp_path / "there.json"
    there.touch()
    for option in ("--json", "--save"):
        result = type_in("eval", str(CONFIGS / "quickstart.yaml"), option, str(there))
        assert result.exit_code == 1 and "nothing is overwritten" in result.output


def test_an_expected_answer_needs_a_question() -> None:
    result = type_in("chat", str(CONFIGS / "quickstart.yaml"), "--answer", "4")
    assert result.exit_code == 1 and "/answer TEXT" in result.output


# How much is asked


def test_the_plan_is_the_runs_unless_told_otherwise() -> None:
    config = config_of()
    assert plan_of(config, prompts=None, samples=None, temperature=None) == EvalPlan(4, 2, 1.0, True)
    assert plan_of(config, prompts=3, samples=8, temperature=0.5) == EvalPlan(3, 8, 0.5, True)
    with pytest.raises(ConfigError, match="reported as greedy"):
        plan_of(config, prompts=None, samples=None, temperature=0.0)


def test_more_prompts_are_held_out_only_where_they_were_not_trained_on(tmp_path: Path) -> None:
    config = config_of()
    assert with_prompts(config, 4) is config
    assert with_prompts(config, 100).eval.prompts == 100
    data = tmp_path / "train.jsonl"
    jsonl = config_of(data={"kind": "jsonl", "path": data})
    with pytest.raises(ConfigError, match="trains on the others"):
        with_prompts(jsonl, 5)
    apart = config_of(data={"kind": "jsonl", "path": data, "eval_path": data})
    assert with_prompts(apart, 5).eval.prompts == 5


# The report of an evaluation


async def report_of(
    config: RunConfig, policy: Checkpoint | LiveRun, plan: EvalPlan, wrong: bytes = b"no"
) -> EvalReport:
    """Every other prompt has a wrong answer."""
    engine = await scripted(lambda request: [*(b"yes" if request.prompt[0] % 2 else wrong), 255])
    pool: Any = FakePool()
    context = OfflineContext(config, "eval", engine, pool, SingleTurn(Letters()), Numbered())
    grades = await EvalRunner(context).grade(plan)
    stated = stated_by_the_run(config, policy, plan, len(grades.prompts))
    return EvalReport(config, policy, plan, grades, {3: 10, 4: 30}, 1.5, stated)


class Numbered(Yes):
    def held_out(self) -> list[Any]:
        from async_grpo.data.base import make_task

        return [make_task(i, f"p{i}", [i], "yes", {"source": "ab"[i // 2]}) for i in range(4)]


async def test_the_facts_and_the_rows_say_everything(tmp_path: Path) -> None:
    report = await report_of(config_of(), Checkpoint(tmp_path, 4), EvalPlan(4, 2))
    found = json.loads(json.dumps(facts(report)))
    assert found["policy"] == {"checkpoint": str(tmp_path), "version": 4}
    assert found["figures"]["mean"]["value"] == found["figures"]["greedy"]["value"] == 0.5
    assert set(found["by_source"]) == {"a", "b"}
    written = list(rows(report))
    assert len(written) == 4 * 2 + 4
    assert {(row["how"], row["extracted"], row["right"]) for row in written} == {
        ("sampled", "yes", True),
        ("sampled", "no", False),
        ("greedy", None, True),
        ("greedy", None, False),
    }


async def test_answers_that_could_not_be_looked_for_are_remarked_with_the_reason(tmp_path: Path) -> None:
    report = await report_of(config_of(), Checkpoint(tmp_path, 4), EvalPlan(4, 2), wrong=b"!")
    assert facts(report)["figures"]["unextracted"] == 4
    (remark,) = [line for line in _remarks(report) if "`extract`" in line]
    assert remark.startswith("In 4 completions") and "(extraction 4; first ValueError: no)" in remark
    found = {(row["how"], row["completion"]): row["unextracted"] for row in rows(report)}
    assert (
        found["sampled", "!"] == "extraction: ValueError: no" and found["sampled", "yes"] == found["greedy", "!"] == ""
    )


async def test_prompts_that_are_trained_on_are_left_out_with_a_remark(tmp_path: Path) -> None:
    report = await report_of(config_of(), Checkpoint(tmp_path, 4), EvalPlan(7, 2))
    assert "The data hold out 4 prompts, fewer than the 7 requested." in _remarks(report)
    without = replace(report, trained_on=3)
    assert [line for line in _remarks(without) if "prompts" in line] == [
        "3 of the requested prompts were left out, because the run trains on them."
    ]
    assert facts(without)["prompts_trained_on"] == 3


async def test_a_live_evaluation_says_which_versions_wrote_the_answers(tmp_path: Path) -> None:
    report = await report_of(config_of(), LiveRun(config_of(), {"http://h:1": 4}), EvalPlan(4, 2))
    assert "3 (25% of the tokens), 4 (75% of the tokens)" in " ".join(_remarks(report))
    assert facts(report)["policy"] == {"live": ["http://h:1"], "tokens_by_version": {"3": 10, "4": 30}}


async def test_it_says_whether_the_run_states_the_same(tmp_path: Path) -> None:
    config, folder = run_of(tmp_path)
    policy = Checkpoint(folder.path / "checkpoints" / "hf", 4)
    assert (await report_of(config, policy, EvalPlan(4, 2))).agrees is None
    stated = {"version": 4, "prompts": 4, "samples": 2, "sampled_accuracy": 0.5, "greedy_accuracy": 0.5}
    summary = folder.path / "summary.json"
    summary.write_text(json.dumps({"evaluations": [stated]}))
    report = await report_of(config, policy, EvalPlan(4, 2))
    assert report.agrees and "Exactly what the run's report states" in " ".join(_remarks(report))
    summary.write_text(json.dumps({"evaluations": [{**stated, "greedy_accuracy": 0.25}]}))
    report = await report_of(config, policy, EvalPlan(4, 2))
    assert report.agrees is False and "states 0.5 sampled, 0.25 greedy" in " ".join(_remarks(report))
    assert (await report_of(config, policy, EvalPlan(4, 1))).agrees is None
    assert (await report_of(config, Checkpoint(tmp_path / "stranger", 4), EvalPlan(4, 2))).agrees is None


async def test_it_says_so_too_where_the_data_hold_out_fewer_prompts_than_are_asked_for(tmp_path: Path) -> None:
    config, folder = run_of(tmp_path, eval={"prompts": 10, "samples": 2})
    stated = {"version": 4, "prompts": 4, "samples": 2, "sampled_accuracy": 0.5, "greedy_accuracy": 0.5}
    (folder.path / "summary.json").write_text(json.dumps({"evaluations": [stated]}))
    policy = Checkpoint(folder.path / "checkpoints" / "hf", 4)
    assert (await report_of(config, policy, EvalPlan(10, 2))).agrees


class Evaluating:
    """`evaluate` of a policy that says yes, with an engine, a pool and prompts of the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: Any, pool: Any = None, source: Any = None) -> None:
        self.kept = -1

        @asynccontextmanager
        async def policy(*_: object) -> Any:
            yield engine, Path("hf")

        @asynccontextmanager
        async def context(config: RunConfig, sampler: Any, *_: object, kept: int) -> Any:
            self.kept = kept
            yield OfflineContext(config, "eval", sampler, pool or FakePool(), SingleTurn(Letters()), source or Yes())

        monkeypatch.setattr("async_grpo.app.evaluate.evaluate.open_policy", policy)
        monkeypatch.setattr("async_grpo.app.evaluate.evaluate.load_tokenizer", lambda _: Letters())
        monkeypatch.setattr("async_grpo.app.evaluate.evaluate.LOOK_EVERY_S", 0.01)
        monkeypatch.setattr("async_grpo.app.evaluate.evaluate.open_context", context)

    async def __call__(self, plan: EvalPlan, patience_s: float = 5.0) -> EvalReport:
        nothing = lambda _: None  # noqa: E731
        policy = Checkpoint(Path("hf"), 1)
        return await evaluate(config_of(), policy, plan, patience_s=patience_s, say=nothing, on_answer=nothing)


async def test_a_policy_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluating = Evaluating(monkeypatch, await scripted(says("never"), tokens_per_s=0.001))
    with pytest.raises(WaitTimeout, match=r"the next completion \(0 of 12 are there\).*--patience"):
        await evaluating(EvalPlan(4, 2), patience_s=0.05)


async def test_reward_functions_that_never_judge_are_given_up_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = FakePool()
    pool.gate = asyncio.Event()
    evaluating = Evaluating(monkeypatch, await scripted(says("yes")), pool)
    with pytest.raises(WaitTimeout, match=r"the reward functions to judge .*\(8 are there, 0 are judged\)"):
        await evaluating(EvalPlan(4, 2), patience_s=0.2)


async def test_grades_that_come_slowly_one_after_the_other_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(FakePool):
        def __init__(self) -> None:
            super().__init__()
            self.free = asyncio.Lock()

        async def judge(self, items: Sequence[RewardInput]) -> list[RewardResult]:
            async with self.free:
                await asyncio.sleep(0.15)
                return await super().judge(items)

    evaluating = Evaluating(monkeypatch, await scripted(says("yes")), Slow())
    report = await evaluating(EvalPlan(4, 2), patience_s=0.5)  # less than the four prompts take
    assert report.grades.sampled_accuracy == 1.0


async def test_prompts_beyond_those_that_the_run_kept_are_asked_unless_it_trains_on_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Fewer(Yes):
        dropped = {"also trained on": 2, "prompt too long": 1}

    evaluating = Evaluating(monkeypatch, await scripted(says("yes")), source=Fewer())
    report = await evaluating(EvalPlan(6, 1))
    assert (evaluating.kept, report.trained_on, report.config.eval.prompts) == (4, 2, 6)


async def test_a_live_run_that_refuses_such_long_completions_is_not_asked() -> None:
    config = config_of(sampling={"max_tokens": 200}, rollout={"http": {"max_tokens": 100}})
    nothing, plan = lambda _: None, EvalPlan(4, 2)
    with pytest.raises(ConfigError, match=r"sampling\.max_tokens \(200\) is above rollout\.http\.max_tokens \(100\)"):
        await evaluate(config, LiveRun(config, {}), plan, patience_s=1.0, say=nothing, on_answer=nothing)


# Talking


async def terminal_of(said: str | list[str], **changes: Any) -> tuple[ChatTerminal, list[GenerationRequest]]:
    texts, asked = [said] if isinstance(said, str) else said, []

    def script(request: GenerationRequest) -> list[int]:
        asked.append(request)
        return [*texts[(len(asked) - 1) % len(texts)].encode(), 255]

    prompt = changes.pop("prompt", PlainPrompt("Q: {prompt}", Letters()))
    config = config_of(**{"sampling": {"max_tokens": 200}, **changes})
    session = ChatSession(config, await scripted(script), Utf8(), prompt)
    return ChatTerminal(config, Checkpoint(Path("hf"), 7), session, AsyncExitStack()), asked


class Utf8(Letters):
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return bytes(token for token in token_ids if token != 255).decode(errors="replace")


async def test_a_reply_is_shown_with_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    terminal, asked = await terminal_of("fünf")
    await terminal.ask("2+3")
    shown = capsys.readouterr()
    assert shown.out == "fünf\n"
    assert "[policy version 7, 6 tokens, stop]" in shown.err
    assert bytes(asked[0].prompt[1:]) == b"Q: 2+3"


async def test_what_the_policy_writes_never_reaches_the_terminal_as_a_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    terminal, _ = await terminal_of(HOSTILE)
    await terminal.ask("hi")
    assert capsys.readouterr().out == "[2J]0;owned[red]not red[/red]31m\n"


async def test_single_questions_are_asked_one_by_one() -> None:
    terminal, asked = await terminal_of("yes")
    for _ in range(2):
        await terminal.ask("same")
    assert list(asked[0].prompt) == list(asked[1].prompt)
    assert not terminal.session.remembers


async def test_a_chat_template_has_what_was_said_before() -> None:
    terminal, asked = await terminal_of("yes", prompt=TemplatePrompt("chat", Letters(), ""))
    assert terminal.session.remembers
    for question in ("one", "two"):
        await terminal.ask(question)
    assert bytes(asked[1].prompt) == b"<user>one<assistant>yes<user>two<assistant>"
    terminal.session.reset()
    await terminal.ask("three")
    assert bytes(asked[2].prompt) == b"<user>three<assistant>"


async def test_sampling_follows_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    terminal, asked = await terminal_of("a long reply")
    terminal.session.temperature, terminal.session.max_tokens, terminal.session.seed = 0.0, 4, 11
    await terminal.ask("hi")
    assert (asked[0].temperature, asked[0].max_tokens, asked[0].seed) == (0.0, 4, 11)
    assert "4 tokens, length" in capsys.readouterr().err


@pytest.mark.parametrize("question", ["ü", "x" * 3000])
async def test_what_cannot_be_a_prompt_is_said_and_the_conversation_goes_on(question: str) -> None:
    terminal, _ = await terminal_of("yes")
    with pytest.raises(DataError, match=r"cannot be a prompt|/reset"):
        await terminal.ask(question)
    await terminal.ask("fine")


def test_the_commands_of_a_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    with asyncio.Runner() as runner:
        terminal, _ = runner.run(terminal_of("yes"))
        terminal.handle_command("/temperature 0.5", runner)
        terminal.handle_command("/max-tokens 3", runner)
        assert (terminal.session.temperature, terminal.session.max_tokens) == (0.5, 3)
        runner.run(terminal.ask("hi"))
        terminal.handle_command("/prompt", runner)
        assert "Q: hi" in capsys.readouterr().err
        terminal.handle_command("/help", runner)
        assert "/quit" in capsys.readouterr().err
        for wrong in ("/temperature hot", "/max-tokens 0", "/no-such"):
            with pytest.raises(ConfigError):
                terminal.handle_command(wrong, runner)
        terminal.handle_command("/reset", runner)
        with pytest.raises(DataError, match="no reply to judge"):
            terminal.handle_command("/answer 4", runner)


def test_a_server_that_fails_ends_the_line_and_not_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["one", "two", "three", "/quit"])
    failures: list[Exception] = [EngineError("the server has left"), WaitTimeout("completion chat-2", 1.0)]
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    with asyncio.Runner() as runner:
        terminal, asked = runner.run(terminal_of("yes"))
        ask = terminal.ask

        async def sometimes(question: str) -> None:
            if failures:
                raise failures.pop(0)
            await ask(question)

        monkeypatch.setattr(terminal, "ask", sometimes)
        _converse(runner, terminal)
    shown = capsys.readouterr()
    assert "the server has left" in shown.err and "waited 1 s for completion chat-2" in shown.err
    assert (shown.out, len(asked)) == ("yes\n", 1)


async def test_a_live_run_is_asked_for_no_more_tokens_than_its_servers_give(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await scripted(says("yes"))

    @asynccontextmanager
    async def policy(*_: object) -> Any:
        yield engine, Path("hf")

    monkeypatch.setattr("async_grpo.app.evaluate.policy_source.open_policy", policy)
    monkeypatch.setattr("async_grpo.data.tokenizer.load_tokenizer", lambda _: Letters())
    config = config_of(sampling={"max_tokens": 200}, rollout={"http": {"max_tokens": 100}})
    live, options = LiveRun(config, {}), ChatOptions()
    async with _open(config, live, options) as terminal:
        assert terminal.session.max_tokens == 100
        terminal.allow(99)
        with pytest.raises(ConfigError, match=r"101 tokens are above 100.*rollout\.http\.max_tokens"):
            terminal.allow(101)
        assert terminal.session.max_tokens == 99
    with pytest.raises(ConfigError, match=r"rollout\.http\.max_tokens"):
        async with _open(config, live, replace(options, max_tokens=101)):
            pass
    async with _open(config, Checkpoint(Path("hf"), 1), replace(options, max_tokens=101)) as terminal:
        assert terminal.session.max_tokens == 101


async def test_the_reward_of_a_reply_is_shown_for_an_expected_answer(capsys: pytest.CaptureFixture[str]) -> None:
    terminal, _ = await terminal_of("<answer>5</answer>")
    async with terminal._stack:
        await terminal.ask("2+3")
        await terminal.judge("5")
        await terminal.judge("6")
    shown = capsys.readouterr().err
    assert "[reward 1 (answer_tag 1)]" in shown and "[reward 0 (answer_tag 0)]" in shown


def test_the_template_is_that_of_the_data_unless_one_is_named(tmp_path: Path) -> None:
    config = config_of(data={"template": "{prompt} = ?"})
    assert make_prompt(config, Letters()).prompt([], "1+1")[0] == "1+1 = ?"
    assert make_prompt(config, Letters(), template="chat").prompt([], "1+1")[0] == "<user>1+1<assistant>"
    with pytest.raises(ConfigError, match="--system goes with"):
        make_prompt(config, Letters(), system="be brief")
