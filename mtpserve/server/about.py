"""What the server says of itself and its model: health, version, launch options. It generates nothing and changes nothing."""

from __future__ import annotations

from dataclasses import asdict
from time import gmtime, strftime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mtpserve import __version__
from mtpserve.core.request import EngineStats
from mtpserve.server.http.errors import JSON
from mtpserve.server.service import Service


async def health(request: Request) -> Response:
    """200 while new requests are taken; 503 while the model loads, while the server drains, and once the engine is dead."""
    service: Service = request.app.state.service
    service.check_alive()
    return JSON({"status": "ok"})


async def version() -> Response:
    """The version of mtpserve."""
    return JSON({"version": __version__})


def model_object(service: Service, name: str) -> dict[str, Any]:
    """`root` is where vLLM's clients look for the tokenizer."""
    card = service.client.card
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "mtpserve",
        "root": str(service.engine_config.model.directory.absolute()),
        "parent": None,
        "max_model_len": card.context_length,
        "speculative_steps": card.speculative_steps,
        "synthetic_acceptance": card.synthetic_acceptance,
    }


def model_for_anthropic(service: Service, name: str) -> dict[str, Any]:
    card = service.client.card
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": strftime("%Y-%m-%dT%H:%M:%SZ", gmtime(service.created)),
        "max_input_tokens": card.context_length,
        "max_tokens": card.context_length,
    }


def from_anthropic(request: Request) -> bool:
    """Its clients ask for models under OpenAI's paths, and are told apart by a header that they all send."""
    return "anthropic-version" in request.headers


async def models(request: Request) -> Response:
    """The model that is served, once under each of its names; in Anthropic's form for its clients."""
    service: Service = request.app.state.service
    names = service.names
    if from_anthropic(request):
        listed = [model_for_anthropic(service, name) for name in names]
        return JSON({"data": listed, "has_more": False, "first_id": names[0], "last_id": names[-1]})
    return JSON({"object": "list", "data": [model_object(service, name) for name in names]})


async def model(request: Request, id: str) -> Response:
    """The model that is served; 404 for any other name."""
    service: Service = request.app.state.service
    service.check_model(id)
    return JSON(model_for_anthropic(service, id) if from_anthropic(request) else model_object(service, id))


async def model_info(request: Request) -> Response:
    """The model in SGLang's words; its clients load the tokenizer from the path, so the paths are whole."""
    service: Service = request.app.state.service
    card, model = service.client.card, service.engine_config.model
    return JSON(
        {
            "model_path": str(model.directory.absolute()),
            "tokenizer_path": str(model.tokenizer_directory.absolute()),
            "served_model_name": card.name,
            "is_generation": True,
            "max_model_len": card.context_length,
            "vocab_size": card.vocab,
            "eos_token_ids": list(card.eos_ids),
            "speculative_steps": card.speculative_steps,
            "lossy": card.lossy,
            "synthetic_acceptance": card.synthetic_acceptance,
            "sampling_defaults": service.tokenizer.defaults,
        }
    )


async def server_info(request: Request) -> Response:
    """The launch options, those that are secret left out, and how the engine has been doing since it started."""
    service: Service = request.app.state.service
    options: dict[str, Any] = {}
    for section in asdict(service.engine_config).values():
        options |= section
    options |= service.server_config.public()
    card, stats = service.client.card, service.client.stats()
    said = {"version": __version__, "lossy": card.lossy, "synthetic_acceptance": card.synthetic_acceptance}
    return JSON({**options, **said, "internal_states": [state(stats)]})


def state(stats: EngineStats) -> dict[str, Any]:
    """`avg_spec_accept_length` is SGLang's name: tokens per verification, null before the first one."""
    drafts = stats.drafts_total
    return {
        "avg_spec_accept_length": 1 + stats.accepted_tokens_total / drafts if drafts else None,
        "running": stats.running,
        "waiting": stats.waiting,
        "pages_used": stats.pages_used,
        "pages_total": stats.pages_total,
        "steps_total": stats.steps_total,
        "prompt_tokens_total": stats.prompt_tokens_total,
        "generation_tokens_total": stats.generation_tokens_total,
    }
