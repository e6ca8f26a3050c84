"""Clients as they are published: what installs them, how each is told of a server and run alone, and what its tools are called."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "scripts"
ASKED = "Say hello with the shell, then look at red.png."
HELLO = "echo hello-$((40 + 2))"
NODE = ("node@24",)  # the runtime; some of them need a newer one than the system's
AGENTS_NPM = (
    "@openai/codex", "@anthropic-ai/claude-code", "opencode-ai", "@mariozechner/pi-coding-agent", "@qwen-code/qwen-code",
    "@moonshot-ai/kimi-code", "@continuedev/cli",
)  # fmt: skip
LIBRARIES_NPM = ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic", "zod", "llmprobe@0.6.12")
LIBRARIES_PIP = ("langchain-openai", "langchain-anthropic", "openai-agents", "pydantic-ai-slim[openai,anthropic]", "inspect-ai")
Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Client:
    """`@URL` in files' contents, in variables and in the command is the server's address, `@HOME` the directory of the run."""

    command: tuple[str, ...]
    shell: Call
    picture: Call | None = None  # a tool that shows the model a picture
    files: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    thinks: bool = True  # it sends the reasoning back, as text
    shows: bool = True  # it sends the picture
    cut: tuple[int, str] = (0, "")  # its exit code for an answer that is cut, and what it says then


def codex() -> Client:
    settings = (
        'model = "fake"\nmodel_provider = "mtpserve"\n'
        '[model_providers.mtpserve]\nname = "mtpserve"\nbase_url = "@URL/v1"\nwire_api = "responses"\n'
    )
    # Its own sandbox does not start in every container.
    command = ("codex", "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", ASKED)
    picture = ("view_image", {"path": "@HOME/work/red.png"})
    cut = (1, "Incomplete response returned, reason: max_output_tokens")
    return Client(command, ("exec_command", {"cmd": HELLO}), picture, {"config.toml": settings}, {"CODEX_HOME": "@HOME"}, cut=cut)


def claude() -> Client:
    variables = {
        "ANTHROPIC_BASE_URL": "@URL",
        "ANTHROPIC_API_KEY": "x",
        "ANTHROPIC_MODEL": "fake",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "fake",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    shell = ("Bash", {"command": HELLO, "description": "Says hello"})
    picture = ("Read", {"file_path": "@HOME/work/red.png"})
    command = ("claude", "-p", ASKED, "--allowedTools", "Bash(echo:*)", "Read", "--verbose")
    return Client(command, shell, picture, variables=variables)


def opencode(package: str, base: str = "@URL/v1") -> Client:
    model = {"name": "fake", "limit": {"context": 1 << 20, "output": 4096}, "attachment": True, "reasoning": True}
    model["modalities"] = {"input": ["text", "image"], "output": ["text"]}
    provider = {"npm": package, "name": "mtpserve", "options": {"baseURL": base, "apiKey": "x"}, "models": {"fake": model}}
    settings = json.dumps({"provider": {"mtpserve": provider}, "model": "mtpserve/fake"})
    variables = {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    shell = ("bash", {"command": HELLO, "description": "Says hello"})
    picture = ("read", {"filePath": "@HOME/work/red.png"})
    return Client(("opencode", "run", "--title", "hello", ASKED), shell, picture, {"work/opencode.json": settings}, variables)


def pi(api: str, base: str = "@URL/v1") -> Client:
    model = {"id": "fake", "reasoning": True, "input": ["text", "image"], "contextWindow": 1 << 20, "maxTokens": 4096}
    settings = {"providers": {"mtpserve": {"baseUrl": base, "api": api, "apiKey": "x", "models": [model]}}}
    command = ("pi", "-p", "--offline", "--provider", "mtpserve", "--model", "fake", ASKED)
    files = {".pi/agent/models.json": json.dumps(settings)}
    return Client(command, ("bash", {"command": HELLO}), ("read", {"path": "red.png"}), files)


def qwen(kind: str, base: str = "@URL/v1") -> Client:
    name = "ANTHROPIC" if kind == "anthropic" else "OPENAI"
    variables = {f"{name}_API_KEY": "x", f"{name}_BASE_URL": base, f"{name}_MODEL": "fake"}
    command = ("qwen", "--yolo", "--auth-type", kind, "--model", "fake", ASKED)
    shell = ("run_shell_command", {"command": HELLO, "is_background": False})
    picture = ("read_file", {"file_path": "@HOME/work/red.png"})
    return Client(command, shell, picture, variables=variables, shows=False)  # not to a model that it does not know


def kimi() -> Client:
    variables = {"KIMI_MODEL_NAME": "fake", "KIMI_MODEL_API_KEY": "x", "KIMI_MODEL_BASE_URL": "@URL/v1", "KIMI_CODE_NO_AUTO_UPDATE": "1"}
    variables["KIMI_MODEL_PROVIDER_TYPE"] = "openai"
    command = ("kimi", "--prompt", ASKED)
    return Client(command, ("Bash", {"command": HELLO}), ("ReadMediaFile", {"path": "red.png"}), {}, variables)


def continue_cli(provider: str, base: str = "@URL/v1") -> Client:
    settings = f"""name: test
version: 0.0.1
schema: v1
models:
  - {{name: fake, provider: {provider}, model: fake, apiBase: "{base}", apiKey: x, roles: [chat], capabilities: [tool_use]}}
"""
    command = ("cn", "-p", "--config", "@HOME/continue.yaml", "--allow", "Bash", ASKED)
    return Client(command, ("Bash", {"command": HELLO}), None, {"continue.yaml": settings}, thinks=False)


def library(name: str, *arguments: str, thinks: bool = True, shows: bool = True) -> Client:
    """A script of this folder. Python finds it there, node only beside the packages."""
    shell, picture = ("shell", {"command": HELLO}), ("picture", dict[str, Any]())
    if name.endswith(".mjs"):
        files = {f"work/{name}": (SCRIPTS / name).read_text()}
        return Client(("node", name, "@URL", *arguments), shell, picture, files, thinks=thinks, shows=shows)
    return Client(("python", str(SCRIPTS / name), "@URL", *arguments), shell, picture, thinks=thinks, shows=shows)


APIS = ("chat", "responses", "messages")
AISDK = [(api, kind) for api in ("chat", "compatible", "responses", "messages") for kind in ("whole", "stream")]
CLIENTS = {
    "codex-responses": codex(),
    "claude-code-messages": claude(),
    "opencode-chat": opencode("@ai-sdk/openai-compatible"),
    "opencode-responses": opencode("@ai-sdk/openai"),
    "opencode-messages": opencode("@ai-sdk/anthropic"),
    "pi-chat": pi("openai-completions"),
    "pi-responses": pi("openai-responses"),
    "pi-messages": pi("anthropic-messages", "@URL"),
    "qwen-code-chat": qwen("openai"),
    "qwen-code-responses": qwen("openai-responses"),
    "qwen-code-messages": qwen("anthropic", "@URL"),
    "kimi-code-chat": kimi(),
    "continue-chat": continue_cli("openai"),
    **{f"ai-sdk-{api}-{kind}": library("aisdk.mjs", api, kind, thinks=api not in ("chat", "responses")) for api, kind in AISDK},
    **{f"langchain-{api}": library("langchain_loop.py", api, thinks=api == "messages") for api in APIS},
    **{f"openai-agents-{api}": library("openai_agents_loop.py", api, thinks=api != "chat", shows=api != "chat") for api in APIS[:2]},
    **{f"pydantic-ai-{api}": library("pydantic_ai_loop.py", api) for api in APIS},
    **{f"inspect-ai-{api}": library("inspect_loop.py", api) for api in APIS},
}
