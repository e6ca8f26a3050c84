"""What goes to the device in a step, and how: on a GPU each of these copies must neither be many nor make the host wait."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from numbers import Number
from typing import Any

import pytest
import torch

from mtpserve.config import SpecConfig
from mtpserve.core.plan import StepPlan
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from tests.tiny import prompts, tiny_engine, tiny_model

CHAIN = SpecConfig(speculative_algorithm="MTP", speculative_num_steps=3)
TREE = SpecConfig(speculative_algorithm="MTP", speculative_num_steps=3, speculative_eagle_topk=2, speculative_num_draft_tokens=8)
HOT: dict[str, Any] = {"temperature": 0.8, "max_tokens": 40, "ignore_eos": True}
PLAIN = [SamplingParams(**HOT, seed=i, stop_token_ids=(36,)) for i in range(5)]
RULES = [
    SamplingParams(**HOT, seed=5, logit_bias={3: 1.0}, allowed_token_ids=tuple(range(20))),
    SamplingParams(**HOT, seed=6, repetition_penalty=1.2, frequency_penalty=0.3),
    SamplingParams(**HOT, seed=7, min_tokens=12, top_k=5, min_p=0.1),
]


def ours() -> bool:
    """Called by the runtime: attention in plain torch is the CPU's, and a stand-in here."""
    return str(sys._getframe(2).f_globals["__name__"]).startswith("mtpserve.runtime.")


class Watch:
    """Counts the copies to the device by the function that makes them, and refuses what would make the host wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copies: Counter[str] = Counter()
        monkeypatch.setattr(torch.Tensor, "__setitem__", self.assigned(torch.Tensor.__setitem__))
        monkeypatch.setattr(torch, "tensor", self.made(torch.tensor))
        monkeypatch.setattr(torch.Tensor, "to", self.counted("copies", torch.Tensor.to))
        for module, user in (("admissions", "admissions"), ("runner", "runner"), ("inputs", "inputs"), ("transfer", "runner")):
            name = f"mtpserve.runtime.{module}.staged"
            monkeypatch.setattr(name, self.counted(user, __import__(name.rpartition(".")[0], fromlist=["staged"]).staged))

    def assigned(self, function: Callable[..., None]) -> Callable[..., None]:
        def assign(target: torch.Tensor, index: Any, value: Any) -> None:
            assert not (isinstance(value, Number) and ours()), "a number assigned to elements of a tensor waits for the device"
            assert not (isinstance(index, list) and ours()), "a list as an index is copied, and waited for"
            function(target, index, value)

        return assign

    def made(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            assert not ("device" in kwargs and ours()), "made on the device from pageable memory: waits for it"
            return function(*args, **kwargs)

        return make

    def counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            if name != "copies" or isinstance(args[1], torch.device):
                self.copies[name] += 1
                assert name != "copies" or kwargs.get("non_blocking"), "a copy that the host waits for"
            return function(*args, **kwargs)

        return count


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("overlap", [0, 1])
def test_a_step_makes_one_copy_for_all_that_is_new(monkeypatch: pytest.MonkeyPatch, spec: SpecConfig, overlap: int) -> None:
    """Admissions and pages one; seats, wanted depths and the tables of rules one where they are new; rows one where their widths are."""
    engine = tiny_engine(tiny_model("mimo"), spec, overlap=overlap, seats=6, budget=48)
    texts, launch = prompts(len(PLAIN + RULES), seed=1), engine.runner.launch
    watch, kept = Watch(monkeypatch), list[tuple[StepPlan, Counter[str]]]()

    def launched(plan: StepPlan) -> Any:
        watch.copies.clear()
        made = launch(plan)
        kept.append((plan, watch.copies.copy()))
        return made

    monkeypatch.setattr(engine.runner, "launch", launched)
    for i, (text, params) in enumerate(zip(texts, PLAIN + RULES, strict=True)):
        engine.add(Request(str(i), text, params, bad_words=[[1, 2], [3]] if i == 5 else []))
    while engine.has_work:
        assert all(event.error is None for event in engine.step())
    for plan, copies in kept:
        assert copies["admissions"] == bool(plan.new_requests or plan.new_blocks)
        assert copies["runner"] <= 1 and copies["inputs"] <= 2
        assert copies["copies"] == copies["admissions"] + copies["runner"] + copies["inputs"]
    assert sum(len(plan.new_requests) > 1 for plan, _ in kept) > 0 and sum(len(plan.new_blocks) > 1 for plan, _ in kept) > 3
    assert any(copies["copies"] == 1 for _, copies in kept), "seats and wanted depths alone"
    assert any(copies["copies"] == 0 for _, copies in kept), "all as in the step before"


def test_a_long_prompt_is_one_copy_too(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(tiny_model("mimo"), CHAIN, page_size=1, pages=1000)
    watch = Watch(monkeypatch)
    engine.add(Request("long", [i % 37 for i in range(140)], SamplingParams(max_tokens=3, temperature=0), prediction=[1, 2, 3] * 30))
    engine.step()
    assert watch.copies["admissions"] == 1
