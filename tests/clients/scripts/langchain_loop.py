"""A tool loop of LangChain with the server at the address given, over the API given. Prints what the model said last."""

from __future__ import annotations

import base64
import sys
from pathlib import Path
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def shell(command: str) -> str:
    """Runs it."""
    return "hello-42"


@tool
def picture() -> list[dict[str, Any]]:
    """Shows it."""
    return [{"type": "image", "base64": base64.b64encode(Path("red.png").read_bytes()).decode(), "mime_type": "image/png"}]


url, api = sys.argv[1:3]
options: dict[str, Any] = {"model": "fake", "api_key": "x", "max_retries": 0, "max_tokens": 4096}
model: Any = {
    "chat": lambda: ChatOpenAI(base_url=url + "/v1", **options),
    "responses": lambda: ChatOpenAI(base_url=url + "/v1", use_responses_api=True, **options),
    "messages": lambda: ChatAnthropic(base_url=url, **options),
}[api]()
bound = model.bind_tools([shell, picture])
messages: list[Any] = [HumanMessage("Say hello with the shell, then look at the picture.")]
for _ in range(8):
    chunks = list(bound.stream(messages))
    answer = sum(chunks[1:], chunks[0])
    messages.append(answer)
    messages += [ToolMessage(f"Error: {call['error']}", tool_call_id=call["id"]) for call in answer.invalid_tool_calls]
    for call in answer.tool_calls:
        try:
            messages.append({"shell": shell, "picture": picture}[call["name"]].invoke(call))
        except ValueError as error:  # pydantic's
            messages.append(ToolMessage(f"Error: {error}", tool_call_id=call["id"]))
    if messages[-1] is answer:
        break
print(messages[-1].text)
