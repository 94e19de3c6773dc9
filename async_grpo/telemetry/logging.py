"""Log lines with time, level, role, event and key=value pairs. They go to stderr, without secrets.

    2026-11-23 12:04:31.207 info    trainer    step trained  step=12 reward_mean=0.41 wait_s=0.02

With ASYNC_GRPO_LOG_FORMAT=json each line is a JSON object, including those of libraries, warnings and uncaught
exceptions:

    {"time": "2026-11-23T12:04:31.207+00:00", "level": "info", "run": "small", "role": "trainer", "replica": "0",
     "event": "step trained", "step": 12, ...}

The supervisor redirects the stderr of every role to `logs/<role>.log` of the run. A role that is started separately
copies its lines there (`copy_log`), for the page of runs; output that is not a log line is only in its stderr. The
format is an environment variable instead of a configuration key, because processes log before they read a
configuration, and some read none.
"""

from __future__ import annotations

import contextlib
import io
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
from typing import Any, Literal, TextIO, cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, WrappedLogger

from async_grpo.telemetry.role_history import record_error
from async_grpo.utils.text import escape_controls

FORMAT_VARIABLE = "ASYNC_GRPO_LOG_FORMAT"
_FIELDS_VARIABLE = "ASYNC_GRPO_LOG_FIELDS"
"""Passes the fields of `bind_process` to child processes."""
_COPY_VARIABLE = "ASYNC_GRPO_LOG_COPY"
"""File to which this process and its children append a copy of their log lines."""
_VLLM_CONFIG = Path(__file__).with_name("vllm_logging.json")

_URL_PASSWORD = re.compile(r"([A-Za-z][\w+.-]*://[^\s:/@]*:)[^\s]*@")
_NAMED_SECRET = re.compile(
    r"(?i)([\w.-]*(?:password|passwd|secret|api_?key|(?<![a-z])token)['\"]?\s*[=:]\s*)('[^']*'|\"[^\"]*\"|[^\s&'\",]+)"
)
_BEARER = re.compile(r"(?i)\b(bearer\s+)[\w.~+/=-]{6,}")
_BARE_WORD = re.compile(r"[^\s'\"=\\\x00-\x1f\x7f-\x9f]+")


class LogOutput(io.TextIOBase):
    """sys.stderr, with a copy in the file of `copy_log`."""

    def write(self, text: str) -> int:
        """Write text. A copy that fails, such as on a full disk, is left out."""
        sys.stderr.write(text)  # looked up late: tests replace sys.stderr
        copy = os.environ.get(_COPY_VARIABLE)
        if copy:
            # Open it for each line: several processes append to the file, and forks share no buffer.
            with contextlib.suppress(OSError), Path(copy).open("a") as file:
                file.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush sys.stderr; the copy has no buffer."""
        sys.stderr.flush()


OUTPUT = cast("TextIO", LogOutput())


def copy_log(file: Path) -> None:
    """Append the log lines of this process and its children to `file`, in addition to stderr."""
    file.parent.mkdir(parents=True, exist_ok=True)
    os.environ[_COPY_VARIABLE] = str(file)


def is_json() -> bool:
    """True if log lines are JSON objects."""
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
        logger_factory=lambda *_: structlog.WriteLogger(OUTPUT),
        cache_logger_on_first_use=False,
    )
    if is_json():
        bind_process(role=role)
        _redirect_other_output()
    logger: FilteringBoundLogger = structlog.get_logger().bind(role=role)
    return logger


def bind_process(**fields: str) -> None:
    """Add fields, such as run and replica, to every JSON line of this process and its children."""
    os.environ[_FIELDS_VARIABLE] = json.dumps(_bound() | fields)


def make_progress_logger(role: str) -> Callable[[str], None]:
    """Return a function that reports progress: `print`, or the log of this role if lines are JSON."""
    return configure_logging(role).info if is_json() else print


def log_as(role: str, level: Literal["info", "warning", "error"], text: str, fields: Mapping[str, object]) -> None:
    """Log one line for this role."""
    getattr(configure_logging(role), level)(text, **fields)


def report_fatal(error: BaseException) -> None:
    """Write the error that ends this process, `ErrorName: message`, as the last line of its log, and for a role that
    was started separately into its history."""
    line = redact_secrets(f"{type(error).__name__}: {error}")
    record_error(line)
    # Escape newlines: the message may quote a completion, which could otherwise forge the last line of the log.
    OUTPUT.write((_json_line("critical", line, {}) if is_json() else escape_controls(line)) + "\n")


def fatal_events(text: str) -> list[str]:
    """Return the errors that ended processes, from the JSON lines of a log, oldest first."""
    events = []
    for line in text.splitlines():
        if '"level": "critical"' in line:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                events.append(str(json.loads(line)["event"]))
    return events


class JsonFormatter(logging.Formatter):
    """Formats records of the standard library's logging as JSON lines. vllm_logging.json refers to it."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
        fields: dict[str, Any] = {"logger": record.name}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return _json_line(record.levelname.lower(), record.getMessage(), fields, record.created)


def _redirect_other_output() -> None:
    """Make libraries, warnings and uncaught exceptions write JSON lines."""
    handler = logging.StreamHandler(OUTPUT)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = lambda args: _uncaught(args.exc_type, args.exc_value, args.exc_traceback)
    os.environ.setdefault("VLLM_LOGGING_CONFIG_PATH", str(_VLLM_CONFIG))
    os.environ.setdefault("TQDM_DISABLE", "1")  # progress bars are not JSON lines


def _uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    fields = {"exception": "".join(traceback.format_exception(kind, error, trace))}
    OUTPUT.write(_json_line("critical", f"{kind.__name__}: {error}", fields) + "\n")


def _bound() -> dict[str, str]:
    try:
        fields = json.loads(os.environ.get(_FIELDS_VARIABLE, "{}"))
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _json_line(level: str, event: str, fields: dict[str, Any], at_s: float | None = None) -> str:
    """Return one JSON object on one line, with secrets removed from all texts."""
    when = datetime.fromtimestamp(time.time() if at_s is None else at_s).astimezone()
    line = {"time": when.isoformat(timespec="milliseconds"), "level": level, **_bound(), "event": event, **fields}
    return json.dumps({key: _plain(value) for key, value in line.items()}, default=lambda value: _plain(str(value)))


def _plain(value: Any) -> Any:
    """Convert a value to JSON types without secrets: NaN and infinity become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return redact_secrets(value) if isinstance(value, str) else value


def _render_json(_logger: WrappedLogger, _method: str, event: EventDict) -> str:
    """structlog processor: return one JSON line."""
    level = event.pop("level", "info")
    message = str(event.pop("event", ""))
    event.pop("role", None)  # the process's own field has the role, without the number of a server
    return _json_line(level, message, dict(event))


def redact_secrets(text: str) -> str:
    """`redis://me:pw@host` -> `redis://me:***@host`; `password=pw` -> `password=***`.

    Prefers removing too much over too little: everything up to the last `@` of a URL is removed.
    """
    return _NAMED_SECRET.sub(r"\1***", _BEARER.sub(r"\1***", _URL_PASSWORD.sub(r"\1***@", text)))


def _render_line(_logger: WrappedLogger, _method: str, event: EventDict) -> str:
    """structlog processor: return one line, with a traceback below it if there is one, without secrets."""
    now = time.time()
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now)) + f".{int(now % 1 * 1000):03d}"
    level = event.pop("level", "info")
    role = event.pop("role", "-")
    message = str(event.pop("event", ""))
    traceback = event.pop("exception", None)
    head = f"{clock} {level:<7} {role:<10} {message}"
    pairs = " ".join(f"{key}={_show(value)}" for key, value in event.items())
    line = f"{head}  {pairs}" if pairs else head
    return redact_secrets(f"{line}\n{traceback}" if traceback else line)


def _show(value: object) -> str:
    """Format a value so that it cannot break the line: short floats, quotes around text with spaces or controls."""
    if isinstance(value, float):
        return f"{value:.5g}"
    text = str(value)
    return text if _BARE_WORD.fullmatch(text) else repr(text)
