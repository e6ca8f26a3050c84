"""What a server that is launched says when something is not as it should be: the last line, the log, the answers."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import openai
import pytest

from mtpserve.core.errors import LoadError
from mtpserve.text.tokenizer import Tokenizer
from tests.server.conftest import events
from tests.server.test_launch import LONG, ROOT, launched, opened

SECRET = "the word is swordfish"


@pytest.mark.parametrize("content", ["no json", "{}", "[]", '{"model": {"type": "BPE"}}'])
def test_a_tokenizer_json_that_is_no_tokenizer(checkpoint: Path, tmp_path: Path, content: str) -> None:
    directory = tmp_path / "model"
    shutil.copytree(checkpoint, directory)
    (directory / "tokenizer.json").write_text(content)
    with pytest.raises(LoadError) as refused:
        Tokenizer(directory)
    assert str(refused.value).startswith(f"{directory}/tokenizer.json: is not a tokenizer: ") and "\n" not in str(refused.value)


def test_a_server_without_a_tokenizer_says_so_in_one_line(checkpoint: Path, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(checkpoint, directory)
    (directory / "tokenizer.json").write_text("[]")
    with launched(directory, ready=False) as server:
        code, log = server.end(60)
    assert (code, log.count("\n")) == (1, 2)
    assert log.splitlines()[1].startswith(f"mtpserve: {directory}/tokenizer.json: is not a tokenizer: ")


def test_a_server_that_shuts_down_is_not_a_dead_engine(checkpoint: Path) -> None:
    async def work(url: str) -> tuple[httpx.Response, ...]:
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            (stream,) = await opened(http)
            whole = asyncio.create_task(http.post("/v1/completions", json=LONG))
            server.process.send_signal(signal.SIGTERM)
            while (health := await http.get("/health")).status_code == 200:
                await asyncio.sleep(0.01)
            refused = await http.post("/v1/completions", json=LONG)
            server.process.send_signal(signal.SIGTERM)
            return health, refused, await whole, await stream

    with launched(checkpoint) as server:
        *answers, stream = asyncio.run(work(server.url))
        code, log = server.end(30)
    errors = [answer.json()["error"] for answer in answers] + [events(stream)[-1]["error"]]
    assert [error["code"] for error in errors] == ["shutting_down"] * 4 and all("shutting down" in error["message"] for error in errors)
    assert [(answer.status_code, "retry-after" in answer.headers) for answer in answers] == [(503, True)] * 3
    assert code == 0 and "engine_dead" not in log and re.search(r"draining: running requests: [12], time limit: 10 s", log)


def test_nobody_is_drained_where_nobody_is(checkpoint: Path) -> None:
    with launched(checkpoint) as server:
        server.process.send_signal(signal.SIGTERM)
        code, log = server.end(30)
    assert code == 0 and "drain" not in log and "shutting down: no requests are running" in log


def test_the_access_log_says_why_and_not_what_was_asked(checkpoint: Path) -> None:
    def ask(**fields: object) -> httpx.Response:
        return httpx.post(f"{server.url}/v1/completions", json={"prompt": SECRET} | fields, timeout=60)

    with launched(checkpoint) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as api:
        assert ask(max_tokens=SECRET).status_code == 400
        assert ask(model=SECRET).status_code == 404
        assert ask(max_tokens=99999).status_code == 400
        assert "error" in events(ask(seed=500, stream=True))[-1]
        assert ask(max_tokens=2).status_code == 200
        with pytest.raises(openai.BadRequestError):
            api.chat.completions.create(model="fake", messages=[{"role": SECRET, "content": SECRET}])  # type: ignore[list-item,misc]
        server.process.send_signal(signal.SIGTERM)
        log = server.end(30)[1]
    lines = [re.sub(r" \d\.\d{3} s [0-9a-f]{32}", "", line.split(" INFO ")[1]) for line in log.splitlines() if "POST /v1" in line]
    assert "swordfish" not in log
    for line, reason in zip(
        lines,
        ("400 invalid_request_error invalid_type: max_tokens: ", "404 invalid_request_error model_not_found: the model … does not exist",
         "400 invalid_request_error context_length_exceeded: max_tokens must be below", "200 server_error request_failed: not a finite",
         "200", "400 invalid_request_error "), strict=True,
    ):  # fmt: skip
        assert re.match(r"127\.0\.0\.1:\d+ POST /v1/", line) and f"completions {reason}" in line, line
    assert lines[2].endswith(", got 99999")
    assert lines[4].endswith(" 200")


def test_quantising_onto_what_is_there(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    command = [sys.executable, "-m", "mtpserve.weights.quantise", str(ROOT / "mtpserve/demo"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and not list(tmp_path.iterdir())
    assert done.stderr == f"error: {tmp_path}: is there already; name a directory that is not, nothing is written over\n"
