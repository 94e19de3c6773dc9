"""`async-grpo convert`, `export` and `runs pull`: checkpoints in other formats, and from another place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from async_grpo.app.cli.common import exit_with_code, print_line, progress_bar
from async_grpo.errors import ConfigError

Convert = Callable[[Callable[[int, int], None]], None]


@exit_with_code()
def convert(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="Hugging Face folder or id, or Megatron checkpoint.")
    ],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="Folder to create; it must not exist.")],
) -> None:
    """Convert a Hugging Face folder into a Megatron distributed checkpoint, or back.

    The format of SOURCE decides the direction. The weights stay the same, bit for bit. Configuration and tokenizer are
    copied too, so converting back needs nothing else. A converted Megatron checkpoint can be loaded in any layout of
    ranks (tensor, pipeline, context, expert parallel).

    The conversion runs in one process on the CPU and holds the weights in memory once.

    For the checkpoint of a run, use `async-grpo export`.
    """
    from async_grpo.models.hub import hub_repo
    from trainer.checkpoint.convert import is_megatron, to_hugging_face, to_megatron

    repo = hub_repo(source, "model", "huggingface", "SOURCE")
    folder = source if repo is None else repo.pinned().fetch(print_line)
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {source}. Give a Hugging Face folder or a Megatron checkpoint")
    if not is_megatron(folder):
        return _write_with_progress("Megatron", target, lambda progress: to_megatron(folder, target, progress))
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{source} has no config.json, so its architecture and tokenizer are unknown: `async-grpo convert` did "
            "not write it. For the checkpoint of a run, use `async-grpo export runs/NAME TARGET`"
        )
    _write_with_progress("Hugging Face", target, lambda progress: to_hugging_face(folder, folder, target, progress))


@exit_with_code()
def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of the run, such as runs/quickstart.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to create; it must not exist.")],
    version: Annotated[
        int | None, typer.Option("--version", help="Policy version (default: the newest checkpoint).")
    ] = None,
    merged: Annotated[bool, typer.Option("--merged", help="The whole weights also of a run with model.lora.")] = False,
) -> None:
    """Export a checkpoint of a run as a Hugging Face folder, which transformers and vLLM can load.

    A run that trains adapters (model.lora) is exported as a folder of PEFT: adapter_config.json and
    adapter_model.safetensors. With --merged the adapters are added to the weights that they were trained on.

    The run may still be in progress. Only policy versions with a checkpoint can be exported: see
    trainer.checkpoint.every_steps and trainer.checkpoint.keep.
    """
    from async_grpo.app.launch.first_policy import prepare_model
    from async_grpo.app.launch.run_folder import find_checkpoint
    from trainer.checkpoint.convert import to_hugging_face

    config, checkpoint = find_checkpoint(run_dir, version)
    settings = asyncio.run(prepare_model(config, print_line))
    print_line(f"policy version {int(checkpoint.name)} of {run_dir}")
    lora = config.model.lora
    _write_with_progress(
        "PEFT" if lora is not None and not merged else "Hugging Face",
        target,
        lambda progress: to_hugging_face(checkpoint, settings, target, progress, lora=lora, merge=merged),
    )


@exit_with_code()
def pull(
    url: Annotated[str, typer.Argument(metavar="URL", help="runs_store/NAME of the run, such as s3://BUCKET/NAME.")],
    to: Annotated[Path, typer.Option("--to", metavar="RUNS", help="Folder of runs to put it into.")] = Path("runs"),
    checkpoint: Annotated[bool, typer.Option("--checkpoint", help="Bring its newest checkpoint too.")] = False,
) -> None:
    """Bring the copy of a run from its runs_store, to look at it here. To go on with a run, start it again instead."""
    from async_grpo.app.launch.run_copy import pull_run

    folder = pull_run(url, to, print_line, checkpoint=checkpoint)
    print_line(f"{folder}: `async-grpo runs show {folder}` shows it")


def _write_with_progress(form: str, target: Path, write: Convert) -> None:
    """Write a checkpoint to `target` with a bar of its tensors, then print its format and size."""
    with progress_bar() as progress:
        bar = progress.add_task("tensors", total=None)
        write(lambda done, total: progress.update(bar, completed=done, total=total))
    size_bytes = sum(path.stat().st_size for path in target.iterdir())
    print_line(f"{target}: {form}, {size_bytes:,} bytes")
