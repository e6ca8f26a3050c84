"""How a line of the log looks, alike in all processes."""

from __future__ import annotations

import logging


class ZonedFormatter(logging.Formatter):
    """Times are ISO 8601 with milliseconds and the zone: logs of several machines can be merged."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        text = super().formatTime(record, f"%Y-%m-%dT%H:%M:%S.{int(record.msecs):03d}%z")
        return f"{text[:-2]}:{text[-2:]}"


def configure(level: str, pattern: str = "%(asctime)s %(levelname)s %(message)s") -> None:
    """Sends the log to standard error. `level`: as --log-level names it."""
    handler = logging.StreamHandler()
    handler.setFormatter(ZonedFormatter(pattern))
    logging.basicConfig(level=level.upper(), handlers=[handler])
