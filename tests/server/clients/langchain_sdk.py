"""What LangChain makes of the server at the address given, over chat completions and over responses. Prints one JSON object."""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

ASKED = [SystemMessage("be brief"), HumanMessage("def read_lines(path):")]


class Form(BaseModel):
    """A form."""

    ok: bool
    kind: Literal["a", "b"]


@tool
def look(a: bool) -> str:
    """Look something up."""
    return "found"


def over(**options: Any) -> dict[str, Any]:
    def model(max_tokens: int) -> ChatOpenAI:
        return ChatOpenAI(
            base_url=sys.argv[1] + "/v1", api_key="none", model="demo", temperature=0, max_retries=0, max_tokens=max_tokens,
            stream_usage=True, **options,
        )  # fmt: skip

    whole = model(12).invoke(ASKED)
    chunks = list(model(12).stream(ASKED))
    call = model(100).bind_tools([look], tool_choice="look", strict=True).invoke(ASKED)
    return {
        "tokens": whole.usage_metadata["output_tokens"],
        "same_text": "".join(chunk.text for chunk in chunks) == whole.text != "",
        "streamed_tokens": [chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata],
        "call": [(call["name"], type(call["args"]["a"]).__name__) for call in call.tool_calls],
        "after_call": model(6).bind_tools([look]).invoke([*ASKED, call, look.invoke(call.tool_calls[0])]).usage_metadata["output_tokens"],
        "schema": type(model(100).with_structured_output(Form).invoke(ASKED)).__name__,
        "function": type(model(100).with_structured_output(Form, method="function_calling").invoke(ASKED)).__name__,
    }


print(json.dumps([over(), over(use_responses_api=True)]))
