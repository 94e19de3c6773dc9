"""Log lines: time, level, role, what happened, key=value. To stderr, never with a secret.

    2026-11-23 12:04:31.207 info    trainer    step trained  step=12 reward_mean=0.41 wait_s=0.02

With ASYNC_GRPO_LOG_FORMAT=json each line is an object, also those of libraries, warnings and uncaught exceptions:

    {"time": "2026-11-23T12:04:31.207+00:00", "level": "info", "run": "small", "role": "trainer", "replica": "0",
     "event": "step trained", "step": 12, ...}

The supervisor redirects the stderr of every role to `logs/<role>.log` of the run. It is a variable and no key of the
configuration, because lines are written before a configuration is read, and by processes that read none.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, WrappedLogger

from async_grpo.telemetry.role_history import record_error
from async_grpo.utils.text import escape_controls

FORMAT_VARIABLE = "ASYNC_GRPO_LOG_FORMAT"
_FIELDS_VARIABLE = "ASYNC_GRPO_LOG_FIELDS"
"""Passes the fields of `bind_process` to child processes."""
_VLLM_CONFIG = Path(__file__).with_name("vllm_logging.json")

_URL_PASSWORD = re.compile(r"([A-Za-z][\w+.-]*://[^\s:/@]*:)[^\s]*@")
_NAMED_SECRET = re.compile(
    r"(?i)([\w.-]*(?:password|passwd|secret|api_?key|(?<![a-z])token)['\"]?\s*[=:]\s*)('[^']*'|\"[^\"]*\"|[^\s&'\",]+)"
)
_BEARER = re.compile(r"(?i)\b(bearer\s+)[\w.~+/=-]{6,}")
_BARE_WORD = re.compile(r"[^\s'\"=\\\x00-\x1f\x7f-\x9f]+")


def is_json() -> bool:
    """Whether lines are JSON objects."""
    return os.environ.get(FORMAT_VARIABLE, "console") == "json"


def configure_logging(role: str) -> FilteringBoundLogger:
    """Set up this process's logging and return its logger, bound to `role`."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.format_exc_info,
            _render_json if is_json() else _render_line,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),  # whatever sys.stderr is by then
        cache_logger_on_first_use=False,
    )
    if is_json():
        bind_process(role=role)
        _catch_the_rest()
    logger: FilteringBoundLogger = structlog.get_logger().bind(role=role)
    return logger


def bind_process(**fields: str) -> None:
    """Put fields, such as run and replica, into every JSON line of this process and of those that it starts."""
    os.environ[_FIELDS_VARIABLE] = json.dumps(_bound() | fields)


def say_as(role: str) -> Callable[[str], None]:
    """A function that reports progress to a person: print, or the log if lines are JSON."""
    return configure_logging(role).info if is_json() else print


def log_as(role: str, level: Literal["info", "warning", "error"], text: str, fields: Mapping[str, object]) -> None:
    """Write one line of this role to the log."""
    getattr(configure_logging(role), level)(text, **fields)


def report_fatal(error: BaseException) -> None:
    """Write the error that ends this process, as the last line of its log and in the history of a role that was started
    on its own: `ErrorName: message`."""
    line = redact_secrets(f"{type(error).__name__}: {error}")
    record_error(line)
    # On one line: the message may quote a completion, whose newlines would let it write the last line of the log.
    print(_json_line("critical", line, {}) if is_json() else escape_controls(line), file=sys.stderr)


def fatal_events(text: str) -> list[str]:
    """The errors that ended processes, from the JSON lines of a log, oldest first."""
    found = []
    for line in text.splitlines():
        if '"level": "critical"' in line:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                found.append(str(json.loads(line)["event"]))
    return found


class JsonFormatter(logging.Formatter):
    """Records of the standard library's logging as JSON lines; vllm_logging.json names it for the engine."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        fields: dict[str, Any] = {"logger": record.name}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return _json_line(record.levelname.lower(), record.getMessage(), fields, record.created)


def _catch_the_rest() -> None:
    """Libraries, warnings and uncaught exceptions write JSON lines too."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = lambda args: _uncaught(args.exc_type, args.exc_value, args.exc_traceback)
    os.environ.setdefault("VLLM_LOGGING_CONFIG_PATH", str(_VLLM_CONFIG))
    os.environ.setdefault("TQDM_DISABLE", "1")  # a bar is not a line


def _uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    fields = {"exception": "".join(traceback.format_exception(kind, error, trace))}
    print(_json_line("critical", f"{kind.__name__}: {error}", fields), file=sys.stderr)


def _bound() -> dict[str, str]:
    try:
        found = json.loads(os.environ.get(_FIELDS_VARIABLE, "{}"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _json_line(level: str, event: str, fields: dict[str, Any], at_s: float | None = None) -> str:
    """One object on one line; every text in it is redacted."""
    now = datetime.fromtimestamp(time.time() if at_s is None else at_s).astimezone()
    said = {"time": now.isoformat(timespec="milliseconds"), "level": level, **_bound(), "event": event, **fields}
    return json.dumps({key: _plain(value) for key, value in said.items()}, default=lambda value: _plain(str(value)))


def _plain(value: Any) -> Any:
    """The value without secrets, converted to JSON types: NaN and infinity become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return redact_secrets(value) if isinstance(value, str) else value


def _render_json(_logger: WrappedLogger, _method: str, event: EventDict) -> str:
    """structlog processor: one JSON line."""
    level, message = event.pop("level", "info"), str(event.pop("event", ""))
    event.pop("role", None)  # bound to the process, without the number of a server
    return _json_line(level, message, dict(event))


def redact_secrets(text: str) -> str:
    """`redis://me:pw@host` -> `redis://me:***@host`; `password=pw` -> `password=***`.

    Prefers hiding too much over too little: everything up to the last `@` of a URL goes.
    """
    return _NAMED_SECRET.sub(r"\1***", _BEARER.sub(r"\1***", _URL_PASSWORD.sub(r"\1***@", text)))


def _render_line(_logger: WrappedLogger, _method: str, event: EventDict) -> str:
    """structlog processor: one line, with the traceback (if any) below it, all of it redacted."""
    now = time.time()
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now)) + f".{int(now % 1 * 1000):03d}"
    level, role = event.pop("level", "info"), event.pop("role", "-")
    message, traceback = str(event.pop("event", "")), event.pop("exception", None)
    head = f"{clock} {level:<7} {role:<10} {message}"
    pairs = " ".join(f"{key}={_show(value)}" for key, value in event.items())
    line = f"{head}  {pairs}" if pairs else head
    return redact_secrets(f"{line}\n{traceback}" if traceback else line)


def _show(value: object) -> str:
    """A value that cannot break the line: floats short, text with spaces or controls quoted."""
    if isinstance(value, float):
        return f"{value:.5g}"
    text = str(value)
    return text if _BARE_WORD.fullmatch(text) else repr(text)
