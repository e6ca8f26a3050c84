"""A model that does what the prompts of llmprobe want, as far as the front end shows in it: JSON of the schema, calls, names, numbers."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

from mtpserve.core.request import Request, TokenEvent
from mtpserve.text.tokenizer import Tokenizer
from tests.server.speaking import SpeakingClient

ANSWERS = {
    "What is 2 + 2": "4",
    "Add 3 to": "7",
    "17 * 3": "51",
    "Count from 1": "1 2 3 4 5",
    "capital of France": "Paris",
    "alpha beta": "alpha beta gamma",
    "your role": "archivist",
}


class Characters:
    """A tokenizer that finds no special tokens in a text, as a constraint does."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def encode(self, text: str, *, special: bool) -> list[int]:
        return [token for character in text for token in self.tokenizer.encode(character, special=special)]


class ObedientClient(SpeakingClient):
    """Says what `answer` makes of the prompt, after a thought where the template leaves room for one."""

    async def submit(self, request: Request) -> AsyncIterator[list[TokenEvent]]:
        prompt = self.tokenizer.decode(request.prompt, skip_special_tokens=False)
        thought = "<think>I think about it, and then once more about it.</think>" if prompt.endswith("):") else ""
        grammar = request.sampling.grammar
        schema = json.loads(grammar.text or "{}") if grammar is not None and grammar.kind.startswith("json") else None
        tokenizer: Any = self.tokenizer if schema is None else Characters(self.tokenizer)
        turn = SpeakingClient(tokenizer, [thought + answer(prompt, schema)])
        async for events in turn.submit(request):
            yield events


def answer(prompt: str, schema: dict[str, Any] | None) -> str:
    tools = [json.loads(line.removeprefix("tool: "))["function"] for line in prompt.splitlines() if line.startswith("tool: {")]
    asked = prompt.rsplit("user: ", 1)[-1].rsplit("\nassistant", 1)[0]
    if schema is not None:
        return json.dumps(instance(schema), ensure_ascii=False)
    if tools and "\ntool" not in asked and "Hi" not in asked:
        return "\n".join(call(tool, asked) for tool in tools[: 2 if "both" in asked else 1])
    if repeated := re.search(r"(?:nothing else|exactly): (.+)", asked):
        return repeated[1]
    if prompt.endswith(" is Par"):
        return "is."
    if name := re.search(r"[Mm]y name is (\w+)", prompt):
        return name[1]
    return next((text for words, text in ANSWERS.items() if words in asked), "Hello.")


def call(tool: dict[str, Any], asked: str) -> str:
    arguments = instance(tool["parameters"])
    if "content" in arguments:
        arguments |= {"path": "notes.md", "content": asked.split("exactly:\n")[-1]}
    return f"<tool_call>\n{json.dumps({'name': tool['name'], 'arguments': arguments})}\n</tool_call>"


def instance(schema: dict[str, Any]) -> Any:
    if "enum" in schema:
        return schema["enum"][0]
    match schema.get("type", "object"):
        case "object":
            return {name: instance(inner) for name, inner in schema.get("properties", {"name": {"type": "string"}}).items()}
        case "array":
            return [instance(schema["items"])]
        case "integer" | "number":
            return 4
        case "boolean":
            return True
    return "Paris"
