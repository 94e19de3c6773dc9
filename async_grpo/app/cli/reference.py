"""Generates docs/reference.md (configuration keys, metrics and commands) and the tables of docs/coming-from-NAME.md.

    python -m async_grpo.app.cli.reference docs/reference.md

Tests check that the files are up to date.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from async_grpo.app.cli.main import app
from async_grpo.config import RunConfig
from async_grpo.config.basics import BASIC_KEYS
from async_grpo.lab.importers import SOURCES, insert_tables, page_name
from async_grpo.telemetry.metrics import METRICS, SERVER_METRICS

HEADER = """# Reference

All configuration keys, metrics and commands. This page is generated from the code by `make reference`; change the
code, not the page.
"""


def reference() -> str:
    """Return the whole page as Markdown."""
    return "\n".join([HEADER, *configuration(), *step_metrics(), *server_metrics(), *commands()]).rstrip() + "\n"


def configuration() -> Iterator[str]:
    """Yield one table per section of the configuration: key, type, default, meaning."""
    yield "## Configuration keys\n"
    yield (
        "Nested keys are written with dots, as `-o` takes them; `list[].key` is a key of every item of a list. *Basic* "
        "keys are those that users set; *advanced* ones are internals with defaults that work. `async-grpo run CONFIG "
        "--explain KEY` shows the value of a key, where it was set, and the checks that mention it.\n"
    )
    sections: dict[str, list[tuple[str, FieldInfo]]] = {}
    for key, field in list_fields(RunConfig, ""):
        sections.setdefault(key.split(".")[0] if "." in key else "", []).append((key, field))
    for section in sorted(sections):
        yield f"### {section or 'Top level'}\n"
        basic = [(key, field) for key, field in sections[section] if key in BASIC_KEYS]
        advanced = [(key, field) for key, field in sections[section] if key not in BASIC_KEYS]
        for label, keys in (("Basic", basic), ("Advanced", advanced)):
            if keys:
                yield f"*{label}*\n"
                yield from _key_table(keys)


def _key_table(keys: list[tuple[str, FieldInfo]]) -> Iterator[str]:
    yield "| key | type | default | meaning |\n|---|---|---|---|"
    for key, field in keys:
        yield f"| `{key}` | {_type_name(field.annotation)} | {_default(field)} | {_cell(field.description or '')} |"
    yield ""


def step_metrics() -> Iterator[str]:
    """Yield the table of METRICS: key, tag, gauge, unit, meaning."""
    yield "## Metrics of a training step\n"
    yield (
        "`key` is the name in the rows of kind `step` in `metrics.jsonl`, `tag` the name in TensorBoard and other "
        "trackers, and `gauge` the name on the trainer's `/metrics`, after `async_grpo_trainer_`.\n"
    )
    yield "| key | tag | gauge | unit | meaning |\n|---|---|---|---|---|"
    for metric in METRICS:
        names = f"`{metric.key}` | {_code(metric.tag)} | {_code(metric.gauge)}"
        yield f"| {names} | {metric.unit} | {_cell(metric.doc)} |"
    yield ""


def server_metrics() -> Iterator[str]:
    """Yield the table of SERVER_METRICS: name, labels, meaning."""
    yield "## Metrics of a rollout server\n"
    yield "On the `/metrics` of every rollout server ([http.md](http.md)). Counters start with the engine.\n"
    yield "| metric | labels | meaning |\n|---|---|---|"
    for metric in SERVER_METRICS:
        labels = ", ".join(_code(label) for label in metric.labels)
        yield f"| `async_grpo_{metric.key}` | {labels} | {_cell(metric.doc)} |"
    yield ""


def commands() -> Iterator[str]:
    """Yield every command with its arguments and options."""
    yield "## Commands\n"
    pending: list[tuple[str, Any]] = [("async-grpo", typer.main.get_command(app))]
    while pending:
        name, command = pending.pop(0)
        children: Mapping[str, Any] = getattr(command, "commands", {})
        pending += [(f"{name} {child}", children[child]) for child in sorted(children)]
        if not children:
            yield f"### `{name}`\n\n{_paragraphs(command.help or '')}\n"
            yield "| option | meaning | default |\n|---|---|---|"
            yield from map(_parameter_row, command.params)
            yield ""


def list_fields(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    """Yield all keys below `prefix`. The keys of a list's items follow the list as `list[].key`."""
    for name, field in model.model_fields.items():
        sections = [member for member in _members(field.annotation) if _is_model(member)]
        if not sections:
            yield f"{prefix}{name}", field
        for section in sections:
            yield from list_fields(section, f"{prefix}{name}.")
        for item in _members(field.annotation):
            for argument in get_args(item):
                for section in filter(_is_model, _members(argument)):
                    yield from list_fields(section, f"{prefix}{name}[].")


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _members(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, or else the annotation itself."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(member for part in get_args(annotation) for member in _members(part))
    return (annotation,)


def _type_name(annotation: Any) -> str:
    names: list[str] = []
    for member in _members(annotation):
        origin = get_origin(member)
        if origin is Literal:
            names += [f"`{value}`" for value in get_args(member)]
        elif origin is not None:
            names.append(origin.__name__)
        else:
            names.append("none" if member is type(None) else getattr(member, "__name__", str(member)))
    return " or ".join(dict.fromkeys(names))


def _default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    return "required" if default is PydanticUndefined else _code(json.dumps(default, default=_plain))


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else str(value)


def _parameter_row(parameter: Any) -> str:
    words = parameter.opts if parameter.param_type_name == "option" else [parameter.metavar or parameter.name.upper()]
    default = parameter.default
    shown = "" if default is None or callable(default) else _code(str(getattr(default, "value", default)))
    return f"| {', '.join(map(_code, words))} | {_cell(getattr(parameter, 'help', None) or '')} | {shown} |"


def _paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in text.replace("\b", "").split("\n\n"))


def _code(text: str) -> str:
    return f"`{_cell(text)}`" if text else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference(), encoding="utf-8")
    for source in SOURCES.values():
        page = Path(sys.argv[1]).with_name(page_name(source))
        page.write_text(insert_tables(page.read_text(encoding="utf-8"), source), encoding="utf-8")
