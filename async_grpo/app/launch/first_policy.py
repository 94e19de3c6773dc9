"""The folder of the first policy: given by model.path, or made once and cached."""

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
from trainer.model.families import FAMILIES, known_families

RECIPE = 1
"""Version of the code that makes models. It goes up when the result changes, so that old cached ones are not used."""


def missing_files(path: Path) -> list[str]:
    """Patterns of files that a Hugging Face checkpoint folder needs and this one lacks."""
    needed = ("config.json", "tokenizer_config.json", "*.safetensors")
    return [pattern for pattern in needed if not any(file.is_file() for file in path.glob(pattern))]


def check_model(path: Path) -> Path:
    """Return `path` if it is a Hugging Face checkpoint folder. Raises ConfigError naming what is missing or broken."""
    if not path.is_dir():
        found = "a file" if path.exists() else "not there"
        raise ConfigError(
            f"model.path: {path} is {found}, but a checkpoint is a folder. Point model.path at the folder that holds "
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
                f"model.path: {path} is a {kind!r} model; the trainer builds {known_families()}. "
                "Choose a checkpoint of one of them"
            )
        tensor_shapes(path)
    except (DataError, EngineError) as error:
        raise ConfigError(f"model.path: {error}") from None
    return path


def check_reference(folder: Path, model: Path | None, config: ReferenceConfig) -> None:
    """Check the reference's folder as the trainer would; `model`: the first policy, if it is there already.

    Raises ConfigError.
    """
    from trainer.model.checks import check_reference_config, check_tensors
    from trainer.model.hf_folder import read_config

    if not folder.is_dir():
        raise ConfigError(f"trainer.reference.path: there is no folder {folder}. Correct the path, or leave it out")
    try:
        reference = read_config(folder)
        policy = read_config(model) if model is not None and model.is_dir() else reference
        check_reference_config(policy, reference, config, folder)
        check_tensors(tensor_shapes(folder), reference)
    except (DataError, EngineError) as error:
        raise ConfigError(f"trainer.reference.path: {error}") from None


async def prepare_model(config: RunConfig, say: Callable[[str], None]) -> Path:
    """The folder of the first policy; making one reports through `say`. Raises ConfigError for a folder that cannot be
    used, RoleFailed if making one fails."""
    made_of = "data.path" if config.model.path is None else "model.path"
    config = await asyncio.to_thread(fetch_inputs, config, say, (made_of,))
    if config.model.path is not None:
        return check_first_policy(config.model.path.absolute(), config)
    if config.model.warmup is not None:
        source, module, recipe = "warmup", "trainer.warmup", config.model.warmup.model_dump_json()
    else:
        source, module, recipe = "random", "async_grpo.models.random_model", config.model_dump_json()
    target = _made_policy(config)
    if (target / "config.json").exists():
        say(f"policy: {target} (cached)")
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    say(f"making the first policy ({source}); it is cached afterwards")
    options = ("--config", recipe, "--out", str(target), "--seed", str(config.seed))
    steps = config.model.warmup.steps if config.model.warmup is not None else None
    await _make([sys.executable, "-m", module, *options], lambda line: say(_progress(line, steps)))
    return check_model(target)


def find_local_policy(config: RunConfig) -> Path | None:
    """The folder of the first policy, if it is on this machine with its tokenizer."""
    folder = config.model.path or _made_policy(config)
    return folder if (folder / "tokenizer_config.json").is_file() else None


def _made_policy(config: RunConfig) -> Path:
    """Where the policy is that a run makes itself."""
    source = "random" if config.model.warmup is None else "warmup"
    return cache_dir() / "models" / f"{source}-{_fingerprint(config)}"


def read_warmup_s(model: Path) -> float:
    """Seconds that the warm-up of the policy took, even if it was made in an earlier run; 0 for any other model."""
    report = model / "warmup.json"
    return float(json.loads(report.read_text(encoding="utf-8"))["elapsed_s"]) if report.exists() else 0.0


def check_first_policy(path: Path, config: RunConfig) -> Path:
    """Check a folder as the trainer's ranks and the rollout servers would, before anything is started; returns it.

    Raises ConfigError."""
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
    """A hash of everything that the made model depends on."""
    parts = {
        "recipe": RECIPE,
        "seed": config.seed,
        "model": config.model.model_dump(mode="json", exclude={"lora"}),
        "data": config.data.model_dump(mode="json"),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


async def _make(argv: Sequence[str], say: Callable[[str], None]) -> None:
    """Run the program that makes the model and report its progress, one JSON object per line."""
    process = await asyncio.create_subprocess_exec(
        *child_argv(argv), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    errors = asyncio.create_task(process.stderr.read())
    try:
        async for line in process.stdout:
            say(line.decode("utf-8", "replace"))
        code = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if code:
        tail = (await errors).decode("utf-8", "replace").strip().splitlines()[-1:]
        raise RoleFailed(f"making the first policy ended with exit code {code}: {''.join(tail)}")
    await errors


def _progress(line: str, steps: int | None) -> str:
    """A progress line of the program as a sentence, with the time left if the line has a count."""
    try:
        fields = json.loads(line)
    except ValueError:
        return line.rstrip()
    if not isinstance(fields, dict):
        return line.rstrip()
    said = "first policy: " + ", ".join(f"{key} {value}" for key, value in fields.items())
    step, elapsed_s = fields.get("step"), fields.get("elapsed_s")
    if steps is None or not step or elapsed_s is None:
        return said
    return f"{said} (step {step} of at most {steps}: {elapsed_s / step * (steps - step):.0f} s left)"
