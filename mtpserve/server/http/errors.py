"""Every error's way to HTTP: one place, one shape, OpenAI's `{"error": {"message", "type", "param",
"code"}}`. On Anthropic's routes it is Anthropic's too, which has `"type": "error"` beside it and other words
for the error's type.

Texts are cut and made printable here, so that no request can make a large, unencodable or line-breaking error
out of its input.
"""

from __future__ import annotations

import contextlib
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal
from urllib.parse import quote

from fastapi import FastAPI, Request, WebSocket
from fastapi.exceptions import RequestValidationError
from msgspec import UNSET, UnsetType
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from mtpserve.core.errors import (
    EngineBusy,
    EngineDead,
    InvalidRequest,
    MTPServeError,
    QueueFull,
    RequestFailed,
    ShuttingDown,
)
from mtpserve.server.http.redaction import redacted
from mtpserve.server.http.rendering import JSON, Rendered

MAX_ERRORS = 10
MAX_INPUT = 200
MAX_NAME = 80
MAX_MESSAGE = 4000
SHORT = reprlib.Repr()  # does not spell out eight megabytes in order to cut them
SHORT.maxstring = SHORT.maxother = MAX_INPUT
PLACES = ("body", "query", "path")  # FastAPI's, in front of a field's own
# pydantic's kinds of errors, and statuses of Starlette's own, in OpenAI's words.
CODES = {
    "json_invalid": "invalid_json",
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "kinds": "invalid_type",
}
STATUS_CODES = {
    400: "invalid_json",
    404: "not_found",
    405: "method_not_allowed",
    413: "request_too_large",
    415: "unsupported_encoding",
}
KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
ANTHROPICS = "/v1/messages"
ANTHROPICS_KINDS = {
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}
# By the field that is refused: with these, Anthropic's clients send the whole conversation instead of a
# thread's next message.
ANTHROPICS_DETAILS = {"thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}}
RETRY_AFTER = {"Retry-After": "1"}
# OpenAI's clients would ask twice again for what took too long already
NO_RETRY = {"x-should-retry": "false"}


class ModelNotFound(InvalidRequest):
    """→ 404"""


class ContextLengthExceeded(InvalidRequest):
    """→ 400 with the code by which clients recognise it"""


class NotStored(InvalidRequest):
    """→ 404, for a response that is not kept"""


class PreviousNotStored(InvalidRequest):
    """→ 400 with the code after which clients send the whole conversation, for a response that a request is
    to go on from"""


class Unsupported(InvalidRequest):
    """→ 400 with the code that OpenAI has for it"""


class DeadlineExceeded(RequestFailed):
    """→ 408"""


class ClientGone(Exception):
    """The client closed its connection."""


class ErrorObject(Rendered):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Rendered):
    error: ErrorObject


class AnthropicErrorObject(ErrorObject):
    details: dict[str, Any] | UnsetType = UNSET


class AnthropicError(Rendered):
    type: Literal["error"]
    error: AnthropicErrorObject


class Refusal(JSON):
    def __init__(self, status: int, body: ErrorAnswer, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(body, status, headers)
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        note(scope, self._body)
        if not scope["path"].startswith(ANTHROPICS):
            await super().__call__(scope, receive, send)
            return
        headers = {name: value for name, value in self.headers.items() if name != "content-length"}
        await JSON(anthropics(self.status_code, self._body), self.status_code, headers)(scope, receive, send)


def note(scope: Scope, body: ErrorAnswer) -> None:
    """Notes for the access log why a request failed, without what may be text of a prompt."""
    error = body.error
    names_models = error.code == "model_not_found"
    reason = error.message if error.type == "server_error" else redacted(error.message, names_models)
    scope.setdefault("state", {})["failure"] = printable(
        f"{error.type} {error.code or ''}: {reason}", MAX_INPUT
    )


def anthropics(status: int, body: ErrorAnswer) -> AnthropicError:
    error = body.error
    kind, details = ANTHROPICS_KINDS.get(status, error.type), ANTHROPICS_DETAILS.get(error.param or "", UNSET)
    return AnthropicError(
        "error", AnthropicErrorObject(error.message, kind, error.param, error.code, details)
    )


@contextlib.contextmanager
def renamed(names: dict[str, str]) -> Iterator[None]:
    """Errors name the fields, and parts of them, as a route's clients know them."""
    try:
        yield
    except InvalidRequest as error:
        if not names:
            raise
        pattern = "|".join(re.escape(name) for name in names)
        renamed_param = re.sub(
            rf"(?<!\w)(?:{pattern})(?!\w)", lambda match: names[match[0]], error.param or ""
        )
        if error.param is None or renamed_param == error.param:
            raise
        # not inside of an option's name, such as --max-logprobs
        message = re.sub(rf"(?<![\w-]){re.escape(error.param)}", lambda _: renamed_param, str(error))
        raise type(error)(message, renamed_param) from error


def printable(text: str, limit: int) -> str:
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def error_body(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> ErrorAnswer:
    kind = "server_error" if status >= 500 else KINDS.get(status, "invalid_request_error")
    param = None if param is None else printable(param, MAX_INPUT)
    return ErrorAnswer(ErrorObject(printable(message, MAX_MESSAGE), kind, param, code))


# The first that fits. An error of no such kind is a bug; its own text is not sent.
DESCRIBED: tuple[tuple[type[Exception], int, str], ...] = (
    (ModelNotFound, 404, "model_not_found"),
    (ContextLengthExceeded, 400, "context_length_exceeded"),
    (NotStored, 404, "response_not_found"),
    (PreviousNotStored, 400, "previous_response_not_found"),
    (Unsupported, 400, "unsupported_parameter"),
    (InvalidRequest, 400, "invalid_value"),
    (QueueFull, 429, "queue_full"),
    (ShuttingDown, 503, "shutting_down"),
    (EngineBusy, 503, "overloaded"),
    (EngineDead, 503, "engine_dead"),
    (DeadlineExceeded, 408, "deadline_exceeded"),
    (MTPServeError, 500, "request_failed"),
)


def describe(error: Exception) -> tuple[int, ErrorAnswer]:
    """Status and body."""
    for kind, status, code in DESCRIBED:
        if isinstance(error, kind):
            return status, error_body(status, str(error), param=getattr(error, "param", None), code=code)
    return 500, error_body(500, "internal error", code="internal_error")


def error_response(error: Exception) -> Response:
    status, body = describe(error)
    headers = (
        RETRY_AFTER if status in (429, 503) else NO_RETRY if isinstance(error, DeadlineExceeded) else None
    )
    return Refusal(status, body, headers)


def id_headers(id: str) -> dict[str, str]:
    """The request's id under the names that OpenAI's and Anthropic's clients read."""
    return {"x-request-id": id, "request-id": id}


def validation_message(errors: Sequence[Any]) -> tuple[str, str | None, str]:
    """pydantic's errors as one text, and the first one's field and code."""
    lines = []
    first: str | None = None
    for error in errors[:MAX_ERRORS]:
        loc = [printable(str(part), MAX_NAME) for part in error["loc"]]
        loc = loc[1:] if loc and loc[0] in PLACES else loc
        first = first if first is not None else (loc[0] if loc else None)
        match error["type"]:
            case "json_invalid":
                lines.append(
                    f"the body is not valid JSON: {error['ctx']['error']} at position {error['loc'][-1]}"
                )
            case "extra_forbidden":
                lines.append(f"{'.'.join(loc)}: unknown field")
            case _ if not loc:
                lines.append("the body must be a JSON object, sent with Content-Type: application/json")
            case "missing":
                lines.append(f"{'.'.join(loc)}: field required")
            case _:
                lines.append(
                    f"{'.'.join(loc)}: {error['msg']}, got {printable(SHORT.repr(error['input']), MAX_INPUT)}"
                )
    if len(errors) > MAX_ERRORS:
        lines.append(f"and {len(errors) - MAX_ERRORS} more")
    kind = errors[0]["type"]
    code = CODES.get(kind, "invalid_type" if kind.endswith("_type") else "invalid_value")
    return "; ".join(lines), None if kind == "json_invalid" else first, code


async def no_socket(socket: WebSocket) -> None:
    """Refuses a WebSocket at a path that serves none."""
    message = f"{socket.url.path}: no WebSocket is served here; /v1/responses is one"
    await Refusal(404, error_body(404, message, code="not_found"))(socket.scope, socket.receive, socket.send)


def existing_path(app: FastAPI, scope: Scope) -> str | None:
    """The route's path that a client with a wrong base URL means: one with slashes too many, or with `/v1`
    twice, missing, or where the route has none. None: there is no such route."""
    rest = "/".join(part for part in scope["path"].split("/") if part)
    while rest.startswith("v1/"):
        rest = rest.removeprefix("v1/")
    for path in (f"/v1/{rest}", f"/{rest}") if rest else ():
        moved = {**scope, "path": path}
        if path != scope["path"] and any(
            isinstance(route, Route) and route.matches(moved)[0] is not Match.NONE for route in app.routes
        ):
            return path
    return None


def add_error_handlers(app: FastAPI) -> None:
    async def failed(request: Request, error: Exception) -> Response:
        response = error_response(error)
        # a bug's answer does not pass RequestLog
        response.headers.update(id_headers(request.state.request_id))
        return response

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)

    async def validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        message, param, code = validation_message(error.errors())
        return Refusal(400, error_body(400, message, param=param, code=code))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        status, headers = error.status_code, error.headers
        if status == 404 and (path := existing_path(app, request.scope)) is not None:
            query = f"?{request.url.query}" if request.url.query else ""
            return RedirectResponse(f"{request.state.root}{quote(path)}{query}", 307)
        if status == 405:  # Starlette's own names the methods of one route, and a path may have several
            routes = [
                route
                for route in app.routes
                if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
            ]
            # Not those that have an id where this one has a name.
            routes = [route for route in routes if route.path == request.scope["path"]] or routes
            headers = {
                "Allow": ", ".join(sorted({method for route in routes for method in route.methods or ()}))
            }
        message = (
            f"{request.method} {request.url.path}: {error.detail}"
            if status in (404, 405)
            else str(error.detail)
        )
        return Refusal(
            status, error_body(status, message, code=STATUS_CODES.get(status, "invalid_request")), headers
        )

    app.add_exception_handler(MTPServeError, failed)
    app.add_exception_handler(ClientGone, gone)
    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, failed)
