"""A task of inspect-ai with the server at the address given, over the API given. Prints what the model said last."""

from __future__ import annotations

import base64
import sys
from pathlib import Path
from typing import Any

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ContentImage, GenerateConfig, get_model
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool


@tool
def shell() -> Any:
    async def execute(command: str) -> str:
        """Runs it.

        Args:
            command: what to run
        """
        return "hello-42"

    return execute


@tool
def picture() -> Any:
    async def execute() -> ContentImage:
        """Shows it."""
        return ContentImage(image="data:image/png;base64," + base64.b64encode(Path("red.png").read_bytes()).decode())

    return execute


url, api = sys.argv[1:3]
if api == "messages":
    model = get_model("anthropic/fake", base_url=url, api_key="x", config=GenerateConfig(max_tokens=4096))
else:
    model = get_model(
        "openai-api/mtpserve/fake",
        base_url=url + "/v1",
        api_key="x",
        responses_api=api == "responses",
        config=GenerateConfig(max_tokens=4096),
    )
sample = Sample("Say hello with the shell, then look at the picture.")
task = Task([sample], solver=[use_tools(shell(), picture()), generate()])
[log] = eval(task, model=model, display="none", log_dir="logs", retry_on_error=0)
assert log.status == "success" and log.samples is not None, log.error
print(log.samples[0].output.completion)
