"""Coding agents as they are published, with a model that says what the test wants: it calls a tool, hears what came of it, and ends.

They are large and change every week, so only MTPSERVE_AGENTS=1 installs and runs them. All that they are told to run is an echo.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

CLIENTS = ("@openai/codex", "@anthropic-ai/claude-code", "opencode-ai")
ASKED = "Say hello with the shell"

pytestmark = pytest.mark.skipif(os.environ.get("MTPSERVE_AGENTS") != "1", reason="MTPSERVE_AGENTS=1 runs it")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("npm")
    command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(place), *CLIENTS]
    subprocess.run(command, check=True, timeout=300)
    return place / "node_modules" / ".bin"


@contextmanager
def speaking(tool: str, **arguments: str) -> Iterator[str]:
    """A server whose model calls the tool first and is done then; yields its address."""
    call = json.dumps({"name": tool, "arguments": arguments})
    texts = [f"<think>I call it.</think>Let me see.\n<tool_call>\n{call}\n</tool_call>", "<think>It said so.</think>The tool said hello."]
    command = [sys.executable, "-m", "tests.server.speaking", *texts]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


def run(home: Path, *command: str | Path, **variables: str) -> str:
    """What it says, in an empty directory and with no settings but these."""
    node = shutil.which("node")
    assert node is not None
    place = home / "work"
    place.mkdir(exist_ok=True)
    environment = {"PATH": os.pathsep.join([str(Path(node).parent), os.defpath]), "HOME": str(home), **variables}
    done = subprocess.run(
        [str(part) for part in command], cwd=place, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_codex(programs: Path, tmp_path: Path) -> None:
    with speaking("exec_command", cmd="echo hello-$((40 + 2))") as url:
        settings = f'model = "fake"\nmodel_provider = "mtpserve"\n[model_providers.mtpserve]\nname = "mtpserve"\nbase_url = "{url}/v1"\n'
        (tmp_path / "config.toml").write_text(settings + 'wire_api = "responses"\n')
        # Its own sandbox does not start in every container.
        command = (programs / "codex", "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", ASKED)
        said = run(tmp_path, *command, CODEX_HOME=str(tmp_path))
    assert "hello-42" in said and "The tool said hello." in said


def test_claude_code(programs: Path, tmp_path: Path) -> None:
    with speaking("Bash", command="echo hello-42", description="Says hello") as url:
        command = (programs / "claude", "-p", ASKED, "--allowedTools", "Bash(echo:*)", "--verbose", "--output-format", "stream-json")
        variables = {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": "x",
            "ANTHROPIC_MODEL": "fake",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "fake",
        }
        said = run(tmp_path, *command, **variables, CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1")
    events = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert any('"stdout": "hello-42"' in json.dumps(event) for event in events)
    assert (events[-1]["type"], events[-1]["is_error"], events[-1]["result"]) == ("result", False, "The tool said hello.")


def test_opencode(programs: Path, tmp_path: Path) -> None:
    with speaking("bash", command="echo hello-$((40 + 2))", description="Says hello") as url:
        model = {"name": "fake", "limit": {"context": 1 << 20, "output": 4096}}
        provider = {"npm": "@ai-sdk/openai-compatible", "name": "mtpserve", "options": {"baseURL": f"{url}/v1"}, "models": {"fake": model}}
        (tmp_path / "work").mkdir()
        (tmp_path / "work" / "opencode.json").write_text(json.dumps({"provider": {"mtpserve": provider}, "model": "mtpserve/fake"}))
        command = (programs / "opencode", "run", "--title", "hello", ASKED)
        said = run(tmp_path, *command, OPENCODE_DISABLE_AUTOUPDATE="1", OPENCODE_DISABLE_MODELS_FETCH="1")
    assert "hello-42" in said and "The tool said hello." in said
