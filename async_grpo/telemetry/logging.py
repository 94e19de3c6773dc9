"""Log lines for people: time, level, role, what happened, key=value. To stderr, never with a secret.

    12:04:31.207 info    trainer    step trained  step=12 reward_mean=0.41 wait_s=0.02

The supervisor redirects the stderr of every role to `logs/<role>.log` of the run.
"""

from __future__ import annotations

import logging
import re
import sys
import time

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, WrappedLogger

_URL_PASSWORD = re.compile(r"([A-Za-z][\w+.-]*://[^\s:/@]*:)[^\s]*@")
_NAMED_SECRET = re.compile(r"(?i)\b([\w.-]*(?:password|passwd|secret|api_key)=)('[^']*'|\"[^\"]*\"|[^\s&'\"]+)")
_BARE_WORD = re.compile(r"[^\s'\"=\\\x00-\x1f\x7f-\x9f]+")


def configure_logging(role: str) -> FilteringBoundLogger:
    """Set up this process's logging and return its logger, bound to `role`."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.format_exc_info,
            _render_line,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),  # whatever sys.stderr is by then
        cache_logger_on_first_use=False,
    )
    logger: FilteringBoundLogger = structlog.get_logger().bind(role=role)
    return logger


def redact_secrets(text: str) -> str:
    """`redis://me:pw@host` -> `redis://me:***@host`; `password=pw` -> `password=***`.

    Prefers hiding too much over too little: everything up to the last `@` of a URL goes.
    """
    return _NAMED_SECRET.sub(r"\1***", _URL_PASSWORD.sub(r"\1***@", text))


def _render_line(_logger: WrappedLogger, _method: str, event: EventDict) -> str:
    """structlog processor: one line, with the traceback (if any) below it, all of it redacted."""
    now = time.time()
    clock = time.strftime("%H:%M:%S", time.localtime(now)) + f".{int(now % 1 * 1000):03d}"
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
