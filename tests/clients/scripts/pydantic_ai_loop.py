"""A run of pydantic-ai with the server at the address given, over the API given. Prints what the model said last."""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic_ai import Agent, BinaryContent, UnexpectedModelBehavior
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

url, api = sys.argv[1:3]
model = {
    "chat": lambda: OpenAIChatModel("fake", provider=OpenAIProvider(base_url=url + "/v1", api_key="x")),
    "responses": lambda: OpenAIResponsesModel("fake", provider=OpenAIProvider(base_url=url + "/v1", api_key="x")),
    "messages": lambda: AnthropicModel("fake", provider=AnthropicProvider(base_url=url, api_key="x")),
}[api]()
agent = Agent(model, retries=4)


@agent.tool_plain
def shell(command: str) -> str:
    """Runs it."""
    return "hello-42"


@agent.tool_plain
def picture() -> BinaryContent:
    """Shows it."""
    return BinaryContent(Path("red.png").read_bytes(), media_type="image/png")


try:
    print(agent.run_sync("Say hello with the shell, then look at the picture.").output)
except UnexpectedModelBehavior as error:
    print("ended:", error)
