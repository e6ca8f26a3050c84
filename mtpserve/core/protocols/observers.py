"""Who hears what happens in an engine."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol


class CacheObserver(Protocol):
    """Hears what becomes of the prefix cache's pages. `tier`: "device", "host" or "disk". It is called
    between steps and must be quick."""

    def stored(self, keys: Seq[bytes], parent: bytes | None, tokens: Seq[int], tier: str) -> None:
        """Consecutive pages can be found from now on, with these tokens after the page `parent` (None: the
        first of a text)."""
        ...

    def removed(self, keys: Seq[bytes], tier: str) -> None: ...

    def cleared(self) -> None:
        """All tiers are empty."""
        ...

    def publish(self) -> None:
        """A step is over: what it has changed may be passed on."""
        ...

    def close(self) -> None:
        """The engine ends."""
        ...
