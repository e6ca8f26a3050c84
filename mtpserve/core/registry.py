"""Names to things that are imported only when asked for: listing what exists must not load it."""

from __future__ import annotations

import importlib
from typing import Any


class Registry:
    """`entries` maps a name to "module:attribute". Names are looked up as they are; `get` raises KeyError listing the known ones."""

    def __init__(self, kind: str, entries: dict[str, str]) -> None:
        self.kind = kind
        self.entries = dict(entries)

    def names(self) -> list[str]:
        return sorted(self.entries)

    def get(self, name: str) -> Any:
        if name not in self.entries:
            raise KeyError(f"unknown {self.kind} {name!r}; known: {', '.join(self.names())}")
        module, attribute = self.entries[name].split(":")
        return getattr(importlib.import_module(module), attribute)
