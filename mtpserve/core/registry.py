"""Objects by name that are imported only when they are used: listing the names imports nothing."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar, cast

T = TypeVar("T")


class Registry(Generic[T]):
    """`entries` maps a name to "module:attribute", an object of type T. `get` raises KeyError listing the
    known names."""

    def __init__(self, kind: str, entries: dict[str, str]) -> None:
        self.kind = kind
        self.entries = dict(entries)

    def names(self) -> list[str]:
        return sorted(self.entries)

    def get(self, name: str) -> T:
        if name not in self.entries:
            raise KeyError(f"unknown {self.kind} {name!r}; known: {', '.join(self.names())}")
        module, attribute = self.entries[name].split(":")
        return cast(T, getattr(importlib.import_module(module), attribute))

    @contextmanager
    def extended(self, name: str, target: str) -> Iterator[None]:
        """One more entry for the duration of the context, for plug-ins and tests."""
        if name in self.entries:
            raise ValueError(f"{self.kind} {name!r} exists already: {self.entries[name]}")
        self.entries[name] = target
        try:
            yield
        finally:
            del self.entries[name]
