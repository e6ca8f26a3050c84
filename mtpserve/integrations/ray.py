"""mtpserve under Ray Serve, which places replicas, scales them by their queues and replaces those that are
ill.

    serve run mtpserve.integrations.ray:app model=demo deployment='{"num_replicas": 2}'

or by a file for `serve deploy` (docs/deploy.md). A replica is one engine, or several with data_parallel_size,
and answers all of the server's routes. One whose engines are dead and are not started again ends its process
at once: it would answer errors fast and attract requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from mtpserve.cli.options import Settings
from mtpserve.config import EngineConfig
from mtpserve.core.errors import ConfigError
from mtpserve.integrations.engines import Engines, checked_settings, values_of

# Ray's proxy listens, and Ray drains.
RAYS = (
    "host", "port", "ssl_keyfile", "ssl_keyfile_password", "ssl_certfile", "ssl_ca_certs", "read_timeout",
    "write_timeout", "drain_timeout",
    "drain_delay",
)  # fmt: skip
# requests of one engine at which another replica is wanted, where --max-running-requests does not say
BUSY = 32


class Passed(Response):
    """Hands Ray's call on to an app."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__()
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


class ServedReplica:
    """Ray awaits its constructor and its destructor. A model that cannot be loaded is an error of the
    deployment."""

    async def __init__(self, settings: Settings) -> None:  # type: ignore[misc]
        self.engines = await Engines.start(settings)
        self.app = self.engines.app()
        self.watching = asyncio.create_task(self.engines.end_process("the replica"))

    async def __call__(self, request: Request) -> Response:
        return Passed(self.app)

    async def check_health(self) -> None:
        """Raises where no engine is up and none will be. An engine that is just started again is worth
        waiting for."""
        if (dead := self.engines.client.dead) is not None:
            raise RuntimeError(dead)

    async def __del__(self) -> None:
        if hasattr(self, "watching"):
            self.watching.cancel()
            with contextlib.suppress(Exception):
                await self.engines.stop()


def app(args: Mapping[str, Any]) -> Application:
    """Builds the app for `serve run` and `serve deploy`. `args`: options of `mtpserve launch`, and
    `deployment` with Ray's own, as a mapping or JSON. Raises ConfigError."""
    options = dict(args)
    overrides = options.pop("deployment", {})
    with contextlib.suppress(ValueError):
        overrides = json.loads(overrides) if isinstance(overrides, str) else overrides
    if not isinstance(overrides, Mapping):
        raise ConfigError(f"deployment must have options of Ray's deployments, as JSON, got {overrides!r}")
    settings = checked_settings(values_of(options), RAYS, "Ray's")
    gpus = float(ray.cluster_resources().get("GPU", 0)) if ray.is_initialized() else 0.0
    return serve.deployment(**deployment(settings.engine, overrides, gpus > 0))(ServedReplica).bind(settings)


def deployment(engine: EngineConfig, overrides: Mapping[str, Any], has_gpus: bool) -> dict[str, Any]:
    """Ray's options: `overrides`, and where it says nothing a GPU for each device of a replica, a health
    check every second, time for open streams when a replica is taken away, and, where replicas are to be
    scaled, the load at which another one is wanted."""
    parallel = engine.parallel
    busy = (engine.scheduler.max_running_requests or BUSY) * parallel.data_parallel_size
    options: dict[str, Any] = {
        "name": "mtpserve",
        "health_check_period_s": 1.0,
        "health_check_timeout_s": 10.0,
        "graceful_shutdown_timeout_s": 60.0,
        "max_ongoing_requests": 2 * busy,
    }
    if engine.model.device == "cuda" or (engine.model.device == "auto" and has_gpus):
        options["ray_actor_options"] = {"num_gpus": parallel.data_parallel_size * parallel.ranks}
    options |= overrides
    if isinstance(scaling := options.get("autoscaling_config"), Mapping):
        options["autoscaling_config"] = {"target_ongoing_requests": busy} | dict(scaling)
    return options
