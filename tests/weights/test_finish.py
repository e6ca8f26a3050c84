"""When the parts of a module are finished while it is loaded."""

from __future__ import annotations

import torch
from torch import nn

from mtpserve.weights.finish import Finisher


class Noted(nn.Module):
    def __init__(self, name: str, noted: list[str], **parts: nn.Module) -> None:
        super().__init__()
        self.name, self.noted = name, noted
        for part, module in parts.items():
            self.add_module(part, module)

    def finish_loading(self) -> None:
        self.noted.append(self.name)


class Filled(Noted):
    def __init__(self, name: str, noted: list[str]) -> None:
        super().__init__(name, noted)
        self.weight = nn.Parameter(torch.empty(2))


def test_a_part_is_finished_when_all_of_it_is_filled_and_before_the_whole() -> None:
    noted: list[str] = []
    inner = Noted("inner", noted, first=Filled("first", noted), second=Filled("second", noted))
    module = Noted("whole", noted, inner=inner, borrowed=Noted("borrowed", noted), last=Filled("last", noted))
    finisher = Finisher(module, ["inner.second.weight", "inner.first.weight", "inner.first.weight", "last.weight"])
    assert finisher.filled("inner.first.weight") == []  # a region of it
    assert finisher.filled("last.weight") == ["last"]
    assert finisher.filled("inner.first.weight") == ["inner.first"]
    assert finisher.filled("inner.second.weight") == ["inner.second", "inner"]
    assert noted == ["last", "first", "second", "inner"]  # the whole has a part that nothing fills
    finisher.rest()
    assert noted[4:] == ["borrowed", "whole"]


def test_names_that_begin_alike() -> None:
    noted: list[str] = []
    module = nn.ModuleDict({"a": Noted("a", noted, part=Filled("part", noted)), "ab": Filled("ab", noted)})
    finisher = Finisher(module, ["a.part.weight", "ab.weight"])
    assert finisher.filled("a.part.weight") == ["a.part", "a"]
    assert finisher.filled("ab.weight") == ["ab"] and noted == ["part", "a", "ab"]
