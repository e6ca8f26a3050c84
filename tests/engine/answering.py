"""The part of a fake engine that answers operators' calls."""

from __future__ import annotations

from functools import cached_property

from mtpserve.core.errors import EngineDead
from mtpserve.core.protocols.control import Calls, Reply


class Answering:
    number: int

    @property
    def dead(self) -> str | None:
        raise NotImplementedError

    @cached_property
    def replies(self) -> list[Reply]:
        """To the next calls, the last one first."""
        return []

    @cached_property
    def calls(self) -> list[Calls]:
        return []

    async def control(self, call: Calls) -> Reply:
        if self.dead is not None:
            raise EngineDead(self.dead)
        self.calls.append(call)
        return self.replies.pop() if self.replies else Reply(values={"engine": self.number})
