"""Experts that are spread over several engines: each engine's text is the one of an engine that has them all. Engines are threads here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from mtpserve.config import SpecConfig
from mtpserve.core.errors import EngineDead
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.engine import Engine
from mtpserve.layers.decoder import DecoderModel
from mtpserve.layers.kernels import KERNELS
from mtpserve.layers.moe import MoE
from mtpserve.runtime.parallel.expert_load import ExpertLoad
from mtpserve.runtime.parallel.placement import ExpertPlacement
from mtpserve.runtime.parallel.rounds import Rounds
from mtpserve.tools.prove.divergence import two_sample
from tests import selection
from tests.engine.peers import Table, ThreadPeers, together
from tests.tiny import CPU, built, filled, finished, prompts, run, tiny_arch, tiny_engine, tiny_model

TREE = SpecConfig(speculative_algorithm="MTP", speculative_num_steps=3, speculative_eagle_topk=2, speculative_num_draft_tokens=6)
GREEDY, SEEDED = SamplingParams(max_tokens=12, temperature=0), SamplingParams(max_tokens=12, temperature=1.0, seed=3)


def part_of(
    whole: DecoderModel, family: str, kernels: str, placement: ExpertPlacement, peers: ThreadPeers, load: ExpertLoad | None = None
) -> tuple[DecoderModel, Rounds]:
    """The same model with some of its experts."""
    arch = tiny_arch(family)
    assert arch.moe is not None
    rounds = Rounds(placement, load)
    model = built(family, replace(KERNELS.get(kernels)(), spread=rounds))
    own = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
    weights = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        layer = next((own[start] for start in own if name.startswith(f"{start}.experts.")), None)
        given = weights[name].data
        parameter.data = given.clone() if layer is None else given[placement.owned(layer.layer, arch.moe.experts)]
    finished(model)
    rounds.join(peers, arch.moe.latent or arch.hidden, arch.moe.top_k, torch.float32, CPU)
    return model, rounds


def drive(engine: Engine, rounds: Rounds, asked: Sequence[Request], texts: dict[str, list[int]], ticks: int, random: Random) -> None:
    """As many ticks, of which each may have any number of steps."""
    waiting = list(asked)
    for tick in range(ticks):
        while waiting and random.random() < 0.5:
            engine.add(waiting.pop())
        if tick == ticks - 1:
            for request in waiting:
                engine.add(request)
        while engine.has_work and (tick == ticks - 1 or random.random() < 0.7):
            for event in engine.step():
                assert event.error is None, event.error
                texts.setdefault(event.id, []).extend(event.tokens)
        rounds.finish()
    engine.check_integrity()


@pytest.mark.parametrize(
    ("family", "kernels", "backend", "size", "spec"),
    [
        ("deepseek", "torch", "reference", 2, 3),
        ("deepseek", "torch", "reference", 4, TREE),
        ("deepseek", "cpu", "cpu", 2, TREE),
        ("glm", "cpu", "cpu", 4, 2),
        ("oss", "torch", "reference", 2, 0),
        ("qwen", "cpu", "cpu", 2, 3),
        ("mamba2", "torch", "reference", 2, 3),
        ("deepseek", "exact", "reference", 2, 3),
    ],
)
def test_texts_are_those_of_one_engine(family: str, kernels: str, backend: str, size: int, spec: int | SpecConfig) -> None:
    """Greedy and seeded, chain and tree, uneven loads, an engine without any request; experts in any order."""
    whole = filled(built(family, KERNELS.get("torch")()))
    asked = prompts(3 * size - 1)
    params = [(GREEDY, replace(SEEDED, seed=number))[number % 2] for number in range(len(asked))]
    options: dict[str, Any] = {"backend": backend, "exact": kernels == "exact", "pages": 18 if size == 2 else 400}
    expected = run(tiny_engine(tiny_model(family, kernels=kernels), spec, **options), asked, params)
    owners = [(3 * expert + 1) % size for expert in range(8)]
    table, texts, preempted = Table(size), [dict[str, list[int]]() for _ in range(size)], [0] * size

    def work(rank: int) -> None:
        model, rounds = part_of(whole, family, kernels, ExpertPlacement(rank, size, {1: owners}), ThreadPeers(table, rank))
        engine = tiny_engine(model, spec, **options)
        # The last one has nothing to do.
        mine = [Request(str(i), asked[i], params[i]) for i in range(len(asked)) if rank < size - 1 and i % (size - 1) == rank]
        drive(engine, rounds, mine, texts[rank], 8, Random(rank))
        preempted[rank] = engine.stats.preemptions_total

    together(size, work)
    assert [next(of[str(i)] for of in texts if str(i) in of) for i in range(len(asked))] == expected
    assert size > 2 or sum(preempted), "the pool is too small for all of one engine's requests"


def test_how_often_experts_are_chosen_is_in_a_file(tmp_path: Path) -> None:
    """Of all rows since the first tick, which is the trial's; written when no other engine has work."""
    whole, table = filled(built("deepseek", KERNELS.get("torch")())), Table(2)

    def work(rank: int) -> None:
        load = ExpertLoad(tmp_path / f"load.{rank}")
        model, rounds = part_of(whole, "deepseek", "torch", ExpertPlacement(rank, 2), ThreadPeers(table, rank), load)
        engine = tiny_engine(model, 0)
        for name, first in (("trial", 1), ("request", 2)):
            if rank == 0:
                engine.add(Request(name, [first] * 20, SamplingParams(max_tokens=5, temperature=0)))
            while engine.has_work:
                engine.step()
            rounds.finish()
            assert load.file.exists() == (rank == 0 and name == "request")

    together(2, work)
    counts = {int(layer): counts for layer, counts in json.loads((tmp_path / "load.0").read_text()).items()}
    rows = 20 + 5 - 1  # the last token is not computed
    assert {layer: (len(numbers), sum(numbers)) for layer, numbers in counts.items()} == {1: (8, 2 * rows)}
    assert not (tmp_path / "load.1").exists(), "it had no rows"


def test_experts_that_no_engine_has_are_not_counted(tmp_path: Path) -> None:
    """Zero-computation experts have the numbers after those of the others."""
    load = ExpertLoad(tmp_path / "load")
    load.count(0, torch.tensor([[0, 3], [2, 3]]), 3)
    assert load.counts[0].tolist() == [1, 0, 1]


FEATURES: dict[str, dict[str, Any]] = {
    "penalties": {"frequency_penalty": 1.0, "presence_penalty": 0.5, "top_k": 9},
    "temperature": {},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "bias": {"logit_bias": {3: 2.0}},
}


def law_of(feature: str, shape: str, spec: int | SpecConfig) -> Any:
    quick = feature == "penalties" and shape == "chain"
    return pytest.param(feature, spec, id=f"{feature}-{shape}", marks=[] if quick else [pytest.mark.thorough])


@pytest.mark.parametrize(
    ("feature", "spec"), [law_of(feature, *shape) for feature in FEATURES for shape in {"chain": 2, "tree": TREE}.items()]
)
def test_the_law_is_one_engines(feature: str, spec: int | SpecConfig) -> None:
    """Of three tokens, against plain decoding with other seeds."""
    draws = 3000 if selection.ALL else 600
    whole, table, texts = filled(built("deepseek", KERNELS.get("torch")())), Table(2), [list[tuple[int, ...]]() for _ in range(2)]

    def drawn(engine: Engine, first: int, count: int) -> list[tuple[int, ...]]:
        params = [SamplingParams(max_tokens=3, seed=first + i, **FEATURES[feature]) for i in range(count)]
        return [tuple(text) for text in run(engine, [[5, 9, 11, 4]] * count, params)]

    def work(rank: int) -> None:
        model, rounds = part_of(whole, "deepseek", "torch", ExpertPlacement(rank, 2), ThreadPeers(table, rank))
        texts[rank] = drawn(tiny_engine(model, spec), rank * draws, draws // 2)
        rounds.finish()

    together(2, work)
    assert two_sample(drawn(tiny_engine(tiny_model(), 0), 2 * draws, draws), texts[0] + texts[1]) > 1e-4


def test_an_error_in_a_step_ends_its_requests_and_one_in_a_round_all_engines() -> None:
    whole, table, ends = filled(built("deepseek", KERNELS.get("torch")())), Table(2), [""] * 2

    def work(rank: int) -> None:
        model, rounds = part_of(whole, "deepseek", "torch", ExpertPlacement(rank, 2), ThreadPeers(table, rank))
        engine = tiny_engine(model, 2)
        step, engine.runner.step.forward = engine.runner.step.forward, lambda rows: 1 / 0
        engine.add(Request("0", [5, 6], GREEDY))
        events = engine.step() if rank == 0 else []
        rounds.finish()
        assert [event.error is not None for event in events] == [True][: 1 - rank]
        engine.runner.step.forward = step
        engine.abort("0")
        if rank == 1:
            rounds.computes = {}
        else:
            engine.add(Request("1", [5, 6], GREEDY))
        try:
            while True:
                engine.step()
                rounds.finish()
        except EngineDead as error:
            ends[rank] = str(error)
            table.barrier.abort()  # as who waits for a process that died is told

    together(2, work)
    assert ends == ["an engine is missing", "engines that share their experts failed to exchange rows: KeyError: 1"]
