"""Keys, request ids and the access log. Plain ASGI around the app; knows no route's body.

Every path needs the key, also one without a route, except those of OPEN. What the log says of a request is
the client's address and port, its method, path, status and duration: never its headers, query or body. Of a
refused request it has the error, without texts of users (redaction.py).
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mtpserve.config import ServerConfig
from mtpserve.core.errors import ConfigError
from mtpserve.core.logs import REQUEST_ID as LOGGED_ID
from mtpserve.server.http.errors import Refusal, error_body, id_headers, printable
from mtpserve.server.http.warnings import WARNINGS, add_warnings

log = logging.getLogger(__name__)

PROBES = frozenset({"/health", "/ready", "/ping"})  # for load balancers
OPEN = PROBES | {"/", "/docs"}  # pages ask for the key, and send it with what they ask
MANAGEMENT = frozenset(
    {
        *("/abort_request", "/flush_cache", "/reset_prefix_cache", "/start_profile", "/stop_profile"),
        *("/update_weights_from_disk", "/update_weights_from_tensor", "/update_weights_from_distributed"),
        *("/init_weights_update_group", "/destroy_weights_update_group", "/update_weight_version"),
        *("/load_lora_adapter", "/unload_lora_adapter"),
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
        *("/get_weights_by_name", "/weights_checker"),
        *("/pause_generation", "/continue_generation", "/pause", "/resume", "/sleep", "/wake_up"),
        *("/release_memory_occupation", "/resume_memory_occupation"),
    }
)
CHANGED = frozenset({"/v1/spec"})  # these too, where they are not only read
# asked every few seconds: in the debug log alone
QUIET = PROBES | {"/metrics", "/stats", "/stats/history", "/stats/requests"} | CHANGED
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
MAX_LOGGED = 200
Count = Callable[[str, str, int], None]
SWITCHED = 101  # the status of an accepted WebSocket


def with_keys(config: ServerConfig) -> ServerConfig:
    """The configuration with the keys that its files name, one a line. Raises ConfigError, without a key in
    it."""
    return replace(
        config,
        api_key=(*config.api_key, *keys_in(config.api_key_file, "api-key-file")),
        admin_api_key=(*config.admin_api_key, *keys_in(config.admin_api_key_file, "admin-api-key-file")),
        api_key_file=None,
        admin_api_key_file=None,
    )


def keys_in(file: str | None, option: str) -> list[str]:
    if file is None:
        return []
    try:
        keys = Path(file).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--{option} {file}: {getattr(error, 'strerror', None) or 'not text'}") from error
    if not keys:
        raise ConfigError(f"--{option} {file}: holds no key")
    return keys


def digest(key: bytes) -> bytes:
    """Digests have one length, whatever was sent."""
    return hashlib.sha256(key).digest()


class Keys:
    """ASGI middleware: 401 without a key that fits, 403 for a management route without the admin's.

    The admin's key opens everything. Without one, the ordinary keys open the management routes too.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str], admin_keys: Iterable[str]) -> None:
        self.app = app
        self.keys = [digest(key.encode()) for key in keys]
        self.admin_keys = [digest(key.encode()) for key in admin_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] in ("http", "websocket") else None
        await (self.app if refusal is None else refusal)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Refusal | None:
        path: str = scope["path"]
        if not path.isprintable():  # a route's pattern also matches in front of a final line break
            return Refusal(404, error_body(404, f"{method_of(scope)} {path}: Not Found", code="not_found"))
        digests = [digest(key) for key in credentials(Headers(scope=scope))]
        is_admin, is_known = fits(digests, self.admin_keys), fits(digests, self.keys)
        if path in OPEN or is_admin:
            return None
        if self.keys and not is_known:
            message = "a key is needed: send Authorization: Bearer KEY, or X-Api-Key: KEY"
            return Refusal(
                401, error_body(401, message, code="invalid_api_key"), {"WWW-Authenticate": "Bearer"}
            )
        if self.admin_keys and path in (MANAGEMENT | CHANGED if method_of(scope) == "POST" else MANAGEMENT):
            return Refusal(403, error_body(403, f"{path} needs the admin's key", code="admin_key_required"))
        return None


def method_of(scope: Scope) -> str:
    """What the log calls it; a WebSocket is opened by a GET."""
    return "WEBSOCKET" if scope["type"] == "websocket" else str(scope["method"])


class SocketOrigins:
    """ASGI middleware: 403 for a WebSocket that another site's page opens. Browsers do not ask first, as they
    do for other requests.

    `allowed`: origins, or "*" for all; what is no browser sends no origin.
    """

    def __init__(self, app: ASGIApp, allowed: Iterable[str]) -> None:
        self.app = app
        self.allowed = frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket" or self._allows(Headers(scope=scope)):
            await self.app(scope, receive, send)
            return
        message = "this page's origin may open no WebSocket here: see --allowed-origins"
        await Refusal(403, error_body(403, message, code="origin_not_allowed"))(scope, receive, send)

    def _allows(self, headers: Headers) -> bool:
        origin = headers.get("origin")
        if origin is None or origin in self.allowed or "*" in self.allowed:
            return True
        return origin.partition("://")[2].lower() == headers.get("host", "").lower()


def credentials(headers: Headers) -> list[bytes]:
    """OpenAI's clients send the key as Bearer, Anthropic's as X-Api-Key. Some send both, one of them empty or
    a dummy: any may be the right one."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    bearer = key.strip() if scheme.lower() == "bearer" else ""
    return [sent.encode("latin-1") for sent in (bearer, headers.get("x-api-key", "")) if sent]


def fits(digests: list[bytes], keys: list[bytes]) -> bool:
    """Takes as long for the first key as for the last, and as long for a near miss as for a wild guess."""
    return sum(hmac.compare_digest(sent, key) for sent in digests for key in keys) > 0


class RootPath:
    """ASGI middleware: takes the path under which a proxy, or an app that this one is mounted in, offers the
    server off the requests' paths, where it is still there. Keys, log and routes then see the same path."""

    def __init__(self, app: ASGIApp, root: str) -> None:
        self.app, self.root = app, root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            root, path = (self.root or scope.get("root_path", "")).rstrip("/"), scope["path"]
            if root and f"{path}/".startswith(f"{root}/"):
                path = path[len(root) :] or "/"
            scope.update(path=path, root_path="")  # in place: the handler of bugs is outside of this
            scope.setdefault("state", {})["root"] = root  # for redirects
        await self.app(scope, receive, send)


class RequestLog:
    """ASGI middleware: X-Request-Id in, or a new one, and out again, as Anthropic's `request-id` too; a line
    in the log for each request."""

    def __init__(self, app: ASGIApp, count: Count = lambda route, method, status: None) -> None:
        """`count`: called when a request has ended, with its route's path ("": none), method and status."""
        self.app, self._count = app, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        start, status = perf_counter(), 500
        header_id = Headers(scope=scope).get("x-request-id", "")
        id = header_id if REQUEST_ID.fullmatch(header_id) else uuid.uuid4().hex
        # for the handler of bugs, whose answer does not pass here
        scope.setdefault("state", {})["request_id"] = id
        warnings: list[str] = []
        WARNINGS.set(warnings)
        LOGGED_ID.set(id)

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] in (
                "http.response.start",
                "websocket.http.response.start",
                "websocket.accept",
            ):
                status = message.get("status", SWITCHED)
                message.setdefault("headers", [])
                headers = MutableHeaders(scope=message)
                headers.update(id_headers(id))
                add_warnings(headers, warnings)
            await send(message)

        try:
            await self.app(scope, receive, named)
        finally:
            self._count(getattr(scope.get("route"), "path", ""), method_of(scope), status)
            log_access(scope, status, perf_counter() - start, id)


def log_access(scope: Scope, status: int, seconds: float, id: str) -> None:
    """The line of one request; what is asked every few seconds has it in the debug log alone."""
    method = method_of(scope)
    level = logging.DEBUG if scope["path"] in QUIET and method != "POST" else logging.INFO
    path = printable(scope["path"], MAX_LOGGED)
    failure = scope["state"].get("failure", "")
    fields = {
        "client": client_of(scope),
        "method": method,
        "path": path,
        "status": status,
        "seconds": round(seconds, 6),
    }
    if failure:
        fields["failure"] = failure
    values = (client_of(scope), method, path, status, seconds, id, f" {failure}" if failure else "")
    log.log(level, "%s %s %s %d %.3f s %s%s", *values, extra=fields)


def client_of(scope: Scope) -> str:
    """Address and port; an IPv6 address is in brackets. "-": a transport that has none."""
    if not scope.get("client"):
        return "-"
    host, port = scope["client"]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
