"""Captured steps whose requests have grammars: the tokens of launched steps, and nothing is read on the host while a step runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence as Seq
from typing import Any

import numpy as np
import pytest
import torch

from mtpserve.core.batch import Source
from mtpserve.core.request import Request
from mtpserve.core.sampling import BUDGET_MARGIN, GrammarSpec, SamplingParams, Speculation, ThinkingBudget
from mtpserve.engine.engine import Engine
from mtpserve.runtime import runner_request
from mtpserve.runtime.sampling.grammar import GrammarRules
from mtpserve.runtime.sampling.proposals import Node, ProposalLimits, Proposals
from mtpserve.runtime.sampling.rule_tables import MaskTable, RowMasks
from mtpserve.runtime.sampling.sampling import SamplingFeatures
from tests.grammars import TokenGrammar
from tests.runtime.recorders import Again, Watched, blinded, runner_of
from tests.runtime.test_captured_rules import SPECS, count_launched
from tests.tiny import VOCAB, tiny_engine, tiny_model

KINDS = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
THINKS = ThinkingBudget(6 + BUDGET_MARGIN, "<", ">", (5, 6, 7), True)


class Records(TokenGrammar):
    """`size` forced tokens, then four of a choice, again and again; before the token `first` anything."""

    def __init__(self, size: int, first: int = 0) -> None:
        super().__init__()
        self.size, self.first = size, first

    def allowed(self, output: Seq[int]) -> Collection[int]:
        place = len(output) % (self.size + 4)
        if len(output) < self.first:
            return range(VOCAB)
        return [(place + len(output)) % VOCAB] if place < self.size else range(place % 3, VOCAB, 2 + place % 2)


class Compiler:
    def compile(self, spec: GrammarSpec) -> TokenGrammar:
        return Records(4, 20) if spec.thinking else Records(int(spec.text))


def engine_of(spec: Any, family: str = "mimo", **options: Any) -> Engine:
    return tiny_engine(tiny_model(family, kernels="torch"), spec, grammars=Compiler(), **options)


def records(size: int) -> GrammarSpec:
    return GrammarSpec("regex", str(size))


RULES: list[dict[str, Any]] = [
    {"grammar": records(2)},
    {},
    {"grammar": records(10), "logprobs": 2},
    {"grammar": records(0), "repetition_penalty": 1.3, "min_tokens": 5, "stop_token_ids": (3, 4)},
    {"repetition_penalty": 1.3},
    {"grammar": records(5), "logit_bias": {7: 3.0}, "speculation": Speculation(num_steps=1)},
    {"grammar": GrammarSpec("any_text", thinking=THINKS)},
    {"grammar": records(3), "speculation": Speculation(enabled=False)},
]


def requests(temperature: float, rules: Seq[dict[str, Any]] = RULES) -> list[Request]:
    prompts = ([(5 * i + 3 * place) % 30 + 1 for place in range(3 + 4 * i)] for i in range(len(rules)))
    return [
        Request(str(i), prompt, SamplingParams(max_tokens=30, seed=i, temperature=temperature, **rule))
        for i, (prompt, rule) in enumerate(zip(prompts, rules, strict=True))
    ]


def texts(engine: Engine, asked: Seq[Request]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {request.id: [] for request in asked}
    for request in asked:
        engine.add(request)
    while engine.has_work:
        for event in engine.step():
            assert event.error is None, event.error
            found[event.id] += event.tokens
    engine.check_integrity()
    return found


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny random models propose what grammars forbid: such requests are launched after some steps otherwise."""
    monkeypatch.setattr(runner_request, "MIN_FIRST_PROPOSALS", 1000)


# -- the engine -----------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@KINDS
def test_grammars_are_captured(spec: Any, temperature: float, overlap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    eager = engine_of(spec, seats=8)
    engine = engine_of(spec, seats=8, budget=256, overlap=overlap, recorder=Again())
    launched = count_launched(runner_of(engine), monkeypatch)
    assert texts(engine, requests(temperature)) == texts(eager, requests(temperature))
    # The step in which a budget of reasoning begins to bear on a request knows nothing of what waits for it.
    assert len(launched) <= 2 and set(launched) <= {1}, launched
    forced = [each.stats.accepted_tokens_by_source["grammar"] for each in (eager, engine)]
    assert forced == [0, 0] if spec is SPECS["plain"] else min(forced) > 30


@pytest.mark.usefixtures("patient")
@KINDS
def test_nothing_is_read_in_a_captured_step(spec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(spec, seats=8, recorder=Watched())
    blinded(engine, monkeypatch)
    assert all(texts(engine, requests(0.9)).values())


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("family", ["mimo", "hybrid"])
@pytest.mark.parametrize("spec", [SPECS["chain"], SPECS["tree"]], ids=["chain", "tree"])
def test_chunks_and_preemptions_change_no_text(spec: Any, family: str) -> None:
    """Prompts in chunks are launched, and so is what is computed again; the drafts that they leave may branch."""
    eager = texts(engine_of(spec, family, seats=8), requests(0.9))
    engine = engine_of(spec, family, seats=4, pages=30, budget=24, overlap=1, recorder=Again())
    assert texts(engine, requests(0.9)) == eager
    assert engine.stats.preemptions_total > 0


@pytest.mark.parametrize("spec", [SPECS["chain"], SPECS["tree"]], ids=["chain", "tree"])
def test_what_a_grammar_forbids_too_often_is_proposed_under_its_mask(spec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = [{"grammar": records(0)}, {}]
    engine = engine_of(spec, seats=2, recorder=Again())
    launched = count_launched(runner_of(engine), monkeypatch)
    monkeypatch.setattr(runner_request, "MIN_FIRST_PROPOSALS", 4)
    assert texts(engine, requests(0.9, rules)) == texts(engine_of(spec, seats=2), requests(0.9, rules))
    assert launched and set(launched) == {1}


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("spec", [SPECS["chain"], SPECS["tree"]], ids=["chain", "tree"])
def test_a_draft_is_the_grammars_where_there_is_no_choice(spec: Any) -> None:
    engine, grammar = engine_of(spec, seats=1, recorder=Again()), Records(3)
    engine.add(Request("0", [3, 1, 4], SamplingParams(max_tokens=60, temperature=0.0, grammar=records(3))))
    sources: set[tuple[str, bool]] = set()
    while engine.has_work:
        for event in engine.step():
            paths: list[list[int]] = [[]]
            for token, parent, source in zip(event.proposal.tokens, event.proposal.parents, event.proposal.sources, strict=True):
                sources.add((source, len(grammar.allowed([*grammar.output, *paths[parent]])) == 1))
                paths.append([*paths[parent], token])
            grammar.output += event.tokens
    assert sources == {("grammar", True), ("mtp", False)}


# -- which proposals stay -------------------------------------------------------------------------------------------------------


def nodes(*numbers: tuple[int, int]) -> list[Node]:
    return [Node(token, parent, Source.MODEL) for token, parent in numbers]


def stays(grammar: TokenGrammar, limits: ProposalLimits, waiting: Seq[Node]) -> Proposals:
    proposals = Proposals(grammar, VOCAB, limits, waiting)
    expected = np.empty_like(proposals.words)
    assert all(grammar.masks(proposals.paths, expected)) and (proposals.words == expected).all()
    assert len(proposals.nodes) <= limits.nodes and all(len(path) <= limits.depth for path in proposals.paths)
    return proposals


def test_a_chain_is_what_is_forced_and_what_is_allowed_after_it() -> None:
    """Records(2) wants 0 and 2, then an even token, one of every third, …"""
    limits = ProposalLimits(6, 6, 6, 3, branches=False)
    proposed = stays(Records(2), limits, nodes((0, 0), (2, 1), (4, 2), (10, 3), (1, 4)))
    assert [node.token for node in proposed.nodes] == [0, 2, 4] and not proposed.loses_first  # 10 is none of 0, 3, …
    assert [node.source for node in proposed.nodes] == [Source.GRAMMAR, Source.GRAMMAR, Source.MODEL]
    other = stays(Records(2), limits, nodes((1, 0), (2, 1), (4, 2)))
    assert [node.token for node in other.nodes] == [0, 2] and other.loses_first
    grammar = Records(2)
    grammar.output = [0, 2, 4, 9, 1]  # before the last of a choice, the next two are forced
    proposed = stays(grammar, limits, nodes((2, 0), (1, 1)))
    assert [node.token for node in proposed.nodes] == [2, 6, 8] and not proposed.loses_first
    shorter = stays(grammar, ProposalLimits(2, 2, 6, 3, branches=False), nodes((2, 0), (1, 1)))
    assert [node.token for node in shorter.nodes] == [2, 6]


def test_a_tree_loses_what_is_forbidden_and_what_continues_that() -> None:
    """Records(0) wants an even token, one of 1, 4, 7, …, an even one from 2 on."""
    waiting = nodes((0, 0), (1, 0), (3, 1), (4, 1), (4, 2), (7, 1), (6, 4), (1, 4), (8, 6))
    proposed = stays(Records(0), ProposalLimits(8, 8, 8, 3, branches=True), waiting)
    assert proposed.nodes == nodes((0, 0), (4, 1), (7, 1), (6, 2), (8, 3))
    first = stays(Records(2), ProposalLimits(8, 8, 8, 3, branches=True), nodes((0, 0), (2, 1), (4, 2), (6, 2)))
    assert [node[:2] for node in first.nodes] == [(0, 0), (2, 1), (4, 2), (6, 2)]


@pytest.mark.parametrize("forced", [0, 2])
def test_a_request_that_limits_the_depth_limits_what_is_forced(forced: int) -> None:
    limits = ProposalLimits(8, 8, 8, 3, branches=False)
    assert limits.limited(3) is limits
    assert len(stays(Records(10), limits.limited(forced), []).nodes) == forced


# -- the masks ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other_rules", [False, True])
def test_masks_of_rows_are_those_of_launched_steps(other_rules: bool) -> None:
    """Three requests of four rows, the second without a grammar; an odd vocabulary, and rows that are not finite."""
    generator = torch.Generator().manual_seed(3)
    raw = torch.randn(12, VOCAB, generator=generator)
    raw[2, 5], raw[5] = torch.nan, torch.nan
    logits = raw.clone()
    if other_rules:
        logits[:, 1::2] = -torch.inf
        logits[6:] = -torch.inf  # of the second request, too: that is its own error
    chosen = [Records(2), Records(0)]
    paths = [[[], [0], [0, 2], [0, 2, 4]], [[], [0], [0, 4], [0, 4, 6]]]
    words = torch.full((20, -(-VOCAB // 32)), -1, dtype=torch.int32)
    for grammar, first, path in zip(chosen, (5, 9), paths, strict=True):
        assert grammar.masks(path, words[first : first + 4].numpy()) == [True] * 4
    table = MaskTable(~words, torch.arange(5), torch.arange(8, dtype=torch.uint8))
    masks = RowMasks(table, torch.tensor([5, 0, 9]))
    rules = GrammarRules([], VOCAB)
    rules.by_seat = {0: chosen[0], 2: chosen[1]}
    expected = rules.apply(logits, raw, [0] * 4 + [1] * 4 + [2] * 4, [*paths[0], *[[]] * 4, *paths[1]])
    before = logits if other_rules else raw
    assert torch.equal(masks.apply(before, raw).nan_to_num(9.0), expected.nan_to_num(9.0))
    assert torch.equal(masks.apply(before, raw)[4:8].nan_to_num(9.0), before[4:8].nan_to_num(9.0))


@pytest.mark.parametrize(("spec", "widest"), [(SPECS["chain"], 9), (SPECS["tree"], 16)], ids=["chain", "tree"])
def test_a_step_is_as_wide_as_the_draft_model_drafts_or_as_all_that_grammars_force(spec: Any, widest: int) -> None:
    graphs = runner_of(engine_of(spec, recorder=Again())).graphs
    assert graphs is not None
    features, usual = SamplingFeatures(all_greedy=True, masks=True), graphs.drafts + 1
    widths = [graphs.key(3, drafts, 3, features, False).width for drafts in (0, graphs.drafts, graphs.drafts + 1, widest - 1)]
    assert widths == [usual, usual, widest, widest]
    if spec is SPECS["chain"]:  # a step that drafts less deep needs no more passes for what is forced
        assert [graphs.key(3, drafts, 1, features, False).max_steps for drafts in (1, 2, 5)] == [1, 1, 1]
