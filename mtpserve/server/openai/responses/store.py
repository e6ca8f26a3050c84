"""The responses that /v1/responses keeps, in memory and bounded: the oldest go first. Nothing survives the
server."""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass, field

from mtpserve.server.chat.conversation import ChatMessage
from mtpserve.server.http.errors import NotStored
from mtpserve.server.openai.responses.response_objects import AnyItem, ListedItem, ResponseObject

RANDOM = re.compile(r"[a-z]{2,4}_[0-9a-f]{32}")  # an id that this server made
MAX_RESPONSES = 1024
MAX_CHARACTERS = 32 << 20


@dataclass(frozen=True, slots=True)
class Stored:
    """A response's object, and the conversation up to its end, instructions left out: they are not
    inherited."""

    object: ResponseObject
    conversation: list[ChatMessage]
    items: list[ListedItem]  # what it was made from, which is the same without its own output

    def item_ids(self) -> set[str]:
        """Returns the items' ids that nobody can guess: not those that clients gave them."""
        ids = {item.id for item in (*self.object.output, *self.items)}
        return {id for id in ids if RANDOM.fullmatch(id)}

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
    _holders: dict[str, set[str]] = field(default_factory=dict)  # responses by the ids of their items

    def put(self, id: str, stored: Stored) -> None:
        """Stores a response, also in place of the one with this id."""
        self._drop(id)
        self._by_id[id] = stored
        for item_id in stored.item_ids():
            self._holders.setdefault(item_id, set()).add(id)
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

    def item(self, id: str) -> ListedItem | AnyItem | None:
        """Returns the item with this id, of any response; None if there is none."""
        for holder in self._holders.get(id, ()):
            stored = self._by_id[holder]
            return next(item for item in (*stored.object.output, *stored.items) if item.id == id)
        return None

    def delete(self, id: str) -> None:
        self.get(id, "response_id")
        self._drop(id)

    def _drop(self, id: str) -> None:
        stored = self._by_id.pop(id, None)
        if stored is None:
            return
        self._characters -= stored.characters
        for item_id in stored.item_ids():
            self._holders[item_id].discard(id)
            if not self._holders[item_id]:
                del self._holders[item_id]
