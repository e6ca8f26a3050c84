"""The responses that /v1/responses keeps, in memory and bounded: the oldest go first. Nothing survives the
server."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from mtpserve.server.chat.conversation import ChatMessage
from mtpserve.server.http.errors import NotStored
from mtpserve.server.openai.responses.response_objects import ListedItem, ResponseObject

MAX_RESPONSES = 1024
MAX_CHARACTERS = 32 << 20


@dataclass(frozen=True, slots=True)
class Stored:
    """A response's object, and the conversation up to its end, instructions left out: they are not
    inherited."""

    object: ResponseObject
    conversation: list[ChatMessage]
    items: list[ListedItem]  # what it was made from, which is the same without its own output

    @property
    def characters(self) -> int:
        return sum(message.characters for message in self.conversation)


@dataclass(slots=True)
class ResponseStore:
    """Ids are random: a client that knows one may read the response. The newest one is kept, whatever its
    size."""

    responses: int = MAX_RESPONSES
    characters: int = MAX_CHARACTERS  # the sum over all conversations
    _by_id: OrderedDict[str, Stored] = field(default_factory=OrderedDict)
    _characters: int = 0

    def put(self, id: str, stored: Stored) -> None:
        """Stores a response, also in place of the one with this id."""
        self._drop(id)
        self._by_id[id] = stored
        self._characters += stored.characters
        while len(self._by_id) > self.responses or (
            self._characters > self.characters and len(self._by_id) > 1
        ):
            self._drop(next(iter(self._by_id)))

    def __contains__(self, id: str) -> bool:
        return id in self._by_id

    def get(self, id: str, field: str) -> Stored:
        """Raises NotStored, for the request's `field`."""
        if id not in self._by_id:
            raise NotStored(
                f"the response {id[:50]!r} is not kept: it never was, or others have taken its place", field
            )
        return self._by_id[id]

    def delete(self, id: str) -> None:
        self.get(id, "response_id")
        self._drop(id)

    def _drop(self, id: str) -> None:
        stored = self._by_id.pop(id, None)
        self._characters -= 0 if stored is None else stored.characters
