"""What `--kv-events-config` says: how events of the prefix cache are published. The fields are vLLM's; SGLang
has most of them, too."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Literal

import msgspec

from mtpserve.config.options import check
from mtpserve.core.errors import ConfigError

Count = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]
Endpoint = Annotated[str, msgspec.Meta(pattern=r"^(ipc://.+|tcp://.+:(\*|\d{1,5}))$")]
ALLOWED = {
    "enable_kv_cache_events": "true or false", "publisher": "zmq or null", "topic": "text",
    "endpoint": "like tcp://host:5557 or ipc://path", "replay_endpoint": "like tcp://host:5558 or ipc://path",
}  # fmt: skip


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens in the events are those of prompts and outputs, so it listens on this machine alone where no
    endpoint is given; vLLM's default is tcp://*:5557."""

    enable_kv_cache_events: bool = True
    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: Endpoint = "tcp://127.0.0.1:5557"  # others are connected to, see `listens`
    replay_endpoint: Endpoint | None = None  # always listens
    buffer_steps: Count = 10_000  # batches that can be asked for again
    hwm: Count = 100_000  # batches that wait for one subscriber; of more it gets none
    max_queue_size: Count = 100_000  # batches that wait to be published; more are dropped
    topic: str = ""

    def of(self, engine: int) -> KVEventsConfig:
        """Each of several engines has ports of its own, the first one's and those after it, as in vLLM."""
        replay = None if self.replay_endpoint is None else moved(self.replay_endpoint, engine)
        return msgspec.structs.replace(self, endpoint=moved(self.endpoint, engine), replay_endpoint=replay)

    @property
    def on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"


def parse(text: str) -> KVEventsConfig:
    """Raises ConfigError."""
    try:
        values = msgspec.json.decode(text)
    except msgspec.DecodeError:
        values = None
    check(isinstance(values, dict), "kv_events_config", text, "a JSON object")
    fields = {field.name: field.type for field in msgspec.structs.fields(KVEventsConfig)}
    for name, value in values.items():
        if name not in fields:
            raise ConfigError(f"unknown key {name!r} in --kv-events-config; accepted: {', '.join(fields)}")
        try:
            msgspec.convert(value, fields[name])
        except msgspec.ValidationError as error:
            allowed = ALLOWED.get(name, "a number of at least 1")
            raise ConfigError(f"--kv-events-config: {name} must be {allowed}, got {value!r}") from error
    return KVEventsConfig(**values)


def moved(endpoint: str, engine: int) -> str:
    """A port that is to be found stays so, and nothing is done for the first engine."""
    if engine == 0:
        return endpoint
    if endpoint.startswith("ipc://"):
        return f"{endpoint}.{engine}"
    host, _, port = endpoint.rpartition(":")
    if port in ("*", "0"):
        return endpoint
    check(
        int(port) + engine < 65536,
        "kv_events_config",
        endpoint,
        "an endpoint such that the following ports, one per engine, are below 65536",
    )
    return f"{host}:{int(port) + engine}"


def listens(endpoint: str) -> bool:
    """True if the endpoint is listened on. As in vLLM these are endpoints with * or ::, or in the file
    system; another machine's is connected to. Unlike there, this machine's own loopback addresses are
    listened on."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://") or is_local(endpoint)


def is_local(endpoint: str) -> bool:
    """True if only this machine's processes reach it."""
    host = re.fullmatch(r"tcp://\[?(.+?)\]?:[^:]*", endpoint)
    try:
        return host is None or host[1] == "localhost" or ipaddress.ip_address(host[1]).is_loopback
    except ValueError:
        return False
