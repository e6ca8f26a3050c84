"""The worker of Dynamo over a fake engine, on modules of Dynamo that are made up: test_trials.py has real ones."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import make_dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

from mtpserve.core.errors import ConfigError, EngineBusy, EngineDead, RequestFailed
from mtpserve.server.app import create_app
from mtpserve.text.tokenizer import Tokenizer
from tests.server.conftest import checkpoint, client, tokenizer
from tests.server.fake_client import FakeClient

__all__ = ["checkpoint", "client", "tokenizer"]

MODULE = "mtpserve.integrations.dynamo"
ERRORS = ("EngineShutdown", "InvalidArgument", "Unknown", "WorkerUnavailable")
NAMES: dict[str, dict[str, Any]] = {
    "common.backend.engine": {"EngineConfig": dict, "LLMEngine": object, "LlmRegistration": dict},
    "common.backend.health_check": {"build_health_check_payload": lambda bos_token_id: {"token_ids": [bos_token_id]}},
    "common.backend.metrics": {"register_engine_registry": print},
    "common.backend.publisher": {
        "ComponentSnapshot": tuple, "KvEventSource": object, "ZmqSource": make_dataclass("ZmqSource", ["endpoint", "topic"])
    },
    "common.backend.run": {"run": print},
    "common.backend.worker": {"WorkerConfig": dict},
    "llm.exceptions": {name: type(name, (Exception,), {}) for name in ERRORS},
}  # fmt: skip


class Context:
    def __init__(self, id: str = "c", **metadata: str) -> None:
        self.metadata, self._id = metadata, id

    def id(self) -> str:
        return self._id


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    for name in ("dynamo", "dynamo.common", "dynamo.common.backend", "dynamo.llm"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, values in NAMES.items():
        fake = ModuleType(f"dynamo.{name}")
        vars(fake).update(values)
        monkeypatch.setitem(sys.modules, f"dynamo.{name}", fake)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    yield import_module(MODULE)
    sys.modules.pop(MODULE, None)


@pytest.fixture
def worker(module: ModuleType, client: FakeClient, tokenizer: Tokenizer) -> Any:
    made = module.Worker(module.options(["--model", "demo"])[0])
    made.service = create_app(client, tokenizer, made.settings.engine).state.service
    return made


def request(tokens: int = 5, **sampling: Any) -> dict[str, Any]:
    return {"token_ids": [5, 6], "stop_conditions": {"max_tokens": tokens}, "sampling_options": sampling, "output_options": {"logprobs": 1}}


async def answer(worker: Any, asked: dict[str, Any], context: Context) -> list[dict[str, Any]]:
    return [chunk async for chunk in worker.generate(asked, context)]


def test_chunks_as_the_frontend_reads_them(worker: Any, client: FakeClient) -> None:
    first, *_, last = chunks = asyncio.run(answer(worker, request(), Context(mtpserve='{"speculative": {"num_steps": 1}}')))
    assert [token for chunk in chunks for token in chunk["token_ids"]] == [40, 41, 42, 43, 44]
    assert all(len(chunk["log_probs"]) == len(chunk["top_logprobs"]) == len(chunk["token_ids"]) for chunk in chunks)
    assert "finish_reason" not in first and last["finish_reason"] == "length"
    assert last["completion_usage"]["total_tokens"] == 7 and last["engine_data"]["usage"]["speculative"]["accepted_tokens"] == 2
    assert client.submitted[0].sampling.speculation.num_steps == 1 and worker.running == {}


def test_a_request_that_is_aborted_ends(worker: Any, client: FakeClient) -> None:
    client.pause = 0.001

    async def work() -> dict[str, Any]:
        context = Context()
        stream = worker.generate(request(4000), context)
        await anext(stream)
        await worker.abort(Context("another"))
        await worker.abort(context)
        return [chunk async for chunk in stream][-1]

    assert asyncio.run(work())["finish_reason"] == "cancelled" and len(client.aborted) == 1


@pytest.mark.parametrize(
    ("asked", "named"),
    [(request(temperature=-1.0), "InvalidArgument"), (request(5000), "InvalidArgument"), (request(), "EngineShutdown")],
    ids=["field", "length", "dead"],
)
def test_refusals(worker: Any, client: FakeClient, asked: dict[str, Any], named: str) -> None:
    client.dead = "killed" if named == "EngineShutdown" else None
    with pytest.raises(NAMES["llm.exceptions"][named]):
        asyncio.run(answer(worker, asked, Context()))


@pytest.mark.parametrize(
    ("error", "named"),
    [(EngineDead("killed"), "EngineShutdown"), (EngineBusy("full"), "WorkerUnavailable"), (RequestFailed("broken"), "Unknown")],
    ids=["dead", "busy", "failed"],
)
def test_errors_of_the_engine(worker: Any, client: FakeClient, monkeypatch: pytest.MonkeyPatch, error: Exception, named: str) -> None:
    """The first two send a request to another worker."""

    async def submit(request: Any) -> Any:
        raise error
        yield

    monkeypatch.setattr(client, "submit", submit)
    with pytest.raises(NAMES["llm.exceptions"][named]):
        asyncio.run(answer(worker, request(), Context()))


def test_options_of_both(module: ModuleType) -> None:
    settings, theirs = module.options(["demo", "--max-num-seqs", "8", "--discovery-backend", "file", "--dyn-reasoning-parser", "x"])
    assert settings.engine.scheduler.max_running_requests == 8
    assert (theirs.discovery_backend, theirs.component, theirs.dyn_reasoning_parser) == ("file", "backend", "x")
    made, config = asyncio.run(module.Worker.from_args(["demo", "--served-model-name", "m"]))
    assert (config["served_model_name"], config["reasoning_parser"], config["endpoint_types"]) == ("m", None, "chat,completions")
    (source,) = asyncio.run(made.kv_event_sources())
    assert source.endpoint.startswith("tcp://127.0.0.1:") and source.topic == ""
    own = asyncio.run(module.Worker.from_args(["demo", "--kv-events-config", '{"endpoint": "tcp://*:5557"}']))[0]
    assert asyncio.run(own.kv_event_sources())[0].endpoint == "tcp://127.0.0.1:5557"
    none = asyncio.run(module.Worker.from_args(["demo", "--disable-radix-cache"]))[0]
    assert asyncio.run(none.kv_event_sources()) == []


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--port", "1"], "--port is Dynamo's here"),
        (["--dp", "2"], "--data-parallel-size must be 1 under Dynamo"),
        (["--x"], "unknown option --x"),
    ],
)
def test_options_that_are_refused(module: ModuleType, argv: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        module.options(argv)
    assert told in str(refused.value)
