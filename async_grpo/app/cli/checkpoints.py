"""`async-grpo convert` and `async-grpo export`: weights from one form into the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from async_grpo.app.cli.common import exit_with
from async_grpo.errors import ConfigError

Convert = Callable[[Callable[[int, int], None]], None]


def convert(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A checkpoint folder of either form.")],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="A folder that is not there yet.")],
) -> None:
    """Convert a Hugging Face folder into a Megatron distributed checkpoint, or back.

    The direction follows from SOURCE. No bit of the weights changes. Configuration and tokenizer travel along, so
    that the way back needs nothing else. What comes out of the first is loaded by ranks in any layout (tensor,
    pipeline, context, expert parallel).

    One process, on the CPU, with the weights in memory once. A TARGET that exists is refused.

    Of a run, use `async-grpo export`.
    """

    def work() -> int:
        from trainer.checkpoint.convert import is_megatron, to_hugging_face, to_megatron

        if not source.is_dir():
            raise ConfigError(f"there is no folder {source}. Give a Hugging Face folder or a Megatron checkpoint")
        if not is_megatron(source):
            return _with_progress("Megatron", target, lambda progress: to_megatron(source, target, progress))
        if not (source / "config.json").is_file():
            raise ConfigError(
                f"{source} has no config.json, so that its architecture and tokenizer are not known: `async-grpo "
                "convert` did not write it. Of a run, use `async-grpo export runs/NAME TARGET`"
            )
        return _with_progress(
            "Hugging Face", target, lambda progress: to_hugging_face(source, source, target, progress)
        )

    exit_with(work)


def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="For example runs/quickstart.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="A folder that is not there yet.")],
    version: Annotated[
        int | None, typer.Option("--version", help="Policy version; the newest checkpoint else.")
    ] = None,
) -> None:
    """Write a checkpoint of a run as a Hugging Face folder, which transformers and vLLM load.

    The run may be going on, or be over. Only versions with a checkpoint can be exported: see
    trainer.checkpoint.every_steps and keep.
    """

    def work() -> int:
        from async_grpo.app.launch.first_policy import prepare_model
        from async_grpo.app.launch.run_folder import find_checkpoint
        from trainer.checkpoint.convert import to_hugging_face

        config, checkpoint = find_checkpoint(run_dir, version)
        settings = asyncio.run(prepare_model(config, _say))
        _say(f"policy version {int(checkpoint.name)} of {run_dir}")
        return _with_progress(
            "Hugging Face", target, lambda progress: to_hugging_face(checkpoint, settings, target, progress)
        )

    exit_with(work)


def _with_progress(form: str, target: Path, do: Convert) -> int:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("tensors", total=None)
        do(lambda done, total: progress.update(bar, completed=done, total=total))
    size_bytes = sum(path.stat().st_size for path in target.iterdir())
    _say(f"{target}: {form}, {size_bytes:,} bytes")
    return 0


def _say(what: str) -> None:
    Console().print(escape(what), highlight=False)
