"""Clients as they are published, against a model that says what the test wants: it reasons, calls a tool in a way that is no JSON, calls
it well, looks at a picture, and ends; or it is cut by a limit.

They are large and change every week, so only MTPSERVE_AGENTS=1 installs and runs them; any other value is a directory where they stay
installed. All that they are told to run is an echo. scripted.py is the server, known.py the list of clients.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.clients.known import AGENTS_NPM, CLIENTS, LIBRARIES_NPM, LIBRARIES_PIP, NODE, Call, Client
from tests.clients.running import Installed, Served, run, serve
from tests.server.installing import install

WHERE = os.environ.get("MTPSERVE_AGENTS")
REASONED, SAID = "I call it.", "The tool said hello."

pytestmark = pytest.mark.skipif(WHERE is None, reason="MTPSERVE_AGENTS=1 runs it")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    place = tmp_path_factory.mktemp("clients") if WHERE == "1" else Path(str(WHERE))
    npm, node, modules = shutil.which("npm"), place / "node", place / "npm" / "node_modules"
    if npm is None:
        pytest.skip("npm is not installed")
    options = ("install", "--no-audit", "--no-fund", "--prefix")
    if not node.exists():
        install([npm, *options, str(node), *NODE], 300)
    programs = node / "node_modules" / ".bin"
    if not modules.exists():  # by the new runtime: npm looks for versions that fit it
        command = [str(programs / "node"), str(Path(npm).resolve()), *options, str(place / "npm")]
        install([*command, *AGENTS_NPM, *LIBRARIES_NPM], 600)
    if not (place / "python").exists():
        install([sys.executable, "-m", "venv", str(place / "python")], 60)
        install([str(place / "python" / "bin" / "pip"), "install", "--quiet", *LIBRARIES_PIP], 600)
    return Installed((modules / ".bin", programs, place / "python" / "bin"), modules)


def call(tool: Call, place: Path, *, broken: bool = False) -> str:
    name, arguments = tool
    text = json.dumps(arguments).replace("@HOME", str(place))
    if broken:  # a quote within a string
        text = text.replace('": "', '": ""', 1)
    return f'<think>{REASONED}</think>Let me see.\n<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'


def talk(client: Client, installed: Installed, place: Path, *texts: str) -> tuple[Served, int, str]:
    """The server, which answered all that it was asked, the client's exit code and what it said."""
    with serve(texts, place) as served:
        code, said = run(client, installed, served.url, place)
    refused = [request for request in served.requests() if request["status"] != [200]]
    assert not refused, said[-4000:]
    return served, code, said


@pytest.mark.parametrize("name", CLIENTS)
def test_a_tool_loop(installed: Installed, tmp_path: Path, name: str) -> None:
    client = CLIENTS[name]
    looks = [] if client.picture is None else [call(client.picture, tmp_path)]
    texts = [call(client.shell, tmp_path, broken=True), call(client.shell, tmp_path), *looks, f"<think>It said so.</think>{SAID}"]
    served, code, said = talk(client, installed, tmp_path, *texts)
    assert (code, SAID in said) == (0, True), said[-4000:]
    bodies = [request["body"] for request in served.requests() if '"tools"' in request["body"]]
    assert len(bodies) >= len(texts)
    assert any("hello-42" in body for body in bodies)
    if looks and client.shows:
        assert any("image/png" in body for body in bodies)
    if client.thinks:
        assert any(REASONED in body for body in bodies)


@pytest.mark.parametrize("inside", ["text", "call"])
@pytest.mark.parametrize("name", CLIENTS)
def test_an_answer_that_is_cut(installed: Installed, tmp_path: Path, name: str, inside: str) -> None:
    """Some go on, some ask again, some end with an error of their own; none blames the server."""
    client = CLIENTS[name]
    cut = f"<think>{REASONED}</think>This answer is long" if inside == "text" else call(client.shell, tmp_path).split("hello-$")[0]
    served, code, said = talk(client, installed, tmp_path, cut + "[cut]", "The end.")
    assert served.requests()
    assert (code, client.cut[1] in said) == (client.cut[0], True), said[-4000:]


# OpenAI's streams do not end with [DONE], its names are response.reasoning_text.*, and Anthropic's streams have a signature_delta.
NOT_OURS = {"responses: streaming + SSE framing", "messages: streaming + SSE framing"}


def test_llmprobe(installed: Installed, tmp_path: Path) -> None:
    """Its MUST assertions, with a model that obeys the prompts."""
    command = ("llmprobe", "@URL/v1", "-k", "x", "-m", "fake", "--no-bench", "--no-save", "--no-color")
    with serve((), tmp_path) as served:
        _, said = run(Client(command, ("", {})), installed, served.url, tmp_path)
    asserted = re.findall(r"^  (.) ((?:chat/completions|responses|messages|messages/count_tokens): .+)", said, re.MULTILINE)
    assert len([name for mark, name in asserted if mark == "✓"]) > 60, said[-4000:]
    assert {name for mark, name in asserted if mark == "✗"} <= NOT_OURS, said
