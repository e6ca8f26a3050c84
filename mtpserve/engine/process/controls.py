"""What a process does with operators' calls (core/protocols/control.py). Parts that can do something register
it; the engine's process asks its other ranks to do the same."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from mtpserve.core.errors import ConfigError, InvalidRequest, LoadError
from mtpserve.core.protocols.control import Call, Reply

log = logging.getLogger(__name__)

Handler = Callable[[Any], Reply]  # its argument is of the class that it is registered for


class Controls:
    """The handlers of one process, by the class of call. They may raise InvalidRequest, ConfigError and
    LoadError, which become the caller's errors."""

    def __init__(self) -> None:
        self._handlers: dict[type[Call], Handler] = {}

    def add(self, kind: type[Call], handler: Handler) -> None:
        assert kind not in self._handlers
        self._handlers[kind] = handler

    def take(self, call: Call) -> Reply:
        """Raises EngineDead alone: any other error harms nobody but the caller."""
        handler = self._handlers.get(type(call))
        if handler is None:
            return Reply(f"this engine does not support the call {type(call).__name__}")
        try:
            return handler(call)
        except InvalidRequest as error:
            return Reply(str(error), param=error.param)
        except (ConfigError, LoadError) as error:
            return Reply(str(error))
        except Exception as error:
            from mtpserve.engine.faults import require_device  # it imports torch

            require_device(error)
            log.exception("the call %s failed", type(call).__name__)
            return Reply(f"{type(call).__name__} failed: {type(error).__name__}: {error}", "failed")
