"""Clients that others wrote, as they are published, against the real server: libraries, and load generators that report acceptance.

OpenAI's library is one of the development tools. Anthropic's is installed for the test. What takes longer than a minute to install is
looked for in the virtual environments that MTPSERVE_PEER_CLIENTS names, with ":" between them: vllm, sglang, langchain-openai.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.server.installing import install
from tests.server.test_end_to_end import Running, running

CLIENTS = Path(__file__).parent / "clients"
DEMO = Path(__file__).parents[2] / "mtpserve" / "demo"
PEERS = "MTPSERVE_PEER_CLIENTS"
ASKED: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "def read_lines(path):"}], "temperature": 0}
LOAD = 12  # requests


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(
        "--chat-template", str(DEMO / "comments.jinja"), "--metrics-compat", "vllm,sglang", "--tool-call-parser", "hermes"
    ) as started:
        yield started


def output(command: list[str | Path], cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=240, cwd=cwd, env=os.environ | {"PYTHONPATH": ""} | environment
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


# -- libraries --------------------------------------------------------------------------------------------------------------------


class Form(BaseModel):
    ok: bool
    kind: Literal["a", "b"]


class Look(BaseModel):
    """Look something up."""

    flag: bool


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60)


def test_openai_parses_what_it_asked_for(client: openai.OpenAI) -> None:
    tools = [openai.pydantic_function_tool(Look)]
    chat = client.chat.completions.parse(**ASKED, response_format=Form, max_tokens=100)
    assert isinstance(chat.choices[0].message.parsed, Form)
    with client.chat.completions.stream(**ASKED, response_format=Form, max_tokens=100) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == chat.choices[0].message.parsed
    called = client.chat.completions.parse(**ASKED, tools=tools, tool_choice="required", parallel_tool_calls=False, max_tokens=100)
    assert called.choices[0].message.tool_calls is not None
    assert isinstance(called.choices[0].message.tool_calls[0].function.parsed_arguments, Look)
    answer = client.responses.parse(model="demo", input="import os", text_format=Form, max_output_tokens=100, temperature=0)
    assert isinstance(answer.output_parsed, Form)
    with client.responses.stream(model="demo", input="import os", text_format=Form, max_output_tokens=100, temperature=0) as events:
        assert events.get_final_response().output_parsed == answer.output_parsed


def test_openai_keeps_the_reasoning_itself(client: openai.OpenAI) -> None:
    """What agents send that store nothing on the server."""
    answer = client.responses.create(
        model="demo", input="import os", max_output_tokens=8, store=False, reasoning={"effort": "low", "summary": "auto"},
        include=["reasoning.encrypted_content"],
    )  # fmt: skip
    assert answer.usage is not None and answer.usage.output_tokens <= 8
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


@pytest.fixture(scope="module")
def anthropic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the library and all that it needs."""
    target = tmp_path_factory.mktemp("anthropic")
    install([sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--target", str(target), "anthropic>=2,<3"], 60)
    return target


@pytest.mark.thorough  # pip installs it; test_messages.py asks the same by hand
def test_anthropic(server: Running, anthropic: Path, tmp_path: Path) -> None:
    found = json.loads(output([sys.executable, CLIENTS / "anthropic_sdk.py", server.url], tmp_path, PYTHONPATH=str(anthropic)))
    assert found == {
        "models": [["model", "demo", True]],
        "message": 8,
        "same_text": True,
        "call": ["tool_use", "look", "bool"],
        "after_call": 4,
        "streamed_call": ["bool"],
        "runner": ["tool_use", "tool_use"],
        "runner_sends_all": True,
        "cached": [0, True],
        "parsed": "Form",
        "thinking": 8,
        "refused": True,
    }


def peer(package: str) -> Path:
    """The interpreter of the virtual environment that has it."""
    for place in filter(None, os.environ.get(PEERS, "").split(os.pathsep)):
        if any(Path(place).glob(f"lib/python*/site-packages/{package}")):
            return Path(place).absolute() / "bin" / "python"
    pytest.skip(f"{PEERS} names no virtual environment that has {package}")


def test_langchain(server: Running, tmp_path: Path) -> None:
    over = {
        "tokens": 12,
        "same_text": True,
        "streamed_tokens": [12],
        "call": [["look", "bool"]],
        "after_call": 6,
        "schema": "Form",
        "function": "Form",
    }
    assert json.loads(output([peer("langchain_openai"), CLIENTS / "langchain_sdk.py", server.url], tmp_path)) == [over, over]


# -- load generators --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def sharegpt(tmp_path: Path) -> Path:
    """A file in ShareGPT's format, of this project's own sources."""
    conversations = []
    for path in sorted((DEMO.parent / "server").glob("*.py")):
        text = path.read_text()
        turns = [{"from": "human", "value": text[:200]}, {"from": "gpt", "value": text[200:280]}]
        conversations.append({"id": path.name, "conversations": turns})
    file = tmp_path / "sharegpt.json"
    file.write_text(json.dumps(conversations))
    return file


def number(text: str, label: str) -> float:
    found = re.search(rf"^\s*{re.escape(label)}\s+([\d.]+)\s*$", text, re.MULTILINE)
    assert found, f"no {label!r} in {text[-4000:]}"
    return float(found[1])


VLLM = {
    "alone": [],  # the model's name and its tokenizer come from the server
    "openai": ["--backend", "openai", "--model", "demo", "--tokenizer", str(DEMO), "--temperature", "0"],
    "chat": ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions"],
    "responses": ["--backend", "openai-responses", "--endpoint", "/v1/responses"],
}


@pytest.mark.parametrize(
    ("dataset", "kind"), [("random", "alone"), ("sharegpt", "alone"), ("random", "openai"), ("sharegpt", "chat"), ("random", "responses")]
)
def test_vllm_bench_serve(server: Running, tmp_path: Path, sharegpt: Path, dataset: str, kind: str) -> None:
    lengths = ["--random-input-len", "32", "--random-output-len", "24"] if dataset == "random" else ["--dataset-path", str(sharegpt)]
    names = ("drafts", "draft_tokens", "accepted_tokens")
    before = [server.metric(f"spec_{name}_total") for name in names]
    command = [peer("vllm").with_name("vllm"), "bench", "serve", "--base-url", server.url, "--dataset-name", dataset, *lengths]
    text = output([*command, "--num-prompts", str(LOAD), *VLLM[kind]], tmp_path)
    drafts, drafted, accepted = (server.metric(f"spec_{name}_total") - old for name, old in zip(names, before, strict=True))
    assert (number(text, "Successful requests:"), number(text, "Failed requests:")) == (LOAD, 0)
    assert number(text, "Drafts:") == drafts > 0 and number(text, "Draft tokens:") == drafted
    assert number(text, "Acceptance length:") == pytest.approx(1 + accepted / drafts, abs=0.006) and accepted > 0
    assert number(text, "Acceptance rate (%):") == pytest.approx(100 * accepted / drafted, abs=0.006)
    assert 100 >= number(text, "Position 0:") >= number(text, "Position 1:") >= number(text, "Position 2:") > 0


@pytest.mark.parametrize(
    ("dataset", "backend"),
    [("random", "sglang"), ("sharegpt", "sglang"), ("random", "sglang-oai"), ("sharegpt", "sglang-oai"), ("random", "sglang-oai-chat")],
)
def test_sglang_bench_serving(server: Running, tmp_path: Path, sharegpt: Path, dataset: str, backend: str) -> None:
    lengths = ["--random-input-len", "32", "--random-output-len", "24"] if dataset == "random" else []
    command = [peer("sglang"), "-m", "sglang.bench_serving", "--backend", backend, "--base-url", server.url, "--dataset-name", dataset]
    text = output([*command, "--dataset-path", str(sharegpt), "--num-prompts", str(LOAD), *lengths], tmp_path)
    assert number(text, "Successful requests:") == LOAD
    lifetime = httpx.get(server.url + "/server_info").json()["internal_states"][0]["avg_spec_accept_length"]
    assert number(text, "Accept length:") == pytest.approx(lifetime, abs=0.006) and lifetime > 1
    assert number(text, "Total generated tokens:") == number(text, "Total generated tokens (retokenized):")
