"""Folder of the first policy: configured by model.path, or generated once and cached."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from async_grpo.app.launch.inputs import fetch_inputs
from async_grpo.config import RunConfig
from async_grpo.config.trainer import ReferenceConfig
from async_grpo.data.tokenizer import find_tokenizer
from async_grpo.errors import ConfigError, DataError, EngineError, RoleFailed
from async_grpo.models.hub import cache_dir
from async_grpo.utils.child_process import child_argv
from rollout_server.engines.model_files import read_settings, tensor_shapes
from trainer.model.families import FAMILIES, describe_families

RECIPE = 1
"""Version of the code that generates models. Raise it when the result changes, so that old cached models are not
used."""


def missing_files(path: Path) -> list[str]:
    """Return the patterns of files that a Hugging Face checkpoint folder needs and this one lacks."""
    needed = ("config.json", "tokenizer_config.json", "*.safetensors")
    return [pattern for pattern in needed if not any(file.is_file() for file in path.glob(pattern))]


def check_model(path: Path) -> Path:
    """Return `path` if it is a Hugging Face checkpoint folder. Raises ConfigError that names the missing or broken
    file."""
    if not path.is_dir():
        state = "is a file" if path.exists() else "does not exist"
        raise ConfigError(
            f"model.path: {path} {state}, but a checkpoint is a folder. Point model.path at the folder that holds "
            "config.json, the tokenizer and the weights as safetensors"
        )
    if missing := missing_files(path):
        raise ConfigError(
            f"model.path: {path} has no {' and no '.join(missing)}, so it is not a Hugging Face checkpoint with its "
            "tokenizer. Point model.path at the folder that holds config.json and the weights as safetensors"
        )
    try:
        kind = read_settings(path / "config.json").get("model_type")
        if str(kind) not in FAMILIES:
            raise ConfigError(
                f"model.path: {path} is a {kind!r} model; the trainer builds {describe_families()}. "
                "Choose a checkpoint of one of them"
            )
        tensor_shapes(path)
    except (DataError, EngineError) as error:
        raise ConfigError(f"model.path: {error}") from None
    return path


def check_reference(folder: Path, model: Path | None, config: ReferenceConfig) -> None:
    """Raise ConfigError if the trainer would reject the folder of the reference model.

    `model`: folder of the first policy, if it exists already.
    """
    from trainer.model.checks import check_reference_config, check_tensors
    from trainer.model.hf_folder import read_config

    if not folder.is_dir():
        raise ConfigError(f"trainer.reference.path: there is no folder {folder}. Correct the path or remove the key")
    try:
        reference = read_config(folder)
        policy = read_config(model) if model is not None and model.is_dir() else reference
        check_reference_config(policy, reference, config, folder)
        check_tensors(tensor_shapes(folder), reference)
    except (DataError, EngineError) as error:
        raise ConfigError(f"trainer.reference.path: {error}") from None


async def prepare_model(config: RunConfig, report_progress: Callable[[str], None]) -> Path:
    """Return the folder of the first policy, after downloading or generating it.

    Raises ConfigError for a folder that cannot be used, RoleFailed if generating the policy fails.
    """
    input_key = "data.path" if config.model.path is None else "model.path"
    config = await asyncio.to_thread(fetch_inputs, config, report_progress, (input_key,))
    if config.model.path is not None:
        return check_first_policy(config.model.path.absolute(), config)

    target = _generated_policy_folder(config)
    if (target / "config.json").exists():
        report_progress(f"policy: {target} (cached)")
        return target

    warmup = config.model.warmup
    if warmup is not None:
        source = "warmup"
        module = "trainer.warmup"
        recipe = warmup.model_dump_json()
        steps = warmup.steps
    else:
        source = "random"
        module = "async_grpo.models.random_model"
        recipe = config.model_dump_json()
        steps = None
    target.parent.mkdir(parents=True, exist_ok=True)
    report_progress(f"generating the first policy ({source}); it is cached for later runs")
    argv = [sys.executable, "-m", module, "--config", recipe, "--out", str(target), "--seed", str(config.seed)]
    await _run_generator(argv, lambda message: report_progress(_format_progress(message, steps)))
    return check_model(target)


def find_local_policy(config: RunConfig) -> Path | None:
    """Return the folder of the first policy if it is on this machine, with its tokenizer; else None."""
    folder = config.model.path or _generated_policy_folder(config)
    return folder if (folder / "tokenizer_config.json").is_file() else None


def _generated_policy_folder(config: RunConfig) -> Path:
    """Return the cache folder of a policy that the run generates itself."""
    source = "random" if config.model.warmup is None else "warmup"
    return cache_dir() / "models" / f"{source}-{_fingerprint(config)}"


def read_warmup_s(model: Path) -> float:
    """Return the seconds that the warm-up of this policy took, possibly in an earlier run; 0 for other models."""
    report = model / "warmup.json"
    if not report.exists():
        return 0.0
    return float(json.loads(report.read_text(encoding="utf-8"))["elapsed_s"])


def check_first_policy(path: Path, config: RunConfig) -> Path:
    """Return the folder `path`. Raises ConfigError if the trainer's ranks or the rollout servers would reject it."""
    from trainer.model.checks import check_architecture, check_lora, check_tensors
    from trainer.model.hf_folder import read_config

    check_model(path)
    try:
        hf = read_config(path)
        check_architecture(hf, config.trainer)
        if config.model.lora is not None:
            check_lora(hf, config.model.lora)
        check_tensors(tensor_shapes(path), hf)
    except DataError as error:
        raise ConfigError(f"model.path: {error}") from None
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:  # from sizes that make no sense
        raise ConfigError(f"model.path: {path / 'config.json'} describes no model ({error}). Fetch it again") from None
    find_tokenizer(path, "model.path")
    return path


def _fingerprint(config: RunConfig) -> str:
    """Return a hash of everything that determines the generated model."""
    parts = {
        "recipe": RECIPE,
        "seed": config.seed,
        "model": config.model.model_dump(mode="json", exclude={"lora"}),
        "data": config.data.model_dump(mode="json"),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


async def _run_generator(argv: Sequence[str], report: Callable[[str], None]) -> None:
    """Run the program that generates the model. `report` receives each line of its output, a JSON object."""
    process = await asyncio.create_subprocess_exec(
        *child_argv(argv), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    errors = asyncio.create_task(process.stderr.read())
    try:
        async for line in process.stdout:
            report(line.decode("utf-8", "replace"))
        code = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if code:
        tail = (await errors).decode("utf-8", "replace").strip().splitlines()[-1:]
        raise RoleFailed(f"generating the first policy failed with exit code {code}: {''.join(tail)}")
    await errors


def _format_progress(line: str, steps: int | None) -> str:
    """Format a line of the generator's output as a message, with the time left if it contains a step."""
    try:
        fields = json.loads(line)
    except ValueError:
        return line.rstrip()
    if not isinstance(fields, dict):
        return line.rstrip()
    message = "first policy: " + ", ".join(f"{key} {value}" for key, value in fields.items())
    step = fields.get("step")
    elapsed_s = fields.get("elapsed_s")
    if steps is None or not step or elapsed_s is None:
        return message
    return f"{message} (step {step} of at most {steps}: {elapsed_s / step * (steps - step):.0f} s left)"
