"""What a request says of its prompt's pages, where prompts are computed by other nodes than the text after
them: in vLLM's fields, whose routers ask one node after the other, and in SGLang's, whose routers ask both at
once."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from pydantic import Field

from mtpserve.config import DisaggregationConfig
from mtpserve.core.errors import InvalidRequest
from mtpserve.core.kv_transfer import PageOffer, PageSource
from mtpserve.core.request import Request
from mtpserve.server.http.errors import Unsupported
from mtpserve.server.http.rendering import Rendered
from mtpserve.server.schema.base import Strict
from mtpserve.server.schema.fields import either
from mtpserve.server.schema.shapes import SERVER, Schema

Name = Annotated[str, Field(min_length=1, max_length=256)]
Port = Annotated[int, Field(ge=1, le=65535)]
Room = Annotated[int, Field(ge=0, lt=1 << 63)]
PARAMS = "kv_transfer_params"


class KVTransferParams(Strict):
    """A router sends `do_remote_decode` to the node that computes the prompt, and its answer's to the one
    that continues it. Fields that only vLLM's nodes need are left out."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    remote_engine_id: str | None = None
    remote_request_id: Name | None = None
    remote_host: Name | None = None
    remote_port: Port | None = None


class KVTransferAnswer(Rendered):
    """The same, as the node answers that has computed the prompt. `remote_block_ids` counts whole pages: they
    are found by their keys."""

    do_remote_prefill: bool
    do_remote_decode: bool
    remote_engine_id: str
    remote_request_id: str
    remote_block_ids: list[list[int]]
    remote_host: str
    remote_port: int
    tp_size: int


class TransferFields(Strict):
    """The fields of a generating route. Routers send lists for several prompts: the first entry counts and
    names the request."""

    rules: ClassVar[tuple[Schema, ...]] = ({SERVER: "role"},)

    kv_transfer_params: KVTransferParams | None = None
    bootstrap_host: Annotated[Name | list[Name] | None, either("a host, or a list of hosts")] = None
    bootstrap_port: Annotated[Port | list[Port | None] | None, either("a port, or a list of ports")] = None
    bootstrap_room: Annotated[
        Room | list[Room] | None, either("a number of at least 0, or a list of such")
    ] = None

    @property
    def keeps(self) -> bool:
        """vLLM's router asks for the prompt alone."""
        return self.kv_transfer_params is not None and bool(self.kv_transfer_params.do_remote_decode)


@dataclass(frozen=True, slots=True)
class Handover:
    """What becomes of the prompts' pages of one HTTP request: they are kept, or come from another node, or
    neither. `name`: of all of them, the same on both nodes."""

    name: str = ""
    keeps: bool = False
    source: PageSource | None = None

    def of(self, request: Request, prompt: int) -> Request:
        """The request of one of several prompts. If pages are kept, the other node computes the text, and
        this one computes one token."""
        lease = f"{self.name}/{prompt}"
        if self.source is not None:
            return replace(
                request, source=PageSource(self.source.host, self.source.port, lease, self.source.waits)
            )
        if not self.keeps:
            return request
        return replace(
            request, kv_offer_id=lease, sampling=replace(request.sampling, max_tokens=1, min_tokens=0)
        )


NOTHING = Handover()


def handover_of(body: TransferFields, config: DisaggregationConfig, engines: int) -> Handover:
    """`engines`: of this server. Raises InvalidRequest with the field, and Unsupported where this node takes
    no part in such a split."""
    params = body.kv_transfer_params
    has_params = params is not None and bool(params.do_remote_decode or params.do_remote_prefill)
    if not has_params and body.bootstrap_room is None:
        return NOTHING
    field = PARAMS if has_params else "bootstrap_room"
    if has_params and body.bootstrap_room is not None:
        raise InvalidRequest(
            f"{PARAMS} and bootstrap_room say the same thing: give one of them", "bootstrap_room"
        )
    if config.role is None:
        raise Unsupported(f"{field} needs a server with --disaggregation-mode: leave it out", field)
    return _by_room(body, config, engines) if params is None or not has_params else _by_params(params, config)


def _by_params(params: KVTransferParams, config: DisaggregationConfig) -> Handover:
    if params.do_remote_decode and params.do_remote_prefill:
        raise InvalidRequest(
            f"{PARAMS} has both do_remote_decode and do_remote_prefill: give one of them", PARAMS
        )
    if params.do_remote_decode:
        if not config.keeps:
            raise InvalidRequest(
                f"{PARAMS}.do_remote_decode needs a node with --disaggregation-mode prefill", PARAMS
            )
        return Handover(uuid.uuid4().hex, keeps=True)
    if not config.pulls:
        raise InvalidRequest(
            f"{PARAMS}.do_remote_prefill needs a node with --disaggregation-mode decode", PARAMS
        )
    host, port, name = params.remote_host, params.remote_port, params.remote_request_id
    if host is None or port is None or name is None:
        fields = {"remote_host": host, "remote_port": port, "remote_request_id": name}
        missing = ", ".join(field for field, value in fields.items() if value is None)
        raise InvalidRequest(f"{PARAMS}: {missing} is missing: it is in the prefill node's answer", PARAMS)
    return Handover(name, source=PageSource(_trusted(config, host, PARAMS), port, ""))


def _by_room(body: TransferFields, config: DisaggregationConfig, engines: int) -> Handover:
    room, host, port = _first(body.bootstrap_room), _first(body.bootstrap_host), _first(body.bootstrap_port)
    if config.role == "both":
        raise InvalidRequest(
            "bootstrap_room needs a node with --disaggregation-mode prefill or decode", "bootstrap_room"
        )
    name = f"room {room}"
    if config.role == "prefill":
        if engines > 1:  # a decode node is told one port
            raise InvalidRequest(
                "bootstrap_room needs a prefill node with --data-parallel-size 1", "bootstrap_room"
            )
        return Handover(name, keeps=True)
    if host is None:
        raise InvalidRequest("bootstrap_host is missing: it is that of the prefill node", "bootstrap_host")
    port = config.port(0) if port is None else port
    return Handover(name, source=PageSource(_trusted(config, host, "bootstrap_host"), port, "", waits=True))


def _first(value: Any) -> Any:
    return (value[0] if value else None) if isinstance(value, list) else value


def _trusted(config: DisaggregationConfig, host: str, field: str) -> str:
    """Whoever names a host here decides what others find in the prefix cache."""
    if not config.trusts(host):
        allowed = ", ".join(config.disaggregation_peers)
        raise InvalidRequest(
            f"{field}: pages come from --disaggregation-peers {allowed}, got {host!r}", field
        )
    return host


def kv_transfer_fields(offer: PageOffer | None) -> dict[str, Any]:
    """The answer's field, of the first choice: the others' pages have the same name. Empty where none were
    kept."""
    if offer is None:
        return {}
    name = offer.lease.rpartition("/")[0]
    pages = [list(range(offer.columns))]
    return {PARAMS: KVTransferAnswer(True, False, offer.engine, name, pages, offer.host, offer.port, 1)}
