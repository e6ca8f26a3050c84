"""What the front end and the engine process say to each other, as msgpack over ZeroMQ. Typed both ways; never
pickle.

The first message down is Start, answered by Started: both sockets are connected then, and the front end
removes their directory. Up come Ready or Fatal, then Events and Rejected, and Fatal at any time as the last
one.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from mtpserve.config import EngineConfig
from mtpserve.core.errors import ConfigError, EngineDead, InvalidRequest, LoadError, MTPServeError, QueueFull
from mtpserve.core.profile import ProfileChange, ProfileReport
from mtpserve.core.protocols.control import Calls, Reply
from mtpserve.core.request import ModelCard, Request, TokenEvent
from mtpserve.core.stats.engine_stats import EngineStats
from mtpserve.core.stats.reports import SpecChange, SpecReport


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all: an array whose first element is the class's name."""


class Start(Message, frozen=True):
    config: EngineConfig
    progress: bool  # draw progress bars on stderr
    log_level: str
    log_format: str = "text"


class Submit(Message, frozen=True):
    request: Request


class Join(Message, frozen=True):
    """A message to each engine that shares its experts, after one of them was given a request. Numbers rise:
    see ticks.py."""

    number: int


class Abort(Message, frozen=True):
    """Unknown ids are ignored: the request may have ended while the message was under way."""

    id: str


class ResetCache(Message, frozen=True):
    """Requests that are submitted after it find nothing in the prefix cache that was computed before."""


class SetSpec(Message, frozen=True):
    """Answered by Spec, in their order; a change of nothing only asks."""

    change: SpecChange


class Profile(Message, frozen=True):
    """Answered by Profiled, in their order."""

    change: ProfileChange


class Control(Message, frozen=True):
    """Answered by Controlled, in their order."""

    call: Calls


class Shutdown(Message, frozen=True):
    """End now, whatever runs. Draining is the front end's business: it stops submitting and waits for its
    streams."""


class Started(Message, frozen=True):
    """The process runs and builds the engine, which may take minutes."""


class Ready(Message, frozen=True):
    card: ModelCard


class Events(Message, frozen=True):
    """One step's events, or none: statistics alone, sent when the engine becomes idle."""

    events: list[TokenEvent]
    stats: EngineStats


class Spec(Message, frozen=True):
    report: SpecReport


class Silent(Message, frozen=True):
    """The process writes a trace or does what a call says until its next message, and gives no other sign of
    life: no thread goes on meanwhile."""


class Profiled(Message, frozen=True):
    report: ProfileReport


class Controlled(Message, frozen=True):
    reply: Reply


class Rejected(Message, frozen=True):
    """The answer to a Submit that the engine did not take."""

    id: str
    kind: Literal["invalid", "busy"]
    message: str
    param: str | None = None

    def error(self) -> MTPServeError:
        return InvalidRequest(self.message, self.param) if self.kind == "invalid" else QueueFull(self.message)


class Fatal(Message, frozen=True):
    """The engine process ends. One line, for the user."""

    kind: Literal["config", "load", "engine"]
    message: str

    def error(self) -> MTPServeError:
        return {"config": ConfigError, "load": LoadError, "engine": EngineDead}[self.kind](self.message)


Down = Start | Submit | Join | Abort | ResetCache | SetSpec | Profile | Control | Shutdown
Up = Started | Ready | Events | Spec | Silent | Profiled | Controlled | Rejected | Fatal

INBOX = "requests"  # names of the two sockets in the private directory
OUTBOX = "events"
PULSE_FILE = "pulse"  # beside them: see core/heartbeat.py


def endpoint(directory: str, name: str) -> str:
    return f"ipc://{directory}/{name}"
