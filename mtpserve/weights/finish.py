"""Parts of a module are finished (packed, made int8) as soon as all of their weights are there, so that what
is not packed in place never exists twice for more than one part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from torch import nn


class Finisher:
    """Calls each submodule's `finish_loading()` once, a part's before the whole's. `fills`: the name of a
    parameter for each time that it, or a region of it, will be filled."""

    def __init__(self, module: nn.Module, fills: Iterable[str] = ()) -> None:
        inner_first = reversed(list(module.named_modules()))
        self.waiting = {
            name: finish
            for name, part in inner_first
            if (finish := getattr(part, "finish_loading", None)) is not None
        }
        self.left = Counter(whole for name in fills for whole in wholes(name) if whole in self.waiting)

    def filled(self, name: str) -> list[str]:
        """→ the parts that are finished now."""
        done = []
        for whole in wholes(name):
            if whole not in self.waiting:
                continue
            self.left[whole] -= 1
            if self.left[whole] == 0 and not any(inside(part, whole) for part in self.waiting):
                self.waiting.pop(whole)()
                done.append(whole)
        return done

    def rest(self) -> None:
        """Parts without weights of their own, and what they are parts of."""
        for finish in self.waiting.values():
            finish()
        self.waiting = {}


def wholes(name: str) -> Iterator[str]:
    """What a parameter is in, from the inside: a.b.weight → a.b, a and the whole module."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def inside(name: str, whole: str) -> bool:
    return name != whole and (not whole or name.startswith(f"{whole}."))
