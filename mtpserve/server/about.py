"""What the server says of itself and its model: health, version, launch options. It generates nothing and changes nothing."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mtpserve import __version__
from mtpserve.core.request import EngineStats
from mtpserve.server.errors import JSON
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
    card = service.client.card
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "mtpserve",
        "max_model_len": card.context_length,
        "speculative_steps": card.speculative_steps,
        "synthetic_acceptance": card.synthetic_acceptance,
    }


async def models(request: Request) -> Response:
    """The model that is served, once under each of its names."""
    service: Service = request.app.state.service
    return JSON({"object": "list", "data": [model_object(service, name) for name in service.names]})


async def model(request: Request, id: str) -> Response:
    """The model that is served; 404 for any other name."""
    service: Service = request.app.state.service
    service.check_model(id)
    return JSON(model_object(service, id))


async def model_info(request: Request) -> Response:
    """The model in SGLang's words."""
    service: Service = request.app.state.service
    card, model = service.client.card, service.engine_config.model
    return JSON(
        {
            "model_path": model.model,
            "tokenizer_path": model.tokenizer or model.model,
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
