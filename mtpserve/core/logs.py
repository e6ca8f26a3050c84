"""How a line of the log looks, alike in all processes: as text, or as one JSON object."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import MISSING, Field, fields, is_dataclass
from logging.handlers import MemoryHandler
from time import localtime, strftime
from typing import Any

import msgspec

LOG_FORMATS = ("text", "json")
TEXT = "%(asctime)s %(levelname)s {}%(message)s"
HELD_RECORDS = 1000  # before the options say how lines look
# the HTTP request that this context serves; "": none
REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
# what every record has; all else came by `extra`
USUAL = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime", "request_id"})


class ZonedFormatter(logging.Formatter):
    """Times are ISO 8601 with milliseconds and the zone: logs of several machines can be merged."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return zoned_time(record)


class JSONFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, process, pid, message; request_id where a request is
    served; the fields of `extra`; exception and stack, where there are any, as Python writes them.

    `process`: what this process is, like "engine 0".
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process
        self._encode = msgspec.json.Encoder(enc_hook=str).encode

    def format(self, record: logging.LogRecord) -> str:
        values: dict[str, Any] = {
            "time": zoned_time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "pid": record.process,
            "message": record.getMessage(),
        }
        if request_id := getattr(record, "request_id", "") or REQUEST_ID.get():
            values["request_id"] = request_id
        values |= {name: value for name, value in vars(record).items() if name not in USUAL}
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            values["stack"] = self.formatStack(record.stack_info)
        try:
            return self._encode(values).decode()
        except UnicodeEncodeError:  # half of a pair of surrogates, in a path or in what a client sent
            return json.dumps(values, default=str)


def zoned_time(record: logging.LogRecord) -> str:
    """The record's local time as ISO 8601 has it."""
    text = strftime(f"%Y-%m-%dT%H:%M:%S.{int(record.msecs):03d}%z", localtime(record.created))
    return f"{text[:-2]}:{text[-2:]}"


def configure(level: str, format: str = "text", *, process: str = "server", prefix: str = "") -> None:
    """Sends the log to standard error.

    `level`, `format`: as --log-level and --log-format name them. `process`: what this process is; lines of
    text begin with `prefix` instead. As JSON go also Python's warnings, and exceptions that nobody catches.
    """
    handler = logging.StreamHandler()
    is_json = format == "json"
    handler.setFormatter(JSONFormatter(process) if is_json else ZonedFormatter(TEXT.format(prefix)))
    root = logging.getLogger()
    held = [before for before in root.handlers if isinstance(before, MemoryHandler)]
    for before in held:
        root.removeHandler(before)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    for before in held:
        before.setTarget(handler)
        before.flush()
    if is_json:
        logging.captureWarnings(True)
        sys.excepthook = log_uncaught
        threading.excepthook = lambda args: log_uncaught(
            args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback
        )


def log_uncaught(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
    """An exception that ends the process or a thread."""
    logging.getLogger(__name__).critical("uncaught %s", kind.__name__, exc_info=(kind, error, traceback))


def current_format() -> str:
    """The member of LOG_FORMATS that `configure` got last; text, if it was not called."""
    handlers = logging.getLogger().handlers
    return "json" if any(isinstance(handler.formatter, JSONFormatter) for handler in handlers) else "text"


@contextmanager
def held_records() -> Iterator[None]:
    """Keeps what is logged inside until `configure` says how lines look. An exception that leaves the block
    has them written as bare texts, before it is reported."""
    handler, root = MemoryHandler(HELD_RECORDS, flushLevel=logging.CRITICAL + 1), logging.getLogger()
    handler.setTarget(logging.lastResort)
    root.addHandler(handler)
    try:
        yield
    except BaseException:
        root.removeHandler(handler)
        handler.close()
        raise


def non_default_fields(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not at their defaults, those of dataclasses inside alike."""
    return {
        field.name: non_default_fields(inner) if is_dataclass(inner) else inner
        for field in fields(value)
        if (inner := getattr(value, field.name)) != default_of(field)
    }


def default_of(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()
