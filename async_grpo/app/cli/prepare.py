"""`async-grpo prepare`: turn published data into a folder of tokenized prompts that runs read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import DownloadColumn
from rich.table import Table
from rich.text import Text

from async_grpo.app.cli.common import exit_with_code, progress_bar, say
from async_grpo.config.data import DataFormat, PrepareConfig
from async_grpo.config.model import Hub
from async_grpo.errors import ConfigError

if TYPE_CHECKING:
    from async_grpo.data.prepare.formats import Rejections
    from async_grpo.data.prepared_dataset import DatasetManifest

Files = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="FILE|NAME", help="JSON lines, a JSON array or Parquet; or gsm8k, deepscaler, dapo-math from a hub."
    ),
]
KeepField = Annotated[list[str] | None, typer.Option(help="Field to keep as metadata for verifiers; may be repeated.")]
HeldOutFrom = Annotated[
    list[Path] | None, typer.Option(metavar="FILE", help="Hold out the rows of this file instead; may be repeated.")
]


@exit_with_code()
def prepare(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder to create; it must not exist.")],
    model: Annotated[
        Path, typer.Option(metavar="FOLDER|ID", help="Model of the run (folder or id on the hub), for its tokenizer.")
    ],
    files: Files = None,
    dataset: Annotated[
        str, typer.Option(metavar="ID", help="Data set on the hub, such as openai/gsm8k or openai/gsm8k@REVISION.")
    ] = "",
    split: Annotated[str, typer.Option(help="With --dataset: the split to train on.")] = "train",
    subset: Annotated[str, typer.Option(help="With --dataset: its folder or configuration, such as main.")] = "",
    hub: Annotated[Hub, typer.Option(help="The hub of --dataset, a NAME and --model.")] = "huggingface",
    format: Annotated[DataFormat, typer.Option(help="Names of the fields; auto looks at the first row.")] = "auto",
    prompt_field: Annotated[str, typer.Option(help="With --format generic; a dot leads into an object.")] = "",
    answer_field: Annotated[
        str, typer.Option(help="With --format generic; only what follows ####, if it has it.")
    ] = "",
    keep_field: KeepField = None,
    template: Annotated[
        str, typer.Option(help="raw, qwen_r1, chat (the tokenizer's own template), or a Jinja file.")
    ] = "raw",
    system: Annotated[str, typer.Option(help="System message for chat or a Jinja file.")] = "",
    max_prompt_tokens: Annotated[int, typer.Option(help="Reject longer prompts.")] = 512,
    held_out: Annotated[int, typer.Option(help="Rows to keep from training for evaluation.")] = 256,
    held_out_from: HeldOutFrom = None,
    keep_duplicates: Annotated[bool, typer.Option("--keep-duplicates", help="Keep repeated questions.")] = False,
    shuffle: Annotated[bool, typer.Option(help="Shuffle the rows, or keep the order of the files.")] = True,
    seed: Annotated[int, typer.Option(help="Seed of the shuffling.")] = 1,
) -> None:
    """Tokenize, filter, deduplicate and split a data set into a folder for `data.path`.

    FOLDER/rejected.jsonl lists the rejected rows, each with its line and the reason. The folder appears only once it is
    complete; runs read it in constant memory. docs/data.md describes the formats.
    """
    paths = {"files": files or [], "out": out, "model": model, "held_out_from": held_out_from or []}
    fields = {"prompt_field": prompt_field, "answer_field": answer_field, "keep_fields": keep_field or []}
    prompts = {"template": template, "system": system, "max_prompt_tokens": max_prompt_tokens}
    rows = {"held_out": held_out, "keep_duplicates": keep_duplicates, "shuffle": shuffle, "seed": seed}
    options = {**paths, **fields, **prompts, **rows, "format": format}
    _prepare(_from_hub(options, dataset, split, subset, hub))


def _from_hub(options: dict[str, Any], dataset: str, split: str, subset: str, hub: Hub) -> dict[str, Any]:
    """The options with local files in place of a name or an id. Raises ConfigError."""
    from async_grpo.models.hub import TOKENIZER_FILES, hub_repo
    from async_grpo.models.hub_dataset import KNOWN, hub_files

    files = options["files"]
    if not dataset and len(files) == 1 and str(files[0]) in KNOWN and not files[0].exists():
        dataset, files = KNOWN[str(files[0])].id, []
    if bool(dataset) == bool(files):
        raise ConfigError(
            f"prepare needs FILEs, one of the names {', '.join(KNOWN)}, or --dataset with an id, and not two of them"
        )
    if dataset:
        found = hub_files(dataset, hub, split, subset, say)
        held_out = options["held_out_from"] or found.held_out
        chosen = found.format if options["format"] == "auto" else options["format"]
        options = {**options, "files": found.train, "held_out_from": held_out, "format": chosen}
    if repo := hub_repo(options["model"], "model", hub, "--model"):
        options = {**options, "model": replace(repo, wanted=TOKENIZER_FILES).pinned().fetch(say)}
    return options


def _prepare(options: dict[str, Any]) -> None:
    from async_grpo.data.prepare.pipeline import prepare_dataset
    from async_grpo.data.tokenizer import find_tokenizer

    config = _checked(options)
    tokenizer = find_tokenizer(config.model, "--model")
    with progress_bar(DownloadColumn()) as progress:
        total = sum(file.stat().st_size for file in [*config.files, *config.held_out_from] if file.is_file())
        bar = progress.add_task("preparing", total=total)
        manifest, rejected = prepare_dataset(config, tokenizer, lambda done: progress.update(bar, completed=done))
    Console().print(_summary(config, manifest, rejected))


def _checked(options: dict[str, Any]) -> PrepareConfig:
    """The options as a PrepareConfig. Raises ConfigError that names the options that are wrong."""
    from pydantic import ValidationError

    try:
        return PrepareConfig.model_validate(options)
    except ValidationError as error:
        problems = []
        for one in error.errors():
            option = "".join(f"--{key}: ".replace("_", "-") for key in one["loc"][:1])
            problems.append(option + one["msg"].removeprefix("Value error, "))
        raise ConfigError("; ".join(problems)) from None


def _summary(config: PrepareConfig, manifest: DatasetManifest, rejected: Rejections) -> Table:
    """A table of the rows taken, and of those rejected with the first row for each reason."""
    table = Table(title=Text(f"prepared {config.out}"), show_header=False)
    table.add_row("training rows", f"{manifest.rows['train']:,}")
    table.add_row("held-out rows", f"{manifest.rows['held_out']:,}")
    table.add_row("longest prompt", f"{manifest.longest_prompt_tokens:,} tokens")
    for reason, count in sorted(manifest.rejected.items()):
        table.add_row(f"not taken: {reason}", Text(f"{count:,}, first {rejected.first[reason]}"))
    table.add_row("in a run", Text(f"-o data.kind=jsonl -o data.path={config.out}"))
    return table
