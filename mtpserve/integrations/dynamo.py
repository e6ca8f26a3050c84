"""mtpserve as a worker of NVIDIA Dynamo, whose frontend tokenizes, routes by load and by KV events, and lets
cut streams go on elsewhere.

    python -m mtpserve.integrations.dynamo --model demo --discovery-backend file

An engine that is dead and is not started again ends the process at once: Dynamo then sends its requests, with
what they have said so far, to another worker (`--migration-limit` of its frontend). There they are new
requests: see docs/deploy.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from argparse import Namespace
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from time import perf_counter
from typing import Any

from dynamo.common.backend.engine import EngineConfig as Registration, LLMEngine, LlmRegistration
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.metrics import register_engine_registry
from dynamo.common.backend.publisher import ComponentSnapshot, KvEventSource, ZmqSource
from dynamo.common.backend.run import run
from dynamo.common.backend.worker import WorkerConfig
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument, Unknown, WorkerUnavailable

from mtpserve.cli.launch import parser
from mtpserve.cli.options import Settings, parsed_values
from mtpserve.config.kv_events import KVEventsConfig
from mtpserve.core.errors import ConfigError, EngineBusy, EngineDead, InvalidRequest, MTPServeError
from mtpserve.core.request import TokenLogprob
from mtpserve.engine.process.replicas import Replicas
from mtpserve.integrations.engines import Engines, checked_settings
from mtpserve.integrations.preprocessed import HEADER, body_of, chunk_of, last_of
from mtpserve.server.chat.generation import Choice, Generation, requests_of
from mtpserve.server.chat.service import Service
from mtpserve.server.openai.usage import Usage

# Its frontend listens, and it drains.
DYNAMOS = (
    "host",
    "port",
    "ssl_keyfile",
    "ssl_certfile",
    "ssl_ca_certs",
    "api_key",
    "admin_api_key",
    "drain_timeout",
    "drain_delay",
)
NAMES = {
    "namespace": "dynamo",
    "component": "backend",
    "endpoint": "generate",
    "endpoint-types": "chat,completions",
}
SNAPSHOT_S = 0.5


def options(argv: Sequence[str]) -> tuple[Settings, Namespace]:
    """Ours, and those of Dynamo's workers under their names. Raises ConfigError."""
    arg_parser = parser()
    arg_parser.prog, arg_parser.description = (
        "python -m mtpserve.integrations.dynamo",
        "Serve a model as a worker of NVIDIA Dynamo.",
    )
    group = arg_parser.add_argument_group("Dynamo's options")
    for name, default in NAMES.items():
        group.add_argument(f"--{name}", default=default)
    group.add_argument(
        "--discovery-backend",
        default=os.environ.get("DYN_DISCOVERY_BACKEND", "etcd"),
        help="etcd, kubernetes, file or mem",
    )
    group.add_argument("--request-plane", default=os.environ.get("DYN_REQUEST_PLANE", "tcp"))
    group.add_argument("--event-plane", default=os.environ.get("DYN_EVENT_PLANE"), help="nats or zmq")
    for name in ("tool-call-parser", "reasoning-parser"):
        group.add_argument(f"--dyn-{name}", help="one of Dynamo's: its frontend reads the text")
    parsed = arg_parser.parse(argv)
    settings = checked_settings(parsed_values(parsed), DYNAMOS, "Dynamo's")
    if settings.engine.parallel.data_parallel_size > 1:
        raise ConfigError(
            "--data-parallel-size must be 1 under Dynamo: start a worker for each engine, and its "
            "router chooses among them"
        )
    return with_events(settings), parsed


def with_events(settings: Settings) -> Settings:
    """KV events on a free port of this machine, where nothing is said of them."""
    engine = settings.engine
    if engine.cache.kv_events_config is not None or engine.cache.disable_radix_cache:
        return settings
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    cache = replace(engine.cache, kv_events_config=json.dumps({"endpoint": endpoint}))
    return Settings(replace(engine, cache=cache), settings.server)


class Worker(LLMEngine):
    """A worker of Dynamo. Between `start` and `cleanup` it has engines, and a Service, as our own server
    has."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.engines: Engines | None = None
        self.service: Service | None = None
        self.tasks: list[asyncio.Task[None]] = []
        self.running: dict[str, str] = {}  # Dynamo's id of a request → ours
        self._numbers = count()
        self._snapshots: Any = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Worker, WorkerConfig]:
        settings, theirs = options(sys.argv[1:] if argv is None else argv)
        name = settings.engine.model.names[0]
        named = {
            key: getattr(theirs, key) for key in ("namespace", "component", "endpoint", "endpoint_types")
        }
        planes = {key: getattr(theirs, key) for key in ("discovery_backend", "request_plane", "event_plane")}
        parsers = {key: getattr(theirs, f"dyn_{key}") for key in ("tool_call_parser", "reasoning_parser")}
        model = str(settings.engine.model.directory)
        return cls(settings), WorkerConfig(
            model_name=model, served_model_name=name, **named, **planes, **parsers
        )

    async def start(self, worker_id: int) -> Registration:
        self.engines = engines = await Engines.start(self.settings)
        client, engine, card = engines.client, engines.settings.engine, engines.client.card
        self.service = engines.app().state.service
        self.tasks = [
            asyncio.create_task(engines.end_process("the worker")),
            asyncio.create_task(self._tell(client)),
        ]
        while not (pages := client.stats().pages_total):
            await asyncio.sleep(0.01)  # the engine's first statistics follow its first word
        registration = LlmRegistration(
            context_length=card.context_length,
            kv_cache_block_size=card.page_size,
            total_kv_blocks=pages,
            max_num_seqs=engine.scheduler.max_running_requests,
            max_num_batched_tokens=engine.scheduler.chunked_prefill_size,
        )
        return Registration(model=str(engine.model.directory), served_model_name=card.name, llm=registration)

    async def generate(
        self, request: Mapping[str, Any], context: Any
    ) -> AsyncGenerator[dict[str, Any], None]:
        id = f"{context.id()}+{next(self._numbers)}"  # a stream may come back to where it has been
        self.running[context.id()] = id
        try:
            async for chunk in self._chunks(request, context, id):
                yield chunk
        except InvalidRequest as error:
            raise InvalidArgument(str(error)) from error
        except EngineDead as error:
            raise EngineShutdown(str(error)) from error
        except EngineBusy as error:
            raise WorkerUnavailable(str(error)) from error
        except MTPServeError as error:
            raise Unknown(str(error)) from error
        finally:
            self.running.pop(context.id(), None)

    async def _chunks(
        self, request: Mapping[str, Any], context: Any, id: str
    ) -> AsyncGenerator[dict[str, Any], None]:
        service, arrival = self.service, perf_counter()
        assert service is not None
        priorities = self.settings.engine.scheduler.scheduling_policy == "priority"
        body = body_of(request, context.metadata.get(HEADER), has_priorities=priorities)
        service.check_alive()
        body.check()
        sampling = body.sampling(service.tokenizer.defaults, body.max_tokens)
        service.check_sampling(sampling)
        (prompt,) = (entry for entry in body.prompts if not isinstance(entry, str))
        service.check_ids(prompt, "prompt")
        service.check_length(prompt, body.max_tokens, "prompt")
        spelling = await service.spelling(sampling)
        requests = requests_of(service, spelling, id, prompt, sampling, body.choices, salt=body.salt)
        choices = [Choice(service, choice_request) for choice_request in requests]
        usage, scores, num_open = Usage(choices, len(choices)), list[TokenLogprob](), len(choices)
        generation = Generation(service, choices, arrival, body.timeout, streaming=True)
        async with contextlib.aclosing(generation.stream()) as stream:
            async for steps in stream:
                for output in steps:
                    step = generation.add(output)
                    usage.add(step)
                    scores += step.prompt_logprobs or [] if step.index == 0 else []
                    num_open -= step.finish is not None
                    chunk = chunk_of(step.index, step, service.tokenizer, sampling.logprobs)
                    yield chunk | (last_of(usage, prompt, scores, service.tokenizer) if num_open == 0 else {})

    async def abort(self, context: Any) -> None:
        if self.service is not None and (id := self.running.get(context.id())) is not None:
            self.service.abort(id)

    async def cleanup(self) -> None:
        """Null-safe, and may be repeated, as Dynamo wants it."""
        for task in self.tasks:
            task.cancel()
        if self.engines is not None:
            await self.engines.stop()

    async def kv_event_sources(self) -> list[KvEventSource]:
        events: KVEventsConfig | None = self.settings.engine.cache.kv_events
        return [] if events is None else [ZmqSource(events.endpoint.replace("*", "127.0.0.1"), events.topic)]

    async def health_check_payload(self) -> dict[str, Any]:
        payload: dict[str, Any] = build_health_check_payload(bos_token_id=0)  # any token
        return payload

    async def register_prometheus(self, metrics: Any) -> None:
        assert self.service is not None
        register_engine_registry(metrics, self.service.metrics.registry)

    def component_metrics_dp_ranks(self) -> list[int]:
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        self._snapshots = publisher

    async def _tell(self, client: Replicas) -> None:
        """Tells its router how full the engine is."""
        while True:
            await asyncio.sleep(SNAPSHOT_S)
            if self._snapshots is not None:
                stats = client.stats()
                prompts = stats.prompt_tokens_total
                hits = stats.cached_prompt_tokens_total / prompts if prompts else None
                self._snapshots.publish(
                    0, ComponentSnapshot(stats.pages_used, stats.pages_total, stats.page_share, 0, hits)
                )


def main() -> int:
    try:
        options(sys.argv[1:])  # before anything of Dynamo starts
    except MTPServeError as error:
        print(f"mtpserve: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    run(Worker)
    return 0


if __name__ == "__main__":
    sys.exit(main())
