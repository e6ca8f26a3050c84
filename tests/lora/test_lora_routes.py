"""Adapters over HTTP: by their names as models, listed, loaded and unloaded; and in the offline engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from mtpserve import LLM, LoRARequest, SamplingParams
from mtpserve.config import EngineConfig, LoRAConfig, ServerConfig
from mtpserve.core.errors import InvalidRequest
from mtpserve.core.protocols.control import LoadLoRA, UnloadLoRA
from mtpserve.server.app import create_app
from mtpserve.text.tokenizer import Tokenizer
from tests.lora.adapters import Adapter
from tests.models.checkpoints import mimo
from tests.server.conftest import events
from tests.server.fake_client import FakeClient
from tests.text import tiny

CONFIG = EngineConfig(lora=LoRAConfig(lora_modules=("sql=adapters/sql", "chat=adapters/chat")))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tiny.write(tmp_path_factory.mktemp("checkpoint")))


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture
def calls(client: FakeClient) -> list[Any]:
    """What the engine was asked to do; it cannot read a path with `bad` in it."""
    return client.engine.lora_calls


def http_of(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://test")


@pytest.fixture
def http(client: FakeClient, tokenizer: Tokenizer) -> httpx.AsyncClient:
    return http_of(create_app(client, tokenizer, CONFIG))


MESSAGES = [{"role": "user", "content": "hi"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "def", "max_tokens": 3},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 3},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 3},
    "/v1/responses": {"input": "hi", "max_output_tokens": 3},
}


@pytest.mark.anyio
@pytest.mark.parametrize("path", ASKED)
async def test_a_model_names_an_adapter(path: str, client: FakeClient, http: httpx.AsyncClient) -> None:
    for name, number in (("sql", 1), ("chat", 2), ("fake", None)):
        response = await http.post(path, json={"model": name, **ASKED[path]})
        assert response.status_code == 200 and response.json()["model"] == name
        lora = client.submitted[-1].lora
        assert lora == (None if number is None else LoRARequest(name, number, f"adapters/{name}"))
    response = await http.post(path, json={"model": "none", **ASKED[path]})
    assert response.status_code == 404 and "'fake', 'sql', 'chat'" in response.json()["error"]["message"]


@pytest.mark.anyio
async def test_chunks_have_its_name(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/completions", json={"model": "sql", "prompt": "def", "max_tokens": 3, "stream": True})
    assert {chunk["model"] for chunk in events(response)[:-1]} == {"sql"}


@pytest.mark.anyio
async def test_generate_names_it_by_lora_path(client: FakeClient, http: httpx.AsyncClient) -> None:
    sampling = {"max_new_tokens": 2}
    await http.post("/generate", json={"text": "a", "sampling_params": sampling, "lora_path": "chat"})
    assert client.submitted[-1].lora == LoRARequest("chat", 2, "adapters/chat")
    await http.post("/generate", json={"text": ["a", "b", "c"], "sampling_params": sampling, "lora_path": ["sql", None, "chat"]})
    assert [request.lora and request.lora.lora_name for request in client.submitted[-3:]] == ["sql", None, "chat"]
    for wrong, text in (("x", "a"), (["sql"], ["a", "b"])):
        response = await http.post("/generate", json={"text": text, "sampling_params": sampling, "lora_path": wrong})
        assert response.status_code == 400 and response.json()["error"]["param"] == "lora_path"
    chat = await http.post("/v1/chat/completions", json={"messages": MESSAGES, "lora_path": "sql"})
    assert chat.status_code == 400 and chat.json()["error"]["param"] == "lora_path"


@pytest.mark.anyio
async def test_models_are_listed_with_their_parent(http: httpx.AsyncClient) -> None:
    listed = (await http.get("/v1/models")).json()["data"]
    assert [(model["id"], model["parent"]) for model in listed] == [("fake", None), ("sql", "fake"), ("chat", "fake")]
    assert listed[1]["root"] == "adapters/sql"
    assert (await http.get("/v1/models/sql")).json() == listed[1]


@pytest.mark.anyio
async def test_adapters_come_and_go(client: FakeClient, http: httpx.AsyncClient, calls: list[Any]) -> None:
    body = {"lora_name": "new", "lora_path": "adapters/new"}
    response = await http.post("/v1/load_lora_adapter", json=body)
    assert response.status_code == 200 and response.text == "Success: LoRA adapter 'new' added successfully."
    assert calls == [LoadLoRA(LoRARequest("new", 3, "adapters/new"))]
    await http.post("/v1/completions", json={"model": "new", "prompt": "a", "max_tokens": 1})
    assert client.submitted[-1].lora == LoRARequest("new", 3, "adapters/new")
    again = await http.post("/v1/load_lora_adapter", json=body)
    assert again.status_code == 400 and "loaded already" in again.json()["error"]["message"]
    replaced = await http.post("/load_lora_adapter", json={**body, "lora_path": "adapters/newer", "load_inplace": True})
    assert replaced.json()["loaded_adapters"]["new"] == "adapters/newer"
    assert calls[-2:] == [LoadLoRA(LoRARequest("new", 4, "adapters/newer")), UnloadLoRA(3)]
    gone = await http.post("/unload_lora_adapter", json={"lora_name": "sql"})
    assert gone.json() == {"success": True, "loaded_adapters": {"chat": "adapters/chat", "new": "adapters/newer"}}
    assert calls[-1] == UnloadLoRA(1)
    assert (await http.post("/v1/completions", json={"model": "sql", "prompt": "a"})).status_code == 404
    missing = await http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
    assert missing.status_code == 404 and "'sql' is not loaded" in missing.json()["error"]["message"]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"lora_name": "x", "lora_path": "adapters/bad"}, "lora_path", "peft_type must be LORA"),
        ({"lora_name": "fake", "lora_path": "p"}, "lora_name", "is the name of the model"),
        ({"lora_name": "", "lora_path": "p"}, "lora_name", ""),
        ({"lora_name": "x"}, "lora_path", ""),
        ({"lora_name": "x", "lora_path": "p", "pinned": True}, "pinned", "not supported"),
    ],
)
async def test_what_cannot_be_loaded(http: httpx.AsyncClient, calls: list[Any], body: dict[str, Any], param: str, words: str) -> None:
    response = await http.post("/v1/load_lora_adapter", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param and words in response.json()["error"]["message"]
    assert len((await http.get("/v1/models")).json()["data"]) == 3
    assert [type(call) for call in calls] == ([LoadLoRA, UnloadLoRA] if param == "lora_path" and words else [])


@pytest.mark.anyio
async def test_a_server_without_adapters_and_one_with_keys(client: FakeClient, tokenizer: Tokenizer) -> None:
    body = {"lora_name": "x", "lora_path": "p"}
    response = await http_of(create_app(client, tokenizer)).post("/v1/load_lora_adapter", json=body)
    assert response.status_code == 400 and "needs a server with --enable-lora" in response.json()["error"]["message"]
    keyed = http_of(create_app(client, tokenizer, CONFIG, ServerConfig(api_key=("user",), admin_api_key=("admin",))))
    for key, status in (("user", 403), ("admin", 200)):
        response = await keyed.post("/v1/load_lora_adapter", json=body, headers={"Authorization": f"Bearer {key}"})
        assert response.status_code == status


def test_the_offline_engine(tmp_path: Path) -> None:
    made = mimo(tmp_path / "base", vocab_size=tiny.VOCAB)
    tiny.write(made.directory)
    adapter = Adapter(1)
    path = adapter.save(tmp_path / "it", made.tensors)
    options: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 400, "max_running_requests": 4}
    asked = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(str(made.directory), enable_lora=True, max_loras=1, **options) as llm:
        it = LoRARequest("it", 1, str(path))
        bare, adapted = llm.generate([[5, 6, 7]] * 2, asked, lora_request=[None, it])
        assert llm.generate([5, 6, 7], asked, lora_request=it)[0].tokens == adapted.tokens != bare.tokens
        assert [token for step in llm.stream([5, 6, 7], asked, it) for token in step.tokens] == adapted.tokens
        assert llm.chat([{"role": "user", "content": "a"}], asked, lora_request=it)[0].tokens
        with pytest.raises(InvalidRequest, match="there are 1 prompts and 2 adapters"):
            llm.generate([[5]], asked, lora_request=[it, it])
        with pytest.raises(InvalidRequest, match="give 'other' another number"):
            llm.generate([[5]], asked, lora_request=LoRARequest("other", 1, "elsewhere"))
    with LLM(str(adapter.merge(tmp_path / "merged", made)), **options) as merged:
        assert merged.generate([[5, 6, 7]], asked)[0].tokens == adapted.tokens
