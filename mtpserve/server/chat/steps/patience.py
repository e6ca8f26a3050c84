"""How long a request waits for the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from time import perf_counter
from typing import TypeVar

from mtpserve.core.errors import EngineBusy, MTPServeError
from mtpserve.server.http.errors import DeadlineExceeded

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a request waits for the engine, in seconds from its arrival: for the first token, and
    altogether. None: for ever."""

    first: float | None
    whole: float | None
    arrival: float

    def limit(self, started: bool) -> float | None:
        return self.whole if started or self.first is None else shorter(self.first, self.whole)

    async def wait(self, coming: Awaitable[T], limit: float, started: bool) -> T:
        """Raises EngineBusy or DeadlineExceeded where it takes longer than `limit`."""
        try:
            async with asyncio.timeout_at(
                asyncio.get_running_loop().time() + limit - (perf_counter() - self.arrival)
            ):
                return await coming
        except TimeoutError:
            raise self.error(started) from None

    def error(self, started: bool) -> MTPServeError:
        if started or self.limit(started) == self.whole:
            return DeadlineExceeded(f"the request took more than {self.whole:g} s")
        return EngineBusy(f"no token within {self.first:g} s: too many requests are waiting")


def shorter(one: float | None, other: float | None) -> float | None:
    return min((limit for limit in (one, other) if limit is not None), default=None)
