"""Routes for what other servers answer besides: SageMaker's one route for all, and those of models that give
vectors, which are refused."""

from __future__ import annotations

from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from mtpserve.server.chat.bodies import ChatRequest, CompletionRequest
from mtpserve.server.chat.service import Served
from mtpserve.server.http.errors import Unsupported
from mtpserve.server.openai.chat import chat
from mtpserve.server.openai.completions import completions


async def invocations(request: Request, service: Served, invocation: dict[str, Any]) -> Response:
    """Answer a request as SageMaker sends it. A chat completion where the body has `messages`, otherwise
    a completion."""
    try:
        if "messages" in invocation:
            return await chat(request, service, ChatRequest.model_validate(invocation))
        return await completions(request, service, CompletionRequest.model_validate(invocation))
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from error


async def no_vectors(request: Request) -> Response:
    """Refused: the models that are served here write text."""
    what = request.url.path.rpartition("/")[2]
    raise Unsupported(
        f"{what} is not supported: this server's models write text, and give no vectors or scores "
        f"of documents",
        None,
    )
