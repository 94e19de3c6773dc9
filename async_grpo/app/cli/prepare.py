"""`async-grpo prepare`: convert published data into a folder of tokenized prompts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import DownloadColumn
from rich.table import Table
from rich.text import Text

from async_grpo.app.cli.common import exit_with_code, print_message, progress_bar
from async_grpo.config.data import DataFormat, PrepareConfig
from async_grpo.config.model import Hub
from async_grpo.errors import ConfigError

if TYPE_CHECKING:
    from async_grpo.data.prepare.formats import Rejections
    from async_grpo.data.prepared_dataset import DatasetManifest

Files = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="FILE|NAME",
        help="Files of JSON lines, a JSON array or Parquet; or gsm8k, deepscaler or dapo-math from a hub.",
    ),
]
KeepField = Annotated[list[str] | None, typer.Option(help="Field to pass to verifiers as metadata; may be repeated.")]
HeldOutFrom = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="File of held-out rows, instead of --held-out; may be repeated."),
]


@exit_with_code()
def prepare(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder to create; it must not exist.")],
    model: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER|ID", help="Model of the run, a folder or an id on the hub; only its tokenizer is used."
        ),
    ],
    files: Files = None,
    dataset: Annotated[
        str, typer.Option(metavar="ID", help="Data set on the hub, such as openai/gsm8k or openai/gsm8k@REVISION.")
    ] = "",
    split: Annotated[str, typer.Option(help="--dataset: training split.")] = "train",
    subset: Annotated[str, typer.Option(help="--dataset: folder or configuration of the data set, such as main.")] = "",
    hub: Annotated[Hub, typer.Option(help="Hub of --dataset, NAME and --model.")] = "huggingface",
    format: Annotated[
        DataFormat, typer.Option(help="Format of the rows; auto: detected from the first row of each file.")
    ] = "auto",
    prompt_field: Annotated[
        str, typer.Option(help="--format generic: field of the question; a dot selects a field of an object.")
    ] = "",
    answer_field: Annotated[
        str, typer.Option(help="--format generic: field of the answer; only the text after ####, if any, is used.")
    ] = "",
    keep_field: KeepField = None,
    template: Annotated[
        str, typer.Option(help="Prompt template: raw, qwen_r1, chat (the tokenizer's own), or a Jinja file.")
    ] = "raw",
    system: Annotated[str, typer.Option(help="System message, for chat or a Jinja file.")] = "",
    max_prompt_tokens: Annotated[
        int, typer.Option(help="Maximum length of a prompt, in tokens; longer prompts are rejected.")
    ] = 512,
    held_out: Annotated[int, typer.Option(help="Number of rows to reserve for evaluation.")] = 256,
    held_out_from: HeldOutFrom = None,
    keep_duplicates: Annotated[bool, typer.Option("--keep-duplicates", help="Keep duplicate questions.")] = False,
    shuffle: Annotated[bool, typer.Option(help="Shuffle the rows; otherwise keep the order of the files.")] = True,
    seed: Annotated[int, typer.Option(help="Seed of the shuffling.")] = 1,
) -> None:
    """Turn a data set into a folder that runs read (data.path): tokenized, filtered and split.

    FOLDER/rejected.jsonl lists the rejected rows, with line and reason. The folder is created only when it is complete.
    Runs read it in constant memory. docs/data.md describes the formats.
    """
    options = {
        "files": files or [],
        "out": out,
        "model": model,
        "format": format,
        "prompt_field": prompt_field,
        "answer_field": answer_field,
        "keep_fields": keep_field or [],
        "template": template,
        "system": system,
        "max_prompt_tokens": max_prompt_tokens,
        "held_out": held_out,
        "held_out_from": held_out_from or [],
        "keep_duplicates": keep_duplicates,
        "shuffle": shuffle,
        "seed": seed,
    }
    _prepare(_download_inputs(options, dataset, split, subset, hub))


def _download_inputs(options: dict[str, Any], dataset: str, split: str, subset: str, hub: Hub) -> dict[str, Any]:
    """Download data set and model if they are on a hub, and return the options with local files. Raises ConfigError."""
    from async_grpo.models.hub import TOKENIZER_FILES, hub_repo
    from async_grpo.models.hub_dataset import KNOWN_DATASETS, fetch_dataset

    files = options["files"]
    # A file of that name takes precedence over the name of a known data set.
    if not dataset and len(files) == 1 and str(files[0]) in KNOWN_DATASETS and not files[0].exists():
        dataset = KNOWN_DATASETS[str(files[0])].id
        files = []
    if bool(dataset) == bool(files):
        raise ConfigError(
            f"prepare needs exactly one of: FILEs, one of the names {', '.join(KNOWN_DATASETS)}, or --dataset with an "
            "id"
        )
    if dataset:
        downloaded = fetch_dataset(dataset, hub, split, subset, print_message)
        held_out = options["held_out_from"] or downloaded.held_out
        format_name = downloaded.format if options["format"] == "auto" else options["format"]
        options = {**options, "files": downloaded.train, "held_out_from": held_out, "format": format_name}
    repo = hub_repo(options["model"], "model", hub, "--model")
    if repo is not None:
        tokenizer = replace(repo, allow_patterns=TOKENIZER_FILES).pin_revision()
        options = {**options, "model": tokenizer.fetch_files(print_message)}
    return options


def _prepare(options: dict[str, Any]) -> None:
    from async_grpo.data.prepare.pipeline import prepare_dataset
    from async_grpo.data.tokenizer import find_tokenizer

    config = _validate_options(options)
    tokenizer = find_tokenizer(config.model, "--model")
    with progress_bar(DownloadColumn()) as progress:
        total = sum(file.stat().st_size for file in [*config.files, *config.held_out_from] if file.is_file())
        bar = progress.add_task("preparing", total=total)
        manifest, rejected = prepare_dataset(config, tokenizer, lambda done: progress.update(bar, completed=done))
    Console().print(_summary_table(config, manifest, rejected))


def _validate_options(options: dict[str, Any]) -> PrepareConfig:
    """Return the options as a PrepareConfig. Raises ConfigError that names the invalid options."""
    from pydantic import ValidationError

    try:
        return PrepareConfig.model_validate(options)
    except ValidationError as error:
        problems = []
        for detail in error.errors():
            option = "".join(f"--{key}: ".replace("_", "-") for key in detail["loc"][:1])
            problems.append(option + detail["msg"].removeprefix("Value error, "))
        raise ConfigError("; ".join(problems)) from None


def _summary_table(config: PrepareConfig, manifest: DatasetManifest, rejected: Rejections) -> Table:
    """Return a table of the accepted rows, and of the rejected rows by reason, with the first of each."""
    table = Table(title=Text(f"prepared {config.out}"), show_header=False)
    table.add_row("training rows", f"{manifest.rows['train']:,}")
    table.add_row("held-out rows", f"{manifest.rows['held_out']:,}")
    table.add_row("longest prompt", f"{manifest.longest_prompt_tokens:,} tokens")
    for reason, count in sorted(manifest.rejected.items()):
        table.add_row(f"rejected: {reason}", Text(f"{count:,}, first {rejected.first[reason]}"))
    table.add_row("in a run", Text(f"-o data.kind=jsonl -o data.path={config.out}"))
    return table
