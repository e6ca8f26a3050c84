"""What server/http/limits.py and server/launch.py override of uvicorn is there in the installed version, and the pinned one is allowed."""

from __future__ import annotations

import asyncio
import inspect
import re
import tomllib

import uvicorn
from packaging.requirements import Requirement
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

from mtpserve.server.http.limits import BoundedHTTP, BoundedSocket
from tests.house.tree import ROOT

# Called by uvicorn, by asyncio or, by their names, by httptools.
OVERRIDDEN = {
    "connection_made", "connection_lost", "data_received", "pause_writing", "resume_writing", "on_message_begin", "on_headers_complete",
    "on_message_complete", "send_400_response", "handle_websocket_upgrade",
}  # fmt: skip


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_uvicorn_has_the_methods_that_are_overridden() -> None:
    assert {name for name, value in vars(BoundedHTTP).items() if callable(value) and not name.startswith("_")} == OVERRIDDEN
    for name in OVERRIDDEN:
        assert parameters(getattr(BoundedHTTP, name)) == parameters(vars(HttpToolsProtocol)[name]), name
    assert "send_400_response" in inspect.getsource(HttpToolsProtocol.data_received), "for bytes that are not HTTP"
    assert not {name for name in vars(BoundedHTTP) if name.startswith("_") and not name.startswith("__")} & set(dir(HttpToolsProtocol))
    assert parameters(uvicorn.Server.capture_signals) == ["self"]


def test_uvicorn_has_the_methods_of_a_websocket_that_are_overridden() -> None:
    overridden = {name for name, value in vars(BoundedSocket).items() if callable(value) and not name.startswith("_")}
    assert overridden == {"pause_writing", "resume_writing", "connection_lost"}
    for name in overridden:
        assert parameters(getattr(BoundedSocket, name)) == parameters(vars(WebSocketsSansIOProtocol)[name]), name
    assert not {name for name in vars(BoundedSocket) if name.startswith("_") and not name.startswith("__")} & set(
        dir(WebSocketsSansIOProtocol)
    )
    made = inspect.getsource(WebSocketsSansIOProtocol.__init__)
    assert all(f"self.{name}" in made for name in ("loop", "client", "transport"))


def test_uvicorn_has_the_attributes_that_are_read() -> None:
    async def made() -> HttpToolsProtocol:
        config = uvicorn.Config(lambda: None, log_config=None, lifespan="off")  # type: ignore[arg-type]
        return HttpToolsProtocol(config, ServerState(), {})

    own = set(re.findall(r"self\.(_\w+)", inspect.getsource(BoundedHTTP)))
    protocol = asyncio.run(made())
    assert protocol.cycle is None and protocol.client is None and protocol.transport is None
    assert protocol.loop is not None
    made = inspect.getsource(RequestResponseCycle.__init__)
    assert all(f"self.{name}" in made for name in ("response_complete", "chunked_encoding", "expected_content_length"))
    assert "self.send" in inspect.getsource(RequestResponseCycle.run_asgi), "it may be another one"
    assert not own & vars(protocol).keys(), "names of our own"


def test_the_bound_includes_what_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (needed,) = [each for each in map(Requirement, project["dependencies"]) if each.name == "uvicorn"]
    (pinned,) = re.findall(r"^uvicorn==(.*)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned in needed.specifier and "1.0" not in needed.specifier
