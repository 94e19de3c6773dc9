"""`async-grpo convert`, `export` and `runs pull`: convert, export and download checkpoints."""

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
    """Convert a Hugging Face folder to a Megatron distributed checkpoint, or back.

    The format of SOURCE determines the direction. The weights stay bit-identical. Configuration and tokenizer are
    copied as well, so converting back needs no other files. A converted Megatron checkpoint can be loaded with any
    tensor, pipeline, context and expert parallelism.

    The conversion runs in one process on the CPU and needs memory for one copy of the weights.

    For the checkpoint of a run, use `async-grpo export`.
    """
    from async_grpo.models.hub import hub_repo
    from trainer.checkpoint.convert import convert_to_hugging_face, convert_to_megatron, is_megatron

    repo = hub_repo(source, "model", "huggingface", "SOURCE")
    folder = source if repo is None else repo.pin_revision().fetch_files(print_line)
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {source}. Give a Hugging Face folder or a Megatron checkpoint")
    if not is_megatron(folder):
        return _write_with_progress("Megatron", target, lambda progress: convert_to_megatron(folder, target, progress))
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{source} has no config.json, so its architecture and tokenizer are unknown. Only checkpoints written by "
            "`async-grpo convert` have one. For the checkpoint of a run, use `async-grpo export runs/NAME TARGET`"
        )
    _write_with_progress(
        "Hugging Face", target, lambda progress: convert_to_hugging_face(folder, folder, target, progress)
    )


@exit_with_code()
def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of the run, such as runs/quickstart.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to create; it must not exist.")],
    version: Annotated[
        int | None, typer.Option("--version", help="Policy version (default: the newest checkpoint).")
    ] = None,
    merged: Annotated[
        bool, typer.Option("--merged", help="With model.lora: merge the adapters into the base weights.")
    ] = False,
) -> None:
    """Export a checkpoint of a run as a Hugging Face folder for transformers and vLLM.

    A run that trains adapters (model.lora) is exported as a PEFT folder: adapter_config.json and
    adapter_model.safetensors. With --merged, the adapters are merged into the base weights instead.

    The run may be live. Only policy versions with a checkpoint can be exported (trainer.checkpoint.every_steps and
    trainer.checkpoint.keep).
    """
    from async_grpo.app.launch.first_policy import prepare_model
    from async_grpo.app.launch.run_folder import find_checkpoint
    from trainer.checkpoint.convert import convert_to_hugging_face

    config, checkpoint = find_checkpoint(run_dir, version)
    settings = asyncio.run(prepare_model(config, print_line))
    print_line(f"policy version {int(checkpoint.name)} of {run_dir}")
    lora = config.model.lora
    _write_with_progress(
        "PEFT" if lora is not None and not merged else "Hugging Face",
        target,
        lambda progress: convert_to_hugging_face(checkpoint, settings, target, progress, lora=lora, merge=merged),
    )


@exit_with_code()
def pull(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="Location of the copy: runs_store/NAME, such as s3://BUCKET/NAME.")
    ],
    to: Annotated[Path, typer.Option("--to", metavar="RUNS", help="Folder of runs to download it to.")] = Path("runs"),
    checkpoint: Annotated[bool, typer.Option("--checkpoint", help="Also download its newest checkpoint.")] = False,
) -> None:
    """Download the copy of a run from its runs_store, to inspect it.

    To continue a run, start it again instead: that downloads what it needs.
    """
    from async_grpo.app.launch.run_copy import pull_run

    folder = pull_run(url, to, print_line, checkpoint=checkpoint)
    print_line(f"{folder}: `async-grpo runs show {folder}` shows it")


def _write_with_progress(format_name: str, target: Path, write: Convert) -> None:
    """Write a checkpoint to `target` with a bar of its tensors, then print its format and size."""
    with progress_bar() as progress:
        bar = progress.add_task("tensors", total=None)
        write(lambda done, total: progress.update(bar, completed=done, total=total))
    size_bytes = sum(path.stat().st_size for path in target.iterdir())
    print_line(f"{target}: {format_name}, {size_bytes:,} bytes")
