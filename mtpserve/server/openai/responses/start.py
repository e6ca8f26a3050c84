"""The beginning of a response, over HTTP and over a WebSocket alike."""

from __future__ import annotations

from collections.abc import Sequence

from mtpserve.server.chat.generation import create_generation
from mtpserve.server.chat.service import Service
from mtpserve.server.http.errors import PreviousNotStored, renamed
from mtpserve.server.openai.responses.items import response_input
from mtpserve.server.openai.responses.response_answer import ResponseAnswer
from mtpserve.server.openai.responses.response_body import RENAMED, InputTokensRequest, ResponsesRequest
from mtpserve.server.openai.responses.store import ResponseStore, Stored


def before_of(body: InputTokensRequest, stores: Sequence[ResponseStore]) -> Stored | None:
    """What the request goes on from, from the first of the stores that has it. Raises PreviousNotStored."""
    id = body.previous_response_id
    if not id:
        return None
    source_store = next((store for store in stores if id in store), None)
    if source_store is None:
        raise PreviousNotStored(
            f"the response {id[:50]!r} is not kept: send the whole conversation as input",
            "previous_response_id",
        )
    return source_store.get(id, "previous_response_id")


async def create_response(
    service: Service,
    body: ResponsesRequest,
    id: str,
    before: Stored | None,
    stores: Sequence[ResponseStore],
    sources: Sequence[ResponseStore],
    arrival: float,
    *,
    only_prompt: bool = False,
) -> ResponseAnswer:
    """A response that the engine has yet to be asked for; all checks of the request are made here. `stores`
    keep it; `sources` have the items that its input refers to. `only_prompt`: its prompt is computed, and
    nothing is written."""
    service.check_alive()
    body.check()
    offer = body.offer()
    with renamed(RENAMED | offer.places):
        conversation_input = response_input(before, body.input, sources)
        chat = body.chat(conversation_input.conversation, offer)
        if only_prompt:  # the engine computes a token for every prompt, which is then left out
            chat = chat.model_copy(update={"max_tokens": 1, "min_tokens": None})
        generation = await create_generation(service, chat, id, arrival)
    generation.choices[0].scores_only = only_prompt
    return ResponseAnswer(id, body, generation, stores, conversation_input, offer.members, only_prompt)
