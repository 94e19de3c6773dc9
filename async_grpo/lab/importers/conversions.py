"""Conversions of single keys for the tables, and of several keys that all systems have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, get_args

from async_grpo.config.launch import TelemetryConfig
from async_grpo.config.rollout import MAX_TOP_K
from async_grpo.lab.importers.table import KeyRow
from async_grpo.lab.importers.translation import CHANGE_ME, Translation
from async_grpo.models.hub import hub_repo
from async_grpo.models.shapes import SHAPES

_TRACKERS = get_args(get_args(TelemetryConfig.model_fields["trackers"].annotation)[0])
_LARGEST_VOCABULARY = 1_000_000
"""A top_k of at least this keeps all tokens: AReaL's default is 1e8."""
_UNTRUNCATED = {"top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Settings of the sampled distribution that need top_k -> value without effect."""
_MIN_TOKENS = ("min_tokens", "min_new_tokens")
"""Names of the minimum length of a completion."""
_KL_ESTIMATORS = {
    "kl": "k1",
    "k1": "k1",
    "mse": "k2",
    "mse+": "k2",
    "k2": "k2",
    "k2+": "k2",
    "low_var_kl": "k3",
    "low_var_kl+": "k3+",
    "k3": "k3",
    "k3+": "k3+",
}
"""Name in verl and MindSpeed-RL -> name here. With `+` the gradient is that of k2."""
ON_POLICY = "on policy, as there; 1 or 2 lets both sides work in parallel"


def convert_keys(t: Translation) -> None:
    """Convert the keys whose rows name a conversion, in the order of the table."""
    for row in t.source.rows:
        is_replaced = any(map(t.has, row.unless)) or (row.overrides and not t.has(row.theirs))
        if row.convert and not is_replaced:
            CONVERSIONS[row.convert](t, row)


def _make_conversion(read: Callable[[Translation, str], Any]) -> Callable[[Translation, KeyRow], None]:
    """Return a conversion that writes the result of `read`, if there is one and it is above the row's `above`."""

    def convert_key(t: Translation, row: KeyRow) -> None:
        if t.get(row.theirs) is None:
            return
        value = read(t, row.theirs)
        if row.above is None or value > row.above:
            for ours in row.ours:
                t.set(ours, value, row.comment)

    return convert_key


def _convert_updates(t: Translation, row: KeyRow) -> None:
    if t.read_number(row.theirs) >= 1:  # below 1 it is a share of the run
        t.set(row.ours[0], t.read_steps(row.theirs))


def _convert_name(t: Translation, row: KeyRow) -> None:
    fallback = f"from-{t.source.name}"
    raw = PurePosixPath(str(t.get(row.theirs) or fallback)).name
    name = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in raw).strip("-._")[:64]
    t.set("name", name if name.isascii() and name else fallback)


def _convert_model(t: Translation, row: KeyRow) -> None:
    """Set the policy, and its architecture if the name is known."""
    path = str(t.get(row.theirs) or "")
    folder = path or "models/CHANGE-ME"
    if path.startswith("~"):
        folder = str(Path(path).expanduser())
    comment = "yours to check: a Hugging Face folder with its tokenizer"
    if hub_repo(Path(folder), "model", "huggingface", "model.path") is not None:
        comment = "an id of Hugging Face; model.hub names the other hub"
    t.set("model.path", folder, comment)

    name = path.rstrip("/").rpartition("/")[2].lower().replace("_", "-").replace("qwen25", "qwen2.5")
    for suffix in ("-instruct", "-chat", "-base"):
        name = name.removesuffix(suffix)
    if name in SHAPES:
        t.set("model.architecture", name, "so that --dry-run can plan before the folder is there")


def _convert_precision(t: Translation, row: KeyRow) -> None:
    if t.get(row.theirs) is not None:
        set_precision(t, row.theirs, str(t.get(row.theirs)))


def _convert_bf16(t: Translation, row: KeyRow) -> None:
    set_precision(t, row.theirs, "bfloat16" if t.read_flag(row.theirs) else "float32")


def _convert_group_size(t: Translation, row: KeyRow) -> None:
    """Set a group size of at least 2, because advantages compare the samples of a group."""
    size = t.read_integer(row.theirs)
    comment = "" if size >= 2 else f"{CHANGE_ME}: {size} there; a group has at least 2 samples"
    t.set("group_size", max(2, size), comment)


def _convert_recompute(t: Translation, row: KeyRow) -> None:
    kind = str(t.get(row.theirs) or "none")
    if kind != "none":
        t.set("trainer.recompute", kind)


def _convert_eager(t: Translation, row: KeyRow) -> None:
    eager = t.read_flag(row.theirs)
    comment = "as there; false captures graphs, which is the default here on accelerators and faster" if eager else ""
    t.set(row.ours[0], eager, comment)


def _convert_temperature(t: Translation, row: KeyRow) -> None:
    if t.read_number(row.theirs) > 0:
        t.set("sampling.temperature", t.read_number(row.theirs))
    else:
        t.mark_unsupported(
            row.theirs, "completions for training are sampled, and greedy ones have no log-probability", "sampling"
        )


def _convert_trackers(t: Translation, row: KeyRow) -> None:
    if t.get(row.theirs) is not None:
        set_trackers(t, row.theirs, t.get(row.theirs))


CONVERSIONS: Mapping[str, Callable[[Translation, KeyRow], None]] = {
    "integer": _make_conversion(Translation.read_integer),
    "number": _make_conversion(Translation.read_number),
    "flag": _make_conversion(Translation.read_flag),
    "opposite": _make_conversion(lambda t, key: not t.read_flag(key)),
    "text": _make_conversion(lambda t, key: str(t.get(key))),
    "noted": lambda t, row: t.get(row.theirs),
    "updates": _convert_updates,
    "name": _convert_name,
    "model": _convert_model,
    "precision": _convert_precision,
    "bf16": _convert_bf16,
    "group_size": _convert_group_size,
    "recompute": _convert_recompute,
    "eager": _convert_eager,
    "temperature": _convert_temperature,
    "trackers": _convert_trackers,
}
"""Name in a table -> conversion of one key."""


def set_sampling(t: Translation, prefix: str) -> None:
    """Set top_k, top_p, min_p, repetition_penalty and min_tokens from the keys of these names below `prefix`.

    Here top_k is at most MAX_TOP_K, and the others need it. If the file has none, MAX_TOP_K is set. For
    min_tokens alone it is not: it would change the distribution of all tokens for the sake of the first ones.
    """
    top_k = t.read_integer(f"{prefix}top_k")
    if not 0 < top_k < _LARGEST_VOCABULARY:
        top_k = 0
    limit = f"engines report at most {MAX_TOP_K} tokens per position to the trainer"
    if top_k > MAX_TOP_K:
        t.mark_approximated(f"{prefix}top_k", f"{limit}: the {MAX_TOP_K} most likely of {top_k}", "sampling.top_k")
        top_k = MAX_TOP_K

    changed: dict[str, float] = {}
    for name, neutral in _UNTRUNCATED.items():
        row = t.source.find_row(f"{prefix}{name}")
        if row is None or not row.ours or t.get(row.theirs) is None:
            continue
        value = t.read_number(row.theirs)
        if value != neutral:
            changed[name] = value
    comment = ""
    if changed and top_k == 0:
        top_k = MAX_TOP_K
        comment = f"not in the file: {limit}"
        for name in changed:
            reason = f"with top_k {MAX_TOP_K}, which the file lacks: {limit}"
            t.mark_approximated(f"{prefix}{name}", reason, f"sampling.{name}, sampling.top_k")

    if top_k:
        t.set("sampling.top_k", top_k, comment)
    for name, value in changed.items():
        t.set(f"sampling.{name}", value)
    for name in _MIN_TOKENS:
        row = t.source.find_row(f"{prefix}{name}")
        if row is None or not row.ours or t.read_integer(row.theirs) <= 0:
            continue
        if top_k:
            t.set("sampling.min_tokens", t.read_integer(row.theirs))
        else:
            t.mark_unsupported(row.theirs, "needs top_k, which the file lacks", "sampling.min_tokens, sampling.top_k")


def set_precision(t: Translation, key: str, kind: str) -> None:
    """Set the data type of the weights for both roles."""
    if kind in ("bfloat16", "float32"):
        t.set("model.precision", kind, "weights of both sides; the optimizer keeps fp32 masters")
    else:
        t.set("model.precision", "bfloat16")
        if kind != "auto":
            t.mark_unsupported(key, "weights are bfloat16 or float32", "model.precision")


def set_data(t: Translation, described: Any, command: str) -> None:
    """Set the data to a folder that `async-grpo prepare` makes, because the formats differ."""
    t.set("data.kind", "jsonl")
    t.set("data.path", "data/prepared", f"make it of {described}: async-grpo prepare {command} --out data/prepared")


def set_lengths(t: Translation, *, longest: int = 0, micro_tokens: int = 0) -> None:
    """Set the lengths of sequence and micro-batch in tokens; 0 means not in the file.

    A micro-batch must have space for the longest sequence.
    """
    prompt = t.settings["data.max_prompt_tokens"].value
    completion = t.settings["sampling.max_tokens"].value
    if longest:
        length = max(longest, completion + 1)
        t.set("rollout.vllm.max_model_len", length)
    else:
        length = prompt + completion
        t.set("rollout.vllm.max_model_len", length, f"prompt {prompt} + completion {completion}")

    tokens = micro_tokens or length
    comment = "raised to the longest sequence" if tokens < length else "tokens of one packed micro-batch"
    t.set("trainer.micro_batch_tokens", max(tokens, length), comment)


def set_kl(t: Translation, beta: float, estimator: str, *, in_reward: bool = False) -> None:
    """Set the KL term and the reference model that it needs, unless the weight is 0."""
    if beta <= 0:
        return
    t.set("trainer.objective.kl_beta", beta)
    t.set("trainer.objective.kl_estimator", estimator)
    t.set("trainer.objective.kl_in", "reward" if in_reward else "loss")
    if "trainer.reference.source" not in t.settings:
        t.set("trainer.reference.source", "frozen", "the first policy")


def convert_kl(t: Translation, weight: str, estimator: str, control: str, *, in_reward: bool = False) -> None:
    """Set the KL term from the keys of its weight, its estimator and the control of the weight."""
    if str(t.get(control)) != "fixed":
        t.mark_unsupported(control, "the weight is fixed", "trainer.objective.kl_beta")
    if t.read_number(weight) > 0:
        kind = str(t.get(estimator))
        if kind not in _KL_ESTIMATORS:
            reason = "estimators are k1, k2, k3 and k3+; k3 is taken"
            t.mark_unsupported(estimator, reason, "trainer.objective.kl_estimator")
        set_kl(t, t.read_number(weight), _KL_ESTIMATORS.get(kind, "k3"), in_reward=in_reward)


def set_schedule(t: Translation, key: str, style: str, warmup: float, min_lr: float) -> None:
    """Set the learning-rate schedule. `warmup`: number of steps, or share of all steps if below 1."""
    if style in ("constant", "linear", "cosine"):
        t.set("trainer.optimizer.schedule", style)
    else:
        t.mark_unsupported(key, "the schedules are constant, linear and cosine", "trainer.optimizer.schedule")
    if min_lr and style in ("linear", "cosine"):
        t.set("trainer.optimizer.min_lr", float(f"{min_lr:.10g}"))
    if warmup > 0:
        steps = round(warmup * t.settings["steps"].value) if warmup < 1 else int(warmup)
        t.set("trainer.optimizer.warmup_steps", steps, "a share of the steps" if warmup < 1 else "")


def set_steps(t: Translation, epochs: str, groups: int) -> None:
    """Set the steps from epochs if the number of rows is known, else 100 with a note."""
    number = t.read_number(epochs)
    if t.rows:
        t.set("steps", max(1, int(number * t.rows // groups)), f"{number:g} epochs of {t.rows} rows / {groups}")
        return
    t.set(
        "steps", 100, f"CHANGE ME: {number:g} epochs are {number:g} * rows / {groups} steps; --rows tells the importer"
    )
    t.mark_unsupported(
        epochs, "the length of a run is given in steps; pass --rows N (rows of the data) to compute them", "steps"
    )


def set_rewards(
    t: Translation, key: str, names: Sequence[str], weights: Sequence[float], known: Mapping[str, str]
) -> None:
    """Set the reward functions by name, at least one, and mark unknown names. `known`: name there -> name here."""
    all_weights = [*weights, *[1.0] * len(names)]  # missing weights are 1
    functions = {}
    unknown = []
    for name, weight in zip(names, all_weights, strict=False):
        if name in known:
            functions[known[name]] = {"name": known[name], "weight": float(weight)}
        else:
            unknown.append(name)
    if unknown:
        reason = f"there is no verifier {', '.join(unknown)} here; give your own as module:attribute"
        t.mark_unsupported(key, reason, "rewards.functions")

    if functions:
        t.set("rewards.functions", list(functions.values()), "docs/verifiers.md has the exact rules")
    else:
        comment = "CHANGE ME: none of the file's functions is known here"
        t.set("rewards.functions", [{"name": "math_verify", "weight": 1.0}], comment)


def set_overlong(t: Translation, enable: str, length: str, factor: str) -> None:
    """Set the length penalty from its three keys."""
    if t.read_flag(enable) and t.read_integer(length) and t.read_number(factor):
        t.set("rewards.overlong", "soft")
        t.set("rewards.soft_overlong_tokens", t.read_integer(length))
        t.set("rewards.soft_overlong_factor", t.read_number(factor))


def set_trackers(t: Translation, key: str, names: Any) -> None:
    """Set the trackers by name. `console` is ignored: every run prints its metrics."""
    if not isinstance(names, list):
        names = [names]
    given = [str(name) for name in names if name]
    t.set("telemetry.trackers", [name for name in _TRACKERS if name in given])
    unknown = [name for name in given if name not in (*_TRACKERS, "console", "none")]
    if unknown:
        reason = f"there is no tracker {', '.join(unknown)}; known: {', '.join(_TRACKERS)}"
        t.mark_unsupported(key, reason, "telemetry.trackers")
