"""The OpenAPI document is as strict as the server: no request that it allows is refused, none that it forbids is answered, and every answer
is one that it describes. schemathesis makes the requests, at random and at each bound, the same ones in every run."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
from fastapi import FastAPI

from mtpserve.config import ServerConfig
from mtpserve.server.app import BODIES, ROUTES, create_app
from mtpserve.server.openai.token_generation import TokenSampling
from mtpserve.server.schema.unsupported import REFUSED
from mtpserve.text.tokenizer import Tokenizer
from tests import selection
from tests.server.fake_client import FakeClient

schemathesis = pytest.importorskip("schemathesis")
builder = pytest.importorskip("schemathesis.generation.hypothesis.builder")  # its plugin cannot wait for a fixture
checks = pytest.importorskip("schemathesis.specs.openapi.checks")

# What no schema says: the answer is 400, or 408, with the documented error.
BEYOND = {
    "lora_path must be the name of an adapter": "which adapters are loaded",
    "needs a server with --enable-lora": "how the server was started",
    "context_length_exceeded": "texts are counted in tokens, and the prompt's and the answer's together",
    "deadline_exceeded": "a timeout that the request itself has set",
    "previous_response_not_found": "what the server has kept",
    r"chat_template_kwargs\..*no such variable": "what the model's own template reads",
    r"tool_choice names .*none of the tools|is there twice": "names in one field that have to stand in another, or once in one",
    r"each constrain the output": "the form of the output is said in one of ten fields",
    r"tool_choice and another constraint": "or by a demanded call",
    r"are the same thing: give one of them": "a field inside of one, and another one beside it",
    r"cannot be enforced": "words of JSON Schema that no grammar can follow",
    r"cannot be handed on": "integers of any size",
    r"names token .* twice|is not in the vocabulary": "token ids as keys",
    r"is empty": "a conversation of reasoning alone, and a text that has no tokens",
    r"there is no function beside it": "tools that only other vendors' servers run are left out beside functions",
    r"is not JSON|must be a JSON object": "JSON inside of a string",
    r"min_(new_)?tokens must be at most|best_of": "two numbers compared",
    r"one for each of|must be the same for all prompts|needs return_logprob": "lists as long as the list of prompts",
    r"needs a last message of role assistant|need their tool_result blocks": "an item by its place in a list",
    r"No tool call found|Item with id": "an item that names another one",
}
EXAMPLES, SEED = 10 if selection.ALL else 2, 1
# What takes what completions and chat completions take; and what needs a folder that the server was started with.
OTHERWISE = ("/invocations", "/start_profile")
MANY = 1000


def tried(document: dict[str, Any]) -> dict[str, Any]:
    """The part of a document that is tried: every field in one body. Those that are refused by name have a test of
    their own, as have lists of thousands of messages."""
    document = copy.deepcopy(document)
    schemas = document["components"]["schemas"]
    first = copy.deepcopy(schemas["CompletionRequest"]["properties"])
    for body in (body for body in (*BODIES, TokenSampling) if body.column is not None):
        schema = schemas[body.__name__]
        tried_there = {} if body.__name__ == "CompletionRequest" else first
        fields = schema["properties"]
        dropped = {name for name in fields if name in REFUSED[body.column] or fields[name] == tried_there.get(name)}
        schema["properties"] = {name: field for name, field in fields.items() if name not in dropped}
        schema["allOf"] = [rule for rule in schema.get("allOf", []) if not named(rule) <= dropped]
        for list_of in (field for field in schema["properties"].values() for field in field.get("anyOf", [field])):
            if list_of.get("maxItems", 0) > MANY:
                del list_of["maxItems"]
    return document


def named(rule: dict[str, Any]) -> set[str]:
    """The fields that a rule is about."""
    return {name for part in rule.get("anyOf", [rule]) for name in part.get("properties", {})}


@pytest.fixture(scope="module")
def app(tokenizer: Tokenizer) -> FastAPI:
    """That knows how calls are written: else most requests with tools end at once."""
    return create_app(FakeClient(), tokenizer, server_config=ServerConfig(tool_call_parser="hermes", reasoning_parser="qwen3"))


@pytest.fixture(scope="module")
def api(app: FastAPI) -> Any:
    config = {"generation": {"deterministic": True, "max-examples": EXAMPLES, "allow-x00": False, "database": "none"}}
    schema = schemathesis.openapi.from_dict(tried(app.openapi()), config=schemathesis.config.SchemathesisConfig.from_dict(config))
    schema.app = app
    return schema


def tried_case(case: Any) -> None:
    response = case.call()
    beyond = response.status_code in (400, 408) and any(re.search(words, response.text) for words in BEYOND)
    case.validate_response(response, excluded_checks=[checks.positive_data_acceptance] if beyond else [])


@pytest.mark.parametrize(("method", "path"), [(method, paths[0]) for method, paths, *_ in ROUTES if paths[0] not in OTHERWISE])
def test_the_document_is_as_strict_as_the_server(api: Any, method: str, path: str) -> None:
    operation = api[path.replace(":path", "")][method]
    modes = [builder.HypothesisTestMode.COVERAGE, builder.HypothesisTestMode.FUZZING]  # each bound, and at random
    settings = api.config.get_hypothesis_settings(operation=operation, phase="fuzzing")
    config = builder.HypothesisTestConfig(project=api.config, modes=modes, settings=settings, seed=SEED)
    builder.create_test(operation=operation, test_func=tried_case, config=config)()
