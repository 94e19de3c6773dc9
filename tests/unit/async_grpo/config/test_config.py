"""Loading, layering and validation of configurations, and their error messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_grpo.config import dump, load
from async_grpo.errors import ConfigError

MINIMAL = "name: test\nmodel: {random: {}}\n"


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def load_error(folder: Path, text: str = MINIMAL, overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        load(write(folder, text), overrides)
    return str(caught.value)


def test_a_minimal_file_gets_working_defaults(tmp_path: Path) -> None:
    config = load(write(tmp_path, MINIMAL))
    assert config.max_staleness == 2
    assert config.capacity_groups == 3 * config.groups_per_step


def test_an_override_takes_precedence_and_keeps_its_yaml_type(tmp_path: Path) -> None:
    config = load(write(tmp_path, MINIMAL + "seed: 3\n"), ["seed=7", "trainer.optimizer.lr=2e-4"])
    assert config.seed == 7
    assert config.trainer.optimizer.lr == pytest.approx(2e-4)


def test_later_base_files_override_earlier_ones_key_by_key(tmp_path: Path) -> None:
    write(tmp_path, MINIMAL + "seed: 3\nsampling: {max_tokens: 32, temperature: 0.7}\n", "first.yaml")
    write(tmp_path, "sampling: {max_tokens: 16}\n", "second.yaml")
    config = load(write(tmp_path, "base: [first.yaml, second.yaml]\nsampling: {temperature: 0.5}\n"))
    assert (config.seed, config.sampling.max_tokens, config.sampling.temperature) == (3, 16, 0.5)
    config = load(write(tmp_path, "base: first.yaml\nname: other\n"))
    assert (config.name, config.sampling.max_tokens) == ("other", 32)


def test_dumped_configuration_loads_equal(tmp_path: Path) -> None:
    config = load(write(tmp_path, MINIMAL), ["max_staleness=4"])
    assert load(write(tmp_path, dump(config), "resolved.yaml")) == config


def test_auto_staleness_starts_at_start_and_is_bounded_by_max(tmp_path: Path) -> None:
    config = load(write(tmp_path, MINIMAL), ["max_staleness=auto", "auto_staleness.max=4", "auto_staleness.start=2"])
    assert (config.max_staleness, config.capacity_groups) == (4, 5 * config.groups_per_step)
    assert (config.replay_policy.window.effective_staleness, config.replay_policy.age_bound) == (2, 4)
    assert load(write(tmp_path, dump(config), "resolved.yaml")) == config
    assert load(write(tmp_path, MINIMAL), ["max_staleness=auto"]).max_staleness == 8


@pytest.mark.parametrize(
    ("text", "overrides", "words"),
    [
        ("base: run.yaml\n", (), ["8 layers", "`base:`"]),
        (MINIMAL, ("rollout.max_concurency=3",), ["rollout.max_concurency (-o)", "rollout.max_concurrency?"]),
        (MINIMAL, ("max_staleness=-1",), ["max_staleness (-o): -1"]),
        (MINIMAL, ("max_staleness=-1", "group_size=1"), ["max_staleness", "group_size"]),
        (MINIMAL + "seed: 1\nseed: 2\n", (), ["twice"]),
        (MINIMAL, ("seed",), ["KEY=VALUE, such as -o"]),
        (MINIMAL, ("lr=1",), ["lr (-o)", "trainer.optimizer.lr", "model.warmup.lr"]),
        (MINIMAL, ("optimizer.lr=1",), ["optimizer: ", "trainer.optimizer.lr?"]),
        (MINIMAL, ("batch_size=1",), ["batch_size", "groups_per_step"]),
        (MINIMAL, ("sampling.maxtokens=1",), ["sampling.max_tokens?"]),
        (MINIMAL, ("max_tokes=1",), ["sampling.max_tokens?"]),
        (MINIMAL, ("xyzzy=1",), ["xyzzy", "name, runs_dir"]),
        (MINIMAL, ("trainer.optimizer=3",), ["trainer.optimizer", "lr, min_lr"]),
        (MINIMAL + "trainer:\n  optimizer:\n    lrr: 1\n", (), ["trainer.optimizer.lrr (line 5)"]),
        ("base: below.yaml\nsteps: 3\n", (), ["below.yaml, line 2)", "model: "]),
        ("", (), ["contains nothing"]),
        ("- a\n", (), ["contains a list"]),
        ("name: a\n  steps: 3\n", (), ["run.yaml, line 2, column 8"]),
        (MINIMAL, ("rewards.functions=[]",), ["rewards.functions"]),
        (MINIMAL, ("trainer.optimizer.beta1=1.0",), ["trainer.optimizer.beta1"]),
        (MINIMAL, ("weights.bind=here",), ["weights.bind"]),
        (MINIMAL, ("trainer.platform=abacus",), ["trainer.platform"]),
    ],
)
def test_every_problem_names_its_key_and_rule(
    tmp_path: Path, text: str, overrides: tuple[str, ...], words: list[str]
) -> None:
    write(tmp_path, "name: test\nlr: 1\n", "below.yaml")
    message = load_error(tmp_path, text, overrides)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        (("model.random=null",), "model.path"),
        (("data.kind=jsonl",), "data.path"),
        (("redis.url=redis://:secret@host:6379",), "ASYNC_GRPO_REDIS_PASSWORD"),
        (("sampling.top_p=0.9",), "sampling.top_k"),
        (("sampling.min_tokens=3",), "sampling.top_k"),
        (("sampling.top_k=5", "sampling.min_tokens=99", "sampling.max_tokens=64"), "sampling.min_tokens"),
        (("trainer.processes=3", "trainer.tensor_parallel=2"), "trainer.processes"),
        (("sampling.max_tokens=4096",), "sampling.max_tokens (4096)"),
        (("trainer.micro_batch_tokens=100",), "trainer.micro_batch_tokens (100)"),
        (("model.random.max_positions=64",), "64 positions"),
        (("eval.prompts=300",), "eval.prompts (300)"),
        (("trainer.optimizer.min_lr=1",), "min_lr (1)"),
        (("redis.url=redis://host:6379?password=x",), "ASYNC_GRPO_REDIS_PASSWORD"),
        (("auto_staleness.max=4",), "remove auto_staleness"),
        (("max_staleness=auto", "auto_staleness=3"), "auto_staleness"),
        (("max_staleness=auto", "auto_staleness.min=5"), "auto_staleness.start (1)"),
        (("max_staleness=auto", "buffer.selector.kind=exact_age"), "buffer.selector.kind exact_age"),
        (
            ("max_staleness=auto", "buffer.admission.kind=sample_to_insert_ratio"),
            "buffer.admission.kind sample_to_insert_ratio",
        ),
        (("rollout.lease_s=15",), "rollout.lease_s (15)"),
        (("redis.timeout_s=60", "rollout.lease_s=59"), "redis.timeout_s (60)"),
        (("rollout.sample_deadline_s=600",), "rollout.sample_deadline_s (600)"),
    ],
)
def test_conflicting_values_name_the_fix(tmp_path: Path, overrides: tuple[str, ...], fix: str) -> None:
    assert fix in load_error(tmp_path, overrides=overrides)


def test_default_leases_survive_a_redis_outage(tmp_path: Path) -> None:
    derived = load(write(tmp_path, MINIMAL), ["redis.timeout_s=20"])
    assert derived.lease_s - derived.lease_s / 3 >= derived.redis.timeout_s, (
        "a lease is renewed after a third of its duration"
    )
    assert load(write(tmp_path, MINIMAL), ["redis.timeout_s=20", "rollout.lease_s=25"]).lease_s == 25


def test_a_password_in_the_url_is_not_repeated_in_the_error(tmp_path: Path) -> None:
    assert "hunter2" not in load_error(tmp_path, overrides=("redis.url=redis://:hunter2@host:6379",))


ALIASES = b"a0: &a0 [x, x]\n" + b"".join(b"a%d: &a%d [%s]\n" % (i, i, b"*a%d," % (i - 1) * 10) for i in range(1, 6))
MAPPINGS = b"a0: &a0 {x: 1}\n" + b"".join(
    b"a%d: &a%d {%s}\n" % (i, i, b"".join(b"k%d: *a%d, " % (k, i - 1) for k in range(10))) for i in range(1, 8)
)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"name: " + b"[" * 20_000 + b"]" * 20_000, "not valid YAML: .*too deeply"),
        (b"name: 2024-99-99", "not valid YAML: month"),
        (b"steps: " + b"9" * 5_000, "not valid YAML: .*limit"),
        (b"name: \xff", "not valid YAML: 'utf-8'"),
        (b"name: " + b"x" * (1 << 20), "1048576 bytes"),
        (b"base: .\n", "Is a directory"),
        (ALIASES + b"steps: *a5", r"steps \(line 7\): \[\[\["),
        (MAPPINGS + b"steps: *a7", r"steps: \{"),
        (b"".join(b"k%d: 1\n" % i for i in range(500)), "and 482 more"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_hostile_file_gets_a_short_error(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=message) as error:
        load(path)
    assert len(str(error.value)) < 10_000


@pytest.mark.parametrize("text", ["[" * 20_000, "2024-99-99", "9" * 5_000])
def test_a_hostile_override_gets_a_short_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="not valid YAML") as error:
        load(write(tmp_path, MINIMAL), [f"name={text}"])
    assert len(str(error.value)) < 1_000
