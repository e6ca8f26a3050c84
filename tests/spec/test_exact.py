"""In bfloat16, where near ties abound, greedy text is the same for any drafts, any company and any chunking: with `--speculative-exact`,
and always with the kernels of a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from mtpserve_kernels.cpu.library import Unavailable, library

from mtpserve.config import SpecConfig
from mtpserve.core.request import Request, TokenEvent
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.engine import Engine
from mtpserve.layers.decoder import DecoderModel
from mtpserve.layers.devices import cpu_kernels, torch_kernels
from tests import selection
from tests.spec.diagonal import diagonal
from tests.spec.test_trees import tree
from tests.tiny import prompts, run, tiny_engine, tiny_model

GREEDY = SamplingParams(max_tokens=24 if selection.ALL else 16, temperature=0)
SHAPES: dict[str, int | SpecConfig] = {"3": 3, "tree": tree(3, 4, 12), "7": 7, "0": 0}
EXACT = {"exact": {"exact": True}, "cpu": {"backend": "cpu"}}  # by kernels: the engine's options


@pytest.fixture(params=EXACT)
def kernels(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu":
        try:
            library()
        except Unavailable as reason:
            pytest.skip(str(reason))
    return str(request.param)


FAMILIES = ["deepseek", "deepseek, experts one by one", "sparse", "mimo", "mimo, windows", "oss, windows", "modules", "hybrid", "mamba2"]
ASKED = prompts(5 if selection.ALL else 4, longest=40)


def model_of(family: str, kernels: str) -> DecoderModel:
    return tiny_model(family.split(",")[0], dtype=torch.bfloat16, kernels=kernels, window=10 if "windows" in family else None)


@cache
def texts_alone(family: str, kernels: str) -> list[list[int]]:
    """With all experts at once or one by one as `family` says: by its test."""
    return [run(tiny_engine(model_of(family, kernels), 0, **EXACT[kernels]), [prompt], GREEDY)[0] for prompt in ASKED]


@pytest.mark.parametrize(("family", "shape"), diagonal(FAMILIES, SHAPES))
def test_text_is_bitwise_the_same(monkeypatch: pytest.MonkeyPatch, family: str, shape: int | SpecConfig, kernels: str) -> None:
    if "one by one" in family:
        monkeypatch.setattr(torch_kernels, "ALL_EXPERTS", 0)
    engine = tiny_engine(model_of(family, kernels), shape, budget=45, seats=3, **EXACT[kernels])
    assert run(engine, ASKED, GREEDY) == texts_alone(family, kernels)


@torch.inference_mode()
def test_a_rows_logits_do_not_depend_on_the_pass(kernels: str) -> None:
    """Bit by bit, not only in the choice: log-probabilities of the same text under plain decoding and under a tree."""
    model, asked = tiny_model(dtype=torch.bfloat16, kernels=kernels), prompts(6, longest=20)
    params = SamplingParams(max_tokens=20, temperature=0, logprobs=5)
    heard = []
    for shape, budget in ((0, 64), (3, 33), (tree(3, 3, 9), 64)):
        engine = tiny_engine(model, shape, budget=budget, **EXACT[kernels])
        found: dict[str, list[object]] = {}
        for i, prompt in enumerate(asked):
            engine.add(Request(str(i), prompt, params))
        while engine.has_work:
            for event in engine.step():
                found.setdefault(event.id, []).extend(event.logprobs or [])
        heard.append(found)
    assert heard[0] == heard[1] == heard[2]


@torch.inference_mode()
@pytest.mark.parametrize("family", ["deepseek", "mimo", "glm", "qwen", "oss"])
def test_a_stack_in_one_call_is_its_layers_one_by_one(family: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And as many threads as there may be give the same bits as one."""
    if kernels != "cpu":
        pytest.skip("only the kernels of a CPU run a whole stack")
    heard = []
    for one_by_one, threads in ((False, 1), (False, 3), (True, 1)):
        if one_by_one:
            monkeypatch.setattr(cpu_kernels, "pack_layers", torch_kernels.pack_layers)
        model = tiny_model(family, dtype=torch.bfloat16, kernels=kernels)
        assert isinstance(model.run_layers, cpu_kernels.LayerStack) is not one_by_one
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        engine = tiny_engine(model, 3, **EXACT[kernels])
        for i, prompt in enumerate(prompts(4, longest=40)):
            engine.add(Request(str(i), prompt, SamplingParams(max_tokens=12, temperature=0, logprobs=5)))
        heard.append([(event.tokens, event.logprobs) for event in completed(engine)])
    assert heard[0] == heard[1] == heard[2]


def completed(engine: Engine) -> Iterator[TokenEvent]:
    while engine.has_work:
        yield from engine.step()
