"""What a client is told beside its answer: a header with what its request asked for and did not get."""

from __future__ import annotations

import logging
from contextvars import ContextVar

from starlette.datastructures import MutableHeaders

log = logging.getLogger(__name__)

HEADER = "x-mtpserve-warning"
MAX_HEADER = 1000  # characters
MAX_LOGGED = 1000
LOGGED: set[str] = set()
# Of the request that is served. The list is the request's, whichever task of it appends.
WARNINGS: ContextVar[list[str] | None] = ContextVar("warnings", default=None)


def warn(text: str) -> None:
    """Adds to the request's warnings. Logs a line where no earlier request got the same: clients send their
    tools with every request."""
    if text not in LOGGED and len(LOGGED) < MAX_LOGGED:
        LOGGED.add(text)
        log.warning("%s", ascii(text)[1:-1][:MAX_HEADER])
    if (warnings := WARNINGS.get()) is not None:
        warnings.append(text)


def add_warnings(headers: MutableHeaders, warnings: list[str]) -> None:
    if warnings:
        headers[HEADER] = ascii("; ".join(warnings))[1:-1][:MAX_HEADER]
