"""`serve()`: the port, the engine process, the HTTP server, and their end. Wires the parts together and holds
no request logic.

The port comes first: it is taken and answers 503 while the model loads, so that a second server fails at once
and a load balancer sees what is going on. How it ends:

    a signal while it loads   at once, one line                                                → 130 or 143
    first SIGTERM or SIGINT   after `drain_delay` seconds, in which /health alone says 503, new
                              requests get 503, running ones have `drain_timeout` seconds      → 0
    second one                stop at once                                                     → 0
    the engine process dies   open requests end with an error, /health says 503 for a moment   → 1
    it cannot start           one line                                                         → 1
    a wrong configuration     one line                                                         → 2
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

import uvicorn
import uvloop
from starlette.types import ASGIApp, Receive, Scope, Send

from mtpserve import __version__
from mtpserve.config import EngineConfig, ModelConfig, ServerConfig
from mtpserve.core.errors import ConfigError, EngineBusy, MTPServeError
from mtpserve.core.logs import configure
from mtpserve.engine.process.engines import engines_of, meetings_of
from mtpserve.engine.process.process import DEFAULT_FACTORY
from mtpserve.engine.process.replicas import Replicas
from mtpserve.server.http.access import with_keys
from mtpserve.server.http.errors import error_response
from mtpserve.server.http.limits import BoundedHTTP, BoundedSocket
from mtpserve.server.observe.report import report
from mtpserve.server.observe.tracing import require_tracing
from mtpserve.server.page.page import page_response

if TYPE_CHECKING:
    from mtpserve.server.chat.service import Service
    from mtpserve.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Fetch = Callable[[EngineConfig], EngineConfig]

ENGINE_S = 2.0  # for the engine's process to finish its step
PING_S = 20.0  # between pings of a WebSocket
CLOSE_S = 1  # for connections to write what they have when the server ends
LAST_HEALTH_S = 1.0  # how long /health answers 503 after the engine's death


class Gate:
    """The ASGI app that the port answers with: 503 until the real one is there, to a browser as the page that
    waits for it."""

    def __init__(self, root_path: str) -> None:
        self.app: ASGIApp | None = None
        self._pages = ("/", f"{root_path}/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.app is not None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http" and scope["method"] == "GET" and scope["path"] in self._pages:
            await page_response(503)(scope, receive, send)
        elif scope["type"] in ("http", "websocket"):
            await error_response(EngineBusy("the model is loading"))(scope, receive, send)


class HTTPServer(uvicorn.Server):
    """uvicorn without its signal handlers, which would end the engine's requests instead of draining them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Signals:
    """Counts SIGINT and SIGTERM; `first` and `second` may be awaited. `exit_code` is a shell's for a process
    that the first one has ended."""

    def __init__(self) -> None:
        self.first, self.second, self.exit_code = asyncio.Event(), asyncio.Event(), 0
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._count, number)

    def _count(self, number: int) -> None:
        self.exit_code = self.exit_code or 128 + number
        (self.second if self.first.is_set() else self.first).set()


def serve(
    engine_config: EngineConfig,
    server: ServerConfig,
    *,
    fetch: Fetch = lambda config: config,
    factory: str = DEFAULT_FACTORY,
) -> int:
    """Blocks until the server ends; returns the exit code. Raises MTPServeError, one line, when it cannot
    start.

    `fetch` downloads what the configuration names by an id, when the port is taken; `factory` names the
    function that builds the engine.
    """
    configure(server.log_level, server.log_format)
    for library in ("uvicorn", "httpx", "httpx2"):  # the hub's library logs its every request
        logging.getLogger(library).setLevel(logging.WARNING)
    server = with_keys(server)
    require_tracing(server)  # before a model is loaded
    if not (server.api_key or server.ssl_ca_certs or is_loopback(server.host)):
        log.warning(
            (
                "listening on %s without an API key: everyone who can reach this address can use the server; "
                "see --api-key-file"
            ),
            server.host,
        )
    with (
        listen(server.host, server.port) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(Launch(fetch(engine_config), server, factory).run(listener))


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        why = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise MTPServeError(f"cannot listen on {host} port {port}: {why}") from error


class Launch:
    """One run of the server."""

    def __init__(self, engine_config: EngineConfig, server: ServerConfig, factory: str) -> None:
        self.engine_config = engine_config
        self.server = server
        self.factory = factory
        self.gate = Gate(server.root_path)
        self.began = monotonic()
        self.http = self._uvicorn_config()

    async def run(self, listener: socket.socket) -> int:
        signals = Signals()
        log_model(self.engine_config.model)
        progress = sys.stderr.isatty() and self.server.log_format == "text"
        meetings = meetings_of(self.engine_config)
        client = engines_of(
            self.engine_config,
            meetings,
            self.factory,
            progress=progress,
            log_level=self.server.log_level,
            log_format=self.server.log_format,
        )
        http = HTTPServer(self.http)
        serving = asyncio.create_task(http.serve(sockets=[listener]))
        grace = 0.0
        try:
            service = await self._start(client, signals)
            if service is None:
                log.warning("stopped while loading")
                return signals.exit_code
            grace = ENGINE_S
            announce(listener, service, monotonic() - self.began)
            return await self._until_the_end(client, signals, service)
        finally:
            await client.stop(grace=0 if signals.second.is_set() else grace)
            if meetings is not None:
                meetings.cleanup()
            http.should_exit = True
            await serving

    def _uvicorn_config(self) -> uvicorn.Config:
        server = self.server
        timed = partial(BoundedHTTP, read_timeout=server.read_timeout, write_timeout=server.write_timeout)
        config = uvicorn.Config(
            self.gate,
            http=timed,  # type: ignore[arg-type]
            ssl_keyfile=server.ssl_keyfile,
            ssl_keyfile_password=server.ssl_keyfile_password,
            ssl_certfile=server.ssl_certfile,
            ssl_ca_certs=server.ssl_ca_certs,
            ssl_cert_reqs=ssl.CERT_NONE if server.ssl_ca_certs is None else ssl.CERT_REQUIRED,
            ws=partial(BoundedSocket, write_timeout=server.write_timeout),  # type: ignore[arg-type]
            ws_max_size=server.max_request_bytes,
            ws_ping_interval=PING_S,
            ws_ping_timeout=server.read_timeout,
            ws_per_message_deflate=False,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # any client may send them: the log shows the address that connected
            # longer than clients keep idle connections, or they would send into a closing one
            timeout_keep_alive=60,
            timeout_graceful_shutdown=CLOSE_S,
        )
        try:
            config.load()
        except OSError as error:  # ssl's own among them
            raise ConfigError(
                f"--ssl-certfile {server.ssl_certfile}, --ssl-keyfile {server.ssl_keyfile}: {error}"
            ) from error
        return config

    async def _start(self, client: Replicas, signals: Signals) -> Service | None:
        """The tokenizer loads while the engine does, and the first failure ends both. None: a signal came
        first."""
        loading = asyncio.gather(client.start(), asyncio.to_thread(load_tokenizer, self.engine_config.model))
        if await first(loading, signals.first.wait()) == 1:
            # asyncio logs a traceback for a cancelled gather that nobody awaits
            await asyncio.gather(loading, return_exceptions=True)
            return None
        _, tokenizer = await loading
        # at once now: it imports what the tokenizer's thread has imported
        from mtpserve.server.app import create_app

        self.gate.app = app = create_app(client, tokenizer, self.engine_config, self.server)
        service: Service = app.state.service
        return service

    async def _until_the_end(self, client: Replicas, signals: Signals, service: Service) -> int:
        reporting = asyncio.create_task(
            report(client.stats, self.server.log_interval, client.card.synthetic_acceptance)
        )
        keeping = asyncio.create_task(service.history.keep())
        try:
            signalled = await first(client.wait_dead(), signals.first.wait()) == 1
            if (
                signalled
                and await first(client.wait_dead(), self._drained(client, service), signals.second.wait()) > 0
            ):
                service.draining = True  # whoever asks from here on
                return 0
            await asyncio.sleep(LAST_HEALTH_S)
            return 1
        finally:
            reporting.cancel()
            keeping.cancel()
            if service.tracing is not None:
                await asyncio.to_thread(service.tracing.close)

    async def _drained(self, client: Replicas, service: Service) -> None:
        """Routers are told first: they ask /health every few seconds, and until then send a request again to
        where it was refused."""
        delay, timeout = self.server.drain_delay, self.server.drain_timeout
        if delay > 0:
            log.info(
                "shutdown in %g s: /health answers 503, new requests are still accepted; a second "
                "signal stops at once",
                delay,
            )
            service.leaving = True
            await asyncio.sleep(delay)
        service.draining = True
        if client.requests == 0:
            log.info("shutting down: no requests are running")
            return
        log.info(
            "draining: running requests: %d, time limit: %g s; a second signal stops at once",
            client.requests,
            timeout,
        )
        await client.drain(timeout)


def load_tokenizer(model: ModelConfig) -> Tokenizer:
    # Not at the top: transformers takes a second to import, in which the engine's process can start already.
    from mtpserve.text.tokenizer import tokenizer_of

    return tokenizer_of(model)


def log_model(model: ModelConfig) -> None:
    name, path = model.names[0], str(model.directory)
    log.info("mtpserve %s: model %s%s", __version__, name, "" if name == path else f" ({path})")


def announce(listener: socket.socket, service: Service, seconds: float) -> None:
    """Prints the address, and a command that works: for a chat where the model has a chat template. A log in
    JSON has both as fields of one line."""
    host, port = listener.getsockname()[:2]
    server = service.server_config
    scheme = "https" if server.ssl_certfile else "http"
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    body: dict[str, Any] = {
        "model": service.model,
        "max_tokens": min(64, service.client.card.context_length // 2),
    }
    if service.tokenizer.has_chat_template:
        route, body["messages"] = "chat/completions", [{"role": "user", "content": "Who are you?"}]
    else:
        route, body["prompt"] = "completions", "import os\n"
    key = ' -H "Authorization: Bearer $API_KEY"' if server.api_key else ""
    curl = f"curl {url}/v1/{route} -H 'Content-Type: application/json'{key} -d '{json.dumps(body)}'"
    if server.log_format == "json":
        fields = {"url": url, "seconds": round(seconds, 1), "curl": curl}
        log.info("mtpserve is ready: %s", url, extra=fields)
        return
    print(
        f"mtpserve is ready: {url} (after {seconds:.1f} s; open it in a browser, or send a request)\n"
        f"  {curl}",
        flush=True,
    )


async def first(*works: Awaitable[Any]) -> int:
    """Returns the number of the awaitable that ended first, and cancels the others. If several ended, the
    leftmost counts."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(i for i, task in enumerate(tasks) if task.done())
    finally:
        for task in tasks:
            task.cancel()
