"""Prefix affinity: requests whose prompts begin alike go to the engine that has computed the beginning."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq

from mtpserve.cache.keys import Key, extend, root
from mtpserve.core.request import Request

BLOCK = 64  # tokens of a prompt that are remembered together
REMEMBERED = 1 << 16  # blocks


class Affinity:
    """The engine that computed the beginning of each prompt, for the last REMEMBERED blocks."""

    def __init__(self) -> None:
        self._owner: OrderedDict[Key, int] = OrderedDict()

    def keys(self, request: Request) -> list[Key]:
        keys: list[Key] = []
        adapter = b"" if request.lora is None else str(request.lora.lora_int_id).encode()
        extend(keys, root(adapter, request.salt), request.prompt, len(request.prompt), BLOCK)
        return keys

    def find(self, keys: Seq[Key]) -> int | None:
        """Returns the engine with the longest beginning; None if no engine has one."""
        engine_number = None
        for key in keys:
            owner = self._owner.get(key)
            if owner is None:
                break
            engine_number = owner
        return engine_number

    def remember(self, keys: Seq[Key], number: int) -> None:
        for key in keys:
            self._owner[key] = number
            self._owner.move_to_end(key)
        while len(self._owner) > REMEMBERED:
            self._owner.popitem(last=False)

    def forget(self, number: int | None = None) -> None:
        """Drops the blocks of one engine; of all engines for None."""
        self._owner = OrderedDict(
            (key, owner) for key, owner in self._owner.items() if number is not None and owner != number
        )
