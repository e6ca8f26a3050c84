"""SGLang's routes for new weights: what they hand to the engines, and two real engines that get them."""

from __future__ import annotations

import asyncio
import base64
import os
import pickle
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from mtpserve.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, ServerConfig
from mtpserve.core.protocols.control import (
    JoinGroup,
    LeaveGroup,
    OnEveryRank,
    ReadWeights,
    Reply,
    StageBroadcast,
    StageCheckpoint,
    StageTensors,
    UpdateWeights,
)
from mtpserve.engine.process.replica import Replica
from mtpserve.engine.process.replicas import Replicas
from mtpserve.server.app import create_app
from mtpserve.server.launch import engines_of
from mtpserve.text.tokenizer import tokenizer_of
from tests.engine.test_weight_updates import demo, new
from tests.server.fake_client import FakeClient

__all__ = ["demo", "new"]
TENSORS = {"model.norm.weight": torch.arange(4.0)}
DISK, TENSOR, BROADCAST = (f"/update_weights_from_{what}" for what in ("disk", "tensor", "distributed"))
GROUP = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 3, "group_name": "g", "backend": "gloo"}


def text_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def post(http: httpx.AsyncClient, path: str, body: Any) -> httpx.Response:
    return asyncio.run(http.post(path, json=body))


def test_bodies_become_calls(http: httpx.AsyncClient, client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, ranks = client.engine, list[Any]()
    answer = {"parameter": [1.5], "checksums": {}}
    monkeypatch.setitem(engine.controls._handlers, OnEveryRank, lambda call: ranks.append(call.call) or Reply(values=answer))
    broadcast = {"names": ["a"], "dtypes": ["torch.bfloat16"], "shapes": [[2, 3]], "group_name": "g"}
    for path, body in (
        (DISK, {"model_path": "/m", "load_format": "auto", "flush_cache": True, "weight_version": "v2"}),
        (TENSOR, {"serialized_named_tensors": [text_of(save(TENSORS))]}),
        (BROADCAST, broadcast),
        ("/init_weights_update_group", GROUP),
        ("/destroy_weights_update_group", {"group_name": "g"}),
        ("/get_weights_by_name", {"name": "a", "truncate_size": 3}),
    ):
        response = post(http, path, body)
        assert response.status_code == 200, response.text
    assert engine.updates == [
        UpdateWeights(StageCheckpoint("/m"), "v2"),
        UpdateWeights(StageTensors([save(TENSORS)])),
        UpdateWeights(StageBroadcast(["a"], ["torch.bfloat16"], [[2, 3]], "g")),
    ]
    assert ranks == [JoinGroup("127.0.0.1", 9, 1, 3, "g", "gloo"), LeaveGroup("g"), ReadWeights("a", 3)]


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        (DISK, {}, "model_path", "model_path"),
        (DISK, {"model_path": "/m", "load_format": "pt"}, "load_format", "'auto' or 'safetensors'"),
        (TENSOR, {"serialized_named_tensors": []}, "serialized_named_tensors", "at least 1"),
        (TENSOR, {"serialized_named_tensors": ["?"]}, "serialized_named_tensors", "serialized_named_tensors[0] is not base64"),
        (
            TENSOR,
            {"serialized_named_tensors": ["", text_of(pickle.dumps([("a", 1)]))]},
            "serialized_named_tensors",
            "[1] is a pickle, which could run code: send base64 of what safetensors.torch.save",
        ),
        (TENSOR, {"serialized_named_tensors": [""], "load_format": "flattened_bucket"}, "load_format", "'safetensors'"),
        (BROADCAST, {"names": ["a"], "dtypes": ["float32"], "shapes": [[-1]]}, "shapes", "greater than or equal to 0"),
        ("/init_weights_update_group", GROUP | {"rank_offset": 0}, "rank_offset", "greater than or equal to 1"),
        ("/weights_checker", {"action": "reset_tensors"}, "action", "'snapshot', 'compare' or 'checksum'"),
        ("/update_weight_version", {}, "new_version", "new_version"),
    ],
)
def test_what_is_wrong_is_named(
    http: httpx.AsyncClient, client: FakeClient, path: str, body: dict[str, Any], param: str, message: str
) -> None:
    response = post(http, path, body)
    error = response.json()["error"]
    assert response.status_code == 400 and message in error["message"] and str(error["param"]).startswith(param), error
    assert not client.engine.updates


def test_the_version_is_in_every_answer(http: httpx.AsyncClient, client: FakeClient) -> None:
    assert post(http, "/update_weight_version", {"new_version": "v7"}).json()["new_version"] == "v7"

    async def work() -> None:
        prompt: dict[str, Any] = {"prompt": "a", "max_tokens": 2}
        whole = (await http.post("/v1/completions", json=prompt)).json()
        assert whole["metadata"] == {"weight_version": "v7"}
        chat = await http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}], "max_tokens": 2})
        assert chat.json()["metadata"] == {"weight_version": "v7"}
        stream = (await http.post("/v1/completions", json=prompt | {"stream": True, "max_tokens": 6})).text
        assert stream.count('"metadata":{"weight_version":"v7"}') == 1
        native = await http.post("/generate", json={"text": "a", "sampling_params": {"max_new_tokens": 2}})
        assert native.json()["meta_info"]["weight_version"] == "v7"
        for path in ("/model_info", "/server_info"):
            assert (await http.get(path)).json()["weight_version"] == "v7"
        assert 'weight_version="v7"' in (await http.get("/metrics")).text

    asyncio.run(work())


def test_the_admins_key_guards_them(http: httpx.AsyncClient, client: FakeClient, checkpoint: Path) -> None:
    app = create_app(
        client, tokenizer_of(ModelConfig(model=str(checkpoint))), server_config=ServerConfig(api_key=("k",), admin_api_key=("a",))
    )
    keyed = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
    body = {"model_path": "/m"}
    assert post(keyed, DISK, body).status_code == 401
    for key, status in (("k", 403), ("a", 200)):
        keyed.headers["authorization"] = f"Bearer {key}"
        for path in (DISK, "/init_weights_update_group", "/update_weight_version", "/weights_checker"):
            sent: dict[str, Any] = {DISK: body, "/update_weight_version": {"new_version": "x"}, "/weights_checker": {}}
            assert post(keyed, path, sent.get(path, GROUP)).status_code == status


CONFIG = EngineConfig(
    model=ModelConfig(dtype="float32"), cache=CacheConfig(max_total_tokens=2048),
    parallel=ParallelConfig(data_parallel_size=2, engine_restarts=2),
)  # fmt: skip


async def killing(replica: Replica, end: str) -> None:
    process, restarts = replica.client._process, replica.restarts
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    async with asyncio.timeout(120):
        while replica.state != end or replica.restarts == restarts:
            await asyncio.sleep(0.05)


def with_two_engines(work: Callable[[httpx.AsyncClient, Replicas], Awaitable[None]]) -> None:
    async def main() -> None:
        client = engines_of(CONFIG, ServerConfig(), None)
        try:
            await client.start()
            app = create_app(client, tokenizer_of(CONFIG.model), CONFIG, ServerConfig(max_request_bytes=1 << 28))
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as http:
                await work(http, client)
        finally:
            await client.stop()

    asyncio.run(main())


@pytest.mark.thorough  # tests/engine: the same with one engine or with fake ones
@pytest.mark.parametrize("killed", [False, True])
def test_two_engines_change_together(new: tuple[dict[str, Tensor], Path], demo: dict[str, Tensor], killed: bool) -> None:
    """An update waits for what runs. An engine that is killed comes back with the weights of the directory, or not at all."""
    prompts = ["import os\n", "class A:", "def f(x):", "x = "]

    async def ask(http: httpx.AsyncClient, prompt: str, tokens: int = 12) -> tuple[str, str]:
        answer = (await http.post("/v1/completions", json={"prompt": prompt, "max_tokens": tokens, "temperature": 0})).json()
        return answer["choices"][0]["text"], answer["metadata"]["weight_version"]

    async def all_of(http: httpx.AsyncClient) -> list[tuple[str, str]]:
        return list(await asyncio.gather(*(ask(http, prompt) for prompt in prompts)))

    async def work(http: httpx.AsyncClient, client: Replicas) -> None:
        before = await all_of(http)
        long = asyncio.create_task(ask(http, prompts[0], 200))
        while not client.requests:
            await asyncio.sleep(0.01)
        update = asyncio.create_task(http.post(DISK, json={"model_path": str(new[1]), "weight_version": "v2"}))
        await asyncio.sleep(0.05)
        late = asyncio.create_task(ask(http, prompts[0]))
        assert (await long)[0].startswith(before[0][0])  # to its end with the old weights
        assert (await update).status_code == 200, update.result().text
        after = await all_of(http)
        assert [version for _, version in after] == ["v2"] * 4 and after[0] == await late
        assert [text for text, _ in after] != [text for text, _ in before]
        broken = await http.post(TENSOR, json={"serialized_named_tensors": [text_of(save(TENSORS))]})
        assert broken.status_code == 400 and "model.norm.weight has shape [4]" in broken.json()["error"]["message"]
        first = client._replicas[0]
        if killed:
            await killing(first, "up")
        assert await all_of(http) == after
        names = sorted(demo)
        for part in (names[::2], names[1::2]):
            data = text_of(save({name: demo[name] for name in part}))
            answer = (await http.post(TENSOR, json={"serialized_named_tensors": [data], "weight_version": "v3"})).json()
            assert answer["success"] and bool(answer["waiting"]) == (part == names[::2])
        assert [text for text, _ in await all_of(http)] == [text for text, _ in before]
        if killed:
            await killing(first, "dead")
            assert "no directory has them" in first.reason
        assert [text for text, _ in await all_of(http)] == [text for text, _ in before]

    with_two_engines(work)
