"""OpenAI's and Anthropic's libraries for Node, as they are published, against the real server."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.server.installing import install
from tests.server.test_end_to_end import running

LIBRARIES = ("openai@6", "@anthropic-ai/sdk")


@pytest.fixture
def client(tmp_path: Path) -> Path:
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    install(["npm", "install", "--no-audit", "--no-fund", "--prefix", str(tmp_path), *LIBRARIES], 30)
    return Path(shutil.copy(Path(__file__).parent / "clients" / "openai.mjs", tmp_path))


@pytest.mark.thorough  # npm installs them
def test_their_libraries_work(client: Path) -> None:
    with running("--chat-template", "mtpserve/demo/comments.jinja") as server:
        done = subprocess.run(["node", str(client), server.url], capture_output=True, text=True, check=False, timeout=60, cwd=client.parent)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("events") >= 7
    assert found == {
        "models": ["demo"],
        "completion": 8,
        "chat": 12,
        "streamed_usage": 12,
        "same_text": True,
        "call": "boolean",
        "response": 8,
        "refused": [400, "messages"],
        "message": 8,
        "message_stream": "max_tokens",
    }
