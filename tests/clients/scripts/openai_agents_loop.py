"""A run of openai-agents with the server at the address given, over the API given. Prints what the model said last."""

from __future__ import annotations

import base64
import sys
from pathlib import Path

from agents import (
    Agent,
    AgentsException,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    ToolOutputImage,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI


@function_tool
def shell(command: str) -> str:
    """Runs it."""
    return "hello-42"


@function_tool
def picture() -> ToolOutputImage:
    """Shows it."""
    return ToolOutputImage(image_url="data:image/png;base64," + base64.b64encode(Path("red.png").read_bytes()).decode())


set_tracing_disabled(True)
url, api = sys.argv[1:3]
kind = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}[api]
model = kind(model="fake", openai_client=AsyncOpenAI(base_url=url + "/v1", api_key="x", max_retries=0))
agent = Agent(name="a", model=model, tools=[shell, picture])
try:
    print(Runner.run_sync(agent, "Say hello with the shell, then look at the picture.", max_turns=8).final_output)
except AgentsException as error:
    print("ended:", error)
