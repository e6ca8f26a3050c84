"""The errors that cross layers. Every error that a user can cause is one of them.

MTPServeError
├── ConfigError        a launch option or a config file                        → one line, exit code 2
│   ├── NoRoom             nothing is left for keys and values
│   └── PoolTooSmall       --max-total-tokens is less than one request needs
├── LoadError          a checkpoint: its file, its tensor, what is accepted    → one line, exit code 1
│   └── UnsupportedModel   an architecture or a layout that no family supports
├── InvalidRequest     one request's field (`param`)                           → HTTP 400
├── RequestFailed      one request failed, the others continue                 → HTTP 500, or an error event
└── EngineError        the engine as a whole
    ├── EngineBusy     draining, or too slow                                   → HTTP 503 with Retry-After
    │   ├── QueueFull  the queue is full                                       → HTTP 429 with Retry-After
    │   └── ShuttingDown  the server was told to end                           → HTTP 503 with Retry-After
    └── EngineDead     its process has ended                                   → HTTP 503, exit code not 0
"""

from __future__ import annotations


def quantity(number: int, noun: str) -> str:
    """Returns the number with its noun, for messages: 1 request, 2 requests, 1,000 requests."""
    return f"{number:,} {noun}" + "s" * (number != 1)


class MTPServeError(Exception):
    """Base of all errors that mtpserve raises on purpose. The message is for the user: one line with the
    thing and its value."""


class ConfigError(MTPServeError):
    pass


class NoRoom(ConfigError):
    pass


class PoolTooSmall(ConfigError):
    """--max-total-tokens is less than one request needs."""


class LoadError(MTPServeError):
    pass


class UnsupportedModel(LoadError):
    pass


class InvalidRequest(MTPServeError):
    """`param` is the request's field, as OpenAI's error body names it."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RequestFailed(MTPServeError):
    pass


class EngineError(MTPServeError):
    pass


class EngineBusy(EngineError):
    pass


class QueueFull(EngineBusy):
    pass


class ShuttingDown(EngineBusy):
    def __init__(self, message: str = "the server is shutting down and takes no new requests") -> None:
        super().__init__(message)


class EngineDead(EngineError):
    pass
