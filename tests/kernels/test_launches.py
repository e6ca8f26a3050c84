"""How many kernels one step launches: on a GPU each costs about two microseconds, whatever it computes.

Counted is one run of what a graph records, for one greedy request in float32, with the kernels interpreted: every launch of a Triton
kernel, and every aten operation below torch's composite ones that neither allocates alone nor gives a view. Where a library's
operation is several kernels (sort, topk), it counts as one. On a GPU products give float32 logits in any type.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mtpserve.config import SpecConfig
from mtpserve.core.request import Request
from mtpserve.core.sampling import GrammarSpec, SamplingParams
from mtpserve.runtime.graphs import graphs
from mtpserve.runtime.graphs.capture import Body
from mtpserve.runtime.graphs.graph_key import GraphOutput
from tests.runtime.test_captured_grammars import Records
from tests.runtime.test_overlap import CHAIN, PLAIN, TREE
from tests.tiny import tiny_engine, tiny_model

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the tiny engine lives on the CPU: interpreted alone")

ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
PER_LAYER = 9  # a GQA layer: 2 norms, 4 products, rotation and store, attention with the sum of its splits, silu
# Latent attention: 3 norms, 5 products, rotation and store, attention; a mixture: router, gate and up, down with its sum
PER_LATENT_LAYER = 13


class Launches(TorchDispatchMode):
    """Counts by name while it is entered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.interpreting = False
        from triton.runtime.interpreter import InterpretedFunction

        run = InterpretedFunction.run

        def counted(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            self.count[kernel.__name__] += 1
            self.interpreting = True  # copies to and from the interpreter
            try:
                return run(kernel, *args, **kwargs)
            finally:
                self.interpreting = False

        monkeypatch.setattr(InterpretedFunction, "run", counted)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.interpreting:
            return function(*args, **kwargs)
        with self:
            parts = function.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        name = function.name().split("::")[-1].split(".")[0]
        view = any(given.alias_info is not None and not given.alias_info.is_write for given in function._schema.returns)
        if not view and name not in ALLOCATES and name != "_unsafe_view":
            self.count[name] += 1
        return function(*args, **kwargs)


class Counting:
    """Counts what each body that is recorded launches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.counts: list[Counter[str]] = []

    def capture(self, body: Body) -> tuple[GraphOutput, Callable[[], object]]:
        body()  # as before a capture: constants are made then
        with self.monkeypatch.context() as patch, Launches(patch) as launches:
            output = body()
        self.counts.append(launches.count)
        return output, body  # nothing is replayed


class Anything:
    """A compiler of grammars that allow everything."""

    def compile(self, spec: GrammarSpec) -> Records:
        return Records(0, first=1000)


def launches(spec: SpecConfig, layers: int, monkeypatch: pytest.MonkeyPatch, family: str = "mimo", **sampling: Any) -> Counter[str]:
    """Of one decoding step that verifies all that it may and drafts as deep as it may. `sampling`: not greedy, but so."""
    monkeypatch.setattr(graphs, "PROMPTS", ())  # none of them is recorded
    recorder, model = Counting(monkeypatch), tiny_model(family, kernels="triton", layers=layers)
    engine = tiny_engine(model, spec, backend="triton", page_size=16, recorder=recorder, seats=1, grammars=Anything())
    engine.add(Request("0", [3, 4, 5], SamplingParams(**({"max_tokens": 12, "temperature": 0, "ignore_eos": True} | sampling))))
    while not recorder.counts:
        assert not any(event.error for event in engine.step())
    return recorder.counts[0]


@pytest.mark.parametrize(
    ("spec", "most"),
    # Outside the trunk's layers: the batch, logits, acceptance, seats; with drafts the MTP layer's passes (three with its layer in each).
    [(PLAIN, 9), (CHAIN, 67), pytest.param(TREE, 213, marks=pytest.mark.thorough)],
    ids=["plain", "chain", "tree"],
)
def test_a_step_launches_no_more_than_it_did(spec: SpecConfig, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (launches(spec, layers, monkeypatch) for layers in (1, 2))
    per_layer = two - one
    assert not one - two and 0 < per_layer.total() <= PER_LAYER, per_layer
    overhead = one.total() - per_layer.total()
    print(f"{per_layer.total()} a layer, {overhead} outside them")
    assert 0 < overhead <= most, one.most_common()


def test_sampling_and_grammars_add_few_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = launches(CHAIN, 1, monkeypatch).total()
    for most, sampling in ((8, {"temperature": 0.8, "top_p": 0.9}), (15, {"grammar": GrammarSpec("regex", ".*")})):
        step = launches(CHAIN, 1, monkeypatch, **sampling)
        assert 0 < step.total() - greedy <= most, step.most_common()


def test_a_step_of_36_latent_layers_with_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the model of 475 M parameters that was measured on a GPU; its first layer has no experts, and no more launches."""
    two, three, drafting = (launches(spec, layers, monkeypatch, "deepseek") for spec, layers in ((PLAIN, 2), (PLAIN, 3), (CHAIN, 2)))
    per_layer = three - two
    assert not two - three and 0 < per_layer.total() <= PER_LATENT_LAYER, per_layer
    for step, most in ((two, 520), (drafting, 630)):
        total = step.total() + 34 * per_layer.total()
        print(f"{per_layer.total()} a layer, {total} with 36 layers")
        assert total <= most, step.most_common()
