"""The whole server as a subprocess with a fake engine: its port, its ready line, its ends, and OpenAI's client against it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from mtpserve.config import ServerConfig
from mtpserve.server.launch import announce
from tests.server.conftest import events
from tests.server.forked import Forked
from tests.server.metric_text import without_model

ROOT = Path(__file__).resolve().parents[2]
LONG = {"prompt": "a", "max_tokens": 4000}


@dataclass
class Server:
    process: Forked
    url: str

    def engine(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        assert len(children) == 1
        return int(children[0])

    def end(self, timeout: float) -> tuple[int, str]:
        """Exit code, standard error."""
        _, log = self.process.communicate(timeout=timeout)
        return self.process.returncode, log


@contextmanager
def launched(checkpoint: Path, *options: str, ready: bool = True, **env: str) -> Iterator[Server]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | env
    with Forked(["--tokenizer", str(checkpoint), *options], environment) as process:
        try:
            line = process.stdout.readline() if ready else ""
            found = re.search(r"https?://\S+", line)
            assert found or not ready, process.communicate(timeout=5)
            yield Server(process, found[0] if found else "")
        finally:
            process.kill()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


async def opened(http: httpx.AsyncClient, count: int = 1) -> list[asyncio.Task[httpx.Response]]:
    """Streams that run when this returns."""
    tasks = [asyncio.create_task(http.post("/v1/completions", json=LONG | {"stream": True})) for _ in range(count)]
    async with asyncio.timeout(30):
        while f"mtpserve_requests_running {count}.0" not in without_model((await http.get("/metrics")).text):
            assert not any(task.done() for task in tasks), "ended before it was seen"
            await asyncio.sleep(0.02)
    return tasks


def test_a_port_in_use_is_one_line(checkpoint: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with launched(checkpoint, "--port", str(port), ready=False) as server:
            code, log = server.end(60)
    assert code == 1
    assert log == f"mtpserve: cannot listen on 127.0.0.1 port {port}: Address already in use\n"


@pytest.mark.parametrize(("fault", "code", "text"), [("config", 2, "--fake must not be given"), ("load", 1, "tensor 'x' is cut off")])
def test_an_engine_that_cannot_start_is_one_line(checkpoint: Path, fault: str, code: int, text: str) -> None:
    with launched(checkpoint, ready=False, FAKE_ENGINE=fault) as server:
        found, log = server.end(60)
    first, second = log.splitlines()
    assert " INFO mtpserve " in first and f": model demo ({ROOT}/mtpserve/demo)" in first
    assert (found, second) == (code, f"mtpserve: {'model.safetensors: ' if code == 1 else ''}{text}")


def test_a_missing_tokenizer_is_one_line(tmp_path: Path) -> None:
    with launched(tmp_path, ready=False, FAKE_ENGINE="slow") as server:
        code, log = server.end(60)
    assert code == 1
    assert log.splitlines()[1].startswith(f"mtpserve: {tmp_path}/tokenizer.json: no such file")
    assert log.count("\n") == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_while_the_model_loads_the_port_answers_503_and_a_signal_ends_it(checkpoint: Path, number: signal.Signals) -> None:
    port = free_port()
    with launched(checkpoint, "--port", str(port), ready=False, FAKE_ENGINE="slow") as server:
        for _ in range(100):
            try:
                response = httpx.get(f"http://127.0.0.1:{port}/health")
                break
            except httpx.ConnectError:
                time.sleep(0.1)
        assert response.status_code == 503
        assert "loading" in response.json()["error"]["message"]
        engine = server.engine()
        server.process.send_signal(number)
        code, log = server.end(60)
        assert (code, log.count("\n")) == (128 + number, 2)
        assert re.search(r"\n\d{4}-\d\d-\d\dT[\d:]{8}\.\d{3}[+-]\d\d:\d\d WARNING stopped while loading\n$", log)
        assert not alive(engine)


def test_openais_client(checkpoint: Path) -> None:
    with (
        launched(checkpoint, FAKE_PAUSE="0.001") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api,
    ):
        assert [model.id for model in api.models.list()] == ["fake"]
        whole = api.completions.create(model="fake", prompt="a", max_tokens=9)
        chunks = list(api.completions.create(model="fake", prompt="a", max_tokens=9, stream=True, stream_options={"include_usage": True}))
        assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
        assert chunks[-1].usage == whole.usage
        assert (chunks[-2].choices[0].finish_reason, whole.choices[0].finish_reason) == ("length", "length")

        messages: Any = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
        chat = api.chat.completions.create(model="fake", messages=messages, max_completion_tokens=8, temperature=0, stop=["M"])
        text = "".join(
            chunk.choices[0].delta.content or ""
            for chunk in api.chat.completions.create(model="fake", messages=messages, max_tokens=8, stop=["M"], stream=True)
        )
        assert chat.choices[0].message.content == text
        assert chat.choices[0].finish_reason == "stop"

        stream = list(api.responses.create(model="fake", input="u", max_output_tokens=8, stream=True))
        told = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream[-1].type == "response.incomplete"
        written = stream[-1].response
        assert written.output_text == told == api.responses.retrieve(written.id).output_text
        assert api.responses.create(model="fake", input="more", previous_response_id=written.id, max_output_tokens=8).output_text == told

        with pytest.raises(openai.NotFoundError) as missing:
            api.completions.create(model="other", prompt="a")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            api.chat.completions.create(model="fake", messages=messages, logprobs=True, top_logprobs=21)
        assert bad.value.param == "top_logprobs"
        with pytest.raises(openai.RateLimitError):
            api.completions.create(model="fake", prompt="a", seed=429)
        with pytest.raises(openai.APIError, match="finite"):
            list(api.completions.create(model="fake", prompt="a", seed=500, stream=True))


def test_clients_that_leave_and_one_that_does_not_read(checkpoint: Path) -> None:
    """Half of forty leave in the middle; a stalled one holds nobody up; afterwards nothing runs."""

    async def leave(http: httpx.AsyncClient, stream: bool) -> None:
        if not stream:
            with pytest.raises(httpx.ReadTimeout):
                await http.post("/v1/completions", json=LONG, timeout=httpx.Timeout(20, read=0.3))
            return
        async with http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
            async for _ in response.aiter_lines():
                break

    async def scenario(url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        stalled = socket.socket()
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.connect((host, int(port)))
        body = b'{"prompt": "a", "max_tokens": 4000, "stream": true}'
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        stalled.sendall(head.encode() + body)
        async with httpx.AsyncClient(base_url=url, timeout=20) as http:
            short = [http.post("/v1/completions", json={"prompt": "a", "max_tokens": 20}) for _ in range(20)]
            results = await asyncio.gather(*short, *(leave(http, index % 2 == 0) for index in range(20)))
            assert all(result.status_code == 200 for result in results[:20] if isinstance(result, httpx.Response))
            stalled.close()
            for _ in range(100):
                text = without_model((await http.get("/metrics")).text)
                if "mtpserve_requests_running 0.0" in text:
                    break
                await asyncio.sleep(0.02)
            assert "mtpserve_kv_pages_used 0.0" in text
            generated = re.search(r"^mtpserve_generation_tokens_total (\S+)", text, re.MULTILINE)
            assert generated is not None
            assert float(generated[1]) < 21 * 4000 * 0.6

    with launched(checkpoint) as server:
        asyncio.run(scenario(server.url))


def test_sigterm_drains(checkpoint: Path) -> None:
    async def scenario(server: Server) -> httpx.Response:
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as http:
            running = asyncio.create_task(http.post("/v1/completions", json={"prompt": "a", "max_tokens": 100, "stream": True}))
            await asyncio.sleep(0.2)
            os.kill(server.engine(), signal.SIGTERM)  # as a terminal's signal to the group does
            server.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.1)
            health, refused = await http.get("/health"), await http.post("/v1/completions", json={"prompt": "a"})
            assert (health.status_code, refused.status_code) == (503, 503)
            assert int(refused.headers["retry-after"]) >= 1
            return await running

    with launched(checkpoint, FAKE_PAUSE="0.02") as server:
        engine = server.engine()
        response = asyncio.run(scenario(server))
        code, log = server.end(60)
        assert code == 0
        assert not alive(engine)
    *chunks, done = events(response)
    assert done == "[DONE]"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert "Traceback" not in log
    assert re.search(r"running 1  waiting 0  pages 1/64 .* accept length 2\.00", log)


@pytest.mark.parametrize("second", [True, False])
def test_a_drain_ends_at_its_timeout_or_at_a_second_signal(checkpoint: Path, second: bool) -> None:
    async def scenario(server: Server) -> httpx.Response:
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as http:
            (stream,) = await opened(http)
            server.process.send_signal(signal.SIGTERM)
            if second:
                await asyncio.sleep(0.1)
                server.process.send_signal(signal.SIGINT)
            return await stream

    with launched(checkpoint, "--drain-timeout", "3600" if second else "0.3") as server:
        engine = server.engine()
        response = asyncio.run(scenario(server))
        code, log = server.end(60)
        assert (code, alive(engine)) == (0, False)
    assert "shutting down" in events(response)[-1]["error"]["message"]
    assert "Traceback" not in log


@pytest.mark.parametrize("second", [True, False])
def test_requests_are_taken_until_routers_have_learned_of_the_end(checkpoint: Path, second: bool) -> None:
    async def scenario(server: Server) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as http:
            stream = asyncio.create_task(http.post("/v1/completions", json=LONG | {"stream": True, "max_tokens": 4000 if second else 600}))
            await asyncio.sleep(0.2)
            server.process.send_signal(signal.SIGTERM)
            while (health := await http.get("/health")).status_code == 200:
                await asyncio.sleep(0.01)
            answers = [health, await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 4})]
            if second:
                server.process.send_signal(signal.SIGTERM)
                return [*answers, await stream]
            await asyncio.sleep(0.6)
            return [*answers, await http.post("/v1/completions", json={"prompt": "a"}), await stream]

    with launched(checkpoint, "--drain-delay", "3600" if second else "0.5") as server:
        health, taken, *refused, stream = asyncio.run(scenario(server))
        code, log = server.end(60)
    assert (code, health.status_code, taken.status_code) == (0, 503, 200)
    assert [answer.status_code for answer in refused] == ([] if second else [503]) and ("draining" in log) is not second
    assert ("error" in events(stream)[-1]) is second and "Traceback" not in log


def test_an_engine_that_is_killed_ends_the_server(checkpoint: Path) -> None:
    async def scenario(server: Server) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as http:
            streams = await opened(http, 2)
            whole = asyncio.create_task(http.post("/v1/completions", json=LONG))
            await asyncio.sleep(0.2)
            os.kill(server.engine(), signal.SIGKILL)
            answers = [await stream for stream in streams]
            return [*answers, await whole, await http.get("/health")]

    with launched(checkpoint) as server:
        engine = server.engine()
        *streams, whole, health = asyncio.run(scenario(server))
        code, log = server.end(60)
    assert code == 1
    assert not alive(engine)
    assert (whole.status_code, health.status_code) == (503, 503)
    for stream in streams:
        *chunks, last = events(stream)
        assert "SIGKILL" in last["error"]["message"]
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert "SIGKILL" in log
    assert "Traceback" not in log


def test_a_server_that_is_killed_takes_its_engine_along(checkpoint: Path) -> None:
    with tempfile.TemporaryDirectory() as directory, launched(checkpoint, TMPDIR=directory) as server:
        engine = server.engine()
        server.process.kill()
        server.process.wait(60)
        end = time.monotonic() + 60
        while alive(engine):
            assert time.monotonic() < end
            time.sleep(0.02)
        with socket.create_server(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))):
            pass
        assert not os.listdir(directory)


def test_endless_headers_are_refused(checkpoint: Path) -> None:
    with launched(checkpoint) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: ")
            sent = 0
            with contextlib.suppress(ConnectionError):  # the refusal
                while sent < 100 << 20:
                    sent += connection.send(b"a" * 65536)
            assert sent < 100 << 20
        assert httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.parametrize(("chat", "key", "parts"), [
    (True, ("k",), ["/v1/chat/completions ", '"messages": [{"role": "user", ', 'Authorization: Bearer $API_KEY"']),
    (False, (), ["/v1/completions ", '"prompt": ', '"max_tokens": 8']),
])  # fmt: skip
def test_the_command_of_the_ready_line_suits_the_model(
    chat: bool, key: tuple[str, ...], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    service: Any = SimpleNamespace(
        model="m",
        server_config=ServerConfig(api_key=key),
        client=SimpleNamespace(card=SimpleNamespace(context_length=16)),
        tokenizer=SimpleNamespace(has_chat_template=chat),
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        announce(listener, service, 7.25)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    ready, command = capsys.readouterr().out.splitlines()
    assert ready.startswith(f"mtpserve is ready: {url} (after 7.2 s; ")
    assert command.startswith(f"  curl {url}/v1/")
    assert all(part in command for part in parts)
    assert ("Authorization" in command) is bool(key)
