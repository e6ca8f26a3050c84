"""The OpenAPI document of a server: FastAPI's, with the bodies' schemas as pydantic has them, the answers' as
their Structs do, and the numbers that only this server knows, such as its model's context."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from mtpserve.server.chat.service import MAX_BYTES_PER_TOKEN, SGLANGS_NAME, Service
from mtpserve.server.http.rendering import REFERENCE
from mtpserve.server.schema.shapes import NULL, SERVER, Schema
from mtpserve.server.schema.texts import EXAMPLES

NOTHING = [None, False]
NO_ROLE: Schema = {
    "properties": {
        "bootstrap_room": NULL,
        "kv_transfer_params": {
            "anyOf": [
                NULL,
                {
                    "type": "object",
                    "properties": {
                        name: {"enum": NOTHING} for name in ("do_remote_decode", "do_remote_prefill")
                    },
                },
            ]
        },
    }
}


def schemas_of(bodies: list[type[BaseModel]]) -> dict[str, Schema]:
    """Returns the schemas by name. FastAPI's own lack what its records have no fields for, and round large
    numbers."""
    _, definitions = models_json_schema(
        [(body, "validation") for body in bodies], ref_template=REFERENCE.replace("name", "model")
    )
    schemas = dict(definitions.get("$defs", {}))
    for name in schemas.keys() & EXAMPLES.keys():
        schemas[name]["examples"] = [EXAMPLES[name]]  # pydantic sorts their fields by name
    return schemas


def limits(service: Service) -> dict[str, Schema]:
    """What takes the place of each SERVER."""
    card, config = service.client.card, service.engine_config
    max_logprobs, clamps = service.server_config.max_logprobs, service.server_config.clamp_max_tokens
    return {
        "alternatives": {} if max_logprobs < 0 else {"maximum": max_logprobs},
        "token": {"maximum": card.vocab - 1},
        "length": {"maximum": card.context_length - 1},
        "clamped": {} if clamps else {"maximum": card.context_length - 1},
        "text": {"maxLength": MAX_BYTES_PER_TOKEN * card.context_length},
        "model": {"enum": [*service.names, SGLANGS_NAME, *service.loras]},
        "rank": {"maximum": config.parallel.data_parallel_size - 1},
        "steps": {"maximum": card.speculative_steps},
        "priority": {} if config.scheduler.scheduling_policy == "priority" else {"enum": [0]},
        "role": NO_ROLE if config.disaggregation.role is None else {},
    }


def filled(schema: Any, bounds: dict[str, Schema]) -> Any:
    """A copy with these in their places."""
    if isinstance(schema, dict):
        return {key: filled(value, bounds) for key, value in schema.items() if key != SERVER} | bounds.get(
            schema.get(SERVER, ""), {}
        )
    return [filled(item, bounds) for item in schema] if isinstance(schema, list) else schema


class Server(FastAPI):
    """`answers`: the schemas of what routes answer, by name; `bodies`: what they take."""

    answers: dict[str, Schema]
    bodies: list[type[BaseModel]]

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            document = super().openapi()
            document["components"]["schemas"] |= schemas_of(self.bodies) | self.answers
            self.openapi_schema = filled(document, limits(self.state.service))
        return self.openapi_schema or {}
