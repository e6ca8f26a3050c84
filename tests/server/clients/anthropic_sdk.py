"""What Anthropic's library for Python makes of the server at the address given. Prints one JSON object."""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

import anthropic
from pydantic import BaseModel

client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0, timeout=60)
MESSAGES: list[Any] = [{"role": "user", "content": "def read_lines(path):"}]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
GREEDY: dict[str, Any] = {"model": "demo", "extra_body": {"temperature": 0}}  # the library has no such parameter any more
TOOL: dict[str, Any] = {"name": "look", "input_schema": SCHEMA}
found: dict[str, Any] = {}


class Form(BaseModel):
    ok: bool
    kind: Literal["a", "b"]


@anthropic.beta_tool
def look(a: bool) -> str:
    """Look something up.

    Args:
        a: which
    """
    return "found " + 20 * str(a)


found["models"] = [(model.type, model.id, model.created_at.year > 2000) for model in client.models.list()]
found["message"] = client.messages.create(**GREEDY, max_tokens=8, messages=MESSAGES).usage.output_tokens
with client.messages.stream(**GREEDY, max_tokens=8, messages=MESSAGES) as stream:
    text = "".join(stream.text_stream)
    found["same_text"] = stream.get_final_text() == text != ""
called = client.messages.create(**GREEDY, max_tokens=100, messages=MESSAGES, tools=[TOOL], tool_choice={"type": "tool", "name": "look"})
block: Any = called.content[0]
found["call"] = [called.stop_reason, block.name, type(block.input["a"]).__name__]
answered = [
    *MESSAGES,
    {"role": "assistant", "content": called.content},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "1"}]},
]
found["after_call"] = client.messages.create(**GREEDY, max_tokens=4, messages=answered, tools=[TOOL]).usage.output_tokens
with client.messages.stream(
    **GREEDY, max_tokens=100, messages=MESSAGES, tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": True}
) as stream:
    found["streamed_call"] = [type(block.input["a"]).__name__ for block in stream.get_final_message().content]
choice: Any = {"type": "any", "disable_parallel_tool_use": True}
runner = client.beta.messages.tool_runner(**GREEDY, max_tokens=60, messages=MESSAGES, tools=[look], max_iterations=2, tool_choice=choice)
steps = list(runner)
found["runner"] = [step.stop_reason for step in steps]
whole = [step.usage.input_tokens + (step.usage.cache_read_input_tokens or 0) for step in steps]
found["runner_sends_all"] = whole[1] > whole[0] + 20
found["cached"] = [steps[1].usage.cache_creation_input_tokens, (steps[1].usage.cache_read_input_tokens or 0) > 0]
found["parsed"] = type(client.messages.parse(**GREEDY, max_tokens=100, messages=MESSAGES, output_format=Form).parsed_output).__name__
thinking = client.messages.create(**GREEDY, max_tokens=8, messages=MESSAGES, thinking={"type": "adaptive"})
found["thinking"] = thinking.usage.output_tokens
try:
    client.messages.create(**GREEDY, max_tokens=0, messages=MESSAGES)
except anthropic.BadRequestError as error:
    found["refused"] = "max_tokens" in str(error)
print(json.dumps(found))
