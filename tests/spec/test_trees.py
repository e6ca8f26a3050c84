"""Trees through the whole engine: real attention over pages, compaction, preemption; the text is that of plain decoding."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from mtpserve.config import SpecConfig
from mtpserve.core.batch import Tree
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams, Speculation
from mtpserve.layers.decoder import DecoderModel
from mtpserve.spec.draft.ngram import continued, predicted
from mtpserve.spec.draft.tree import Pool, choose, tree_of
from mtpserve.spec.verify.accept import path_to
from tests.spec.diagonal import diagonal
from tests.tiny import VOCAB, prompts, replace_passes, run, tiny_engine, tiny_model

GREEDY = SamplingParams(max_tokens=24, temperature=0)


def tree(steps: int, topk: int, nodes: int, algorithm: str = "MTP") -> SpecConfig:
    return SpecConfig(
        speculative_algorithm=algorithm, speculative_num_steps=steps, speculative_eagle_topk=topk, speculative_num_draft_tokens=nodes + 1
    )


SHAPES = {
    "2x4": tree(2, 2, 4),
    "4x16": tree(3, 4, 16),
    "8x32": tree(5, 8, 32),
    "2x8 deep": tree(7, 2, 8),
    "n-gram": SpecConfig(speculative_algorithm="NGRAM", speculative_num_steps=5),
    "chain and n-gram": SpecConfig(speculative_algorithm="NEXTN+NGRAM", speculative_num_steps=2),
    "tree and n-gram": tree(3, 3, 7, "mtp+ngram"),
}


ASKED = prompts(10)
MIXED = [GREEDY if i % 2 else SamplingParams(max_tokens=24, temperature=0.7, top_p=0.95, seed=i) for i in range(10)]


@cache
def plain_texts(family: str) -> list[list[int]]:
    return run(tiny_engine(tiny_model(family), 0), ASKED, MIXED)


PLACES = {"room": (64, 600, 4), "few pages": (45, 52, 8), "odd pages": (90, 300, 3), "few odd pages": (45, 140, 3)}  # budget, pages, size


@pytest.mark.parametrize(("shape", "family", "place"), diagonal(SHAPES, ["deepseek", "sparse", "mimo"], PLACES))
def test_text_does_not_depend_on_the_tree(family: str, shape: SpecConfig, place: tuple[int, int, int]) -> None:
    budget, pages, page_size = place
    engine = tiny_engine(tiny_model(family, kernels="torch"), shape, budget=budget, pages=pages, page_size=page_size)
    assert run(engine, ASKED, MIXED) == plain_texts(family)
    assert engine.stats.accepted_tokens_total > 0


def test_preemption_between_trees() -> None:
    model, asked = tiny_model(), prompts(6, longest=8)
    params = [SamplingParams(max_tokens=90, temperature=0.8 * (i % 2), seed=i) for i in range(6)]
    engine = tiny_engine(model, tree(2, 2, 4), pages=60)
    assert run(engine, asked, params) == run(tiny_engine(model, 0), asked, params)
    assert engine.stats.preemptions_total > 0


def test_a_branch_drafts_on_its_own_keys() -> None:
    """What the tree's nodes were scored with is what a chain through them, drafted alone, would be scored with."""
    model = tiny_model(kernels="torch")
    engine = tiny_engine(model, tree(3, 3, 20))
    heard: list[tuple[list[int], torch.Tensor]] = []
    assert model.mtp_head is not None
    healthy = model.mtp_head.extend
    positions: list[torch.Tensor] = []

    def mtp(ids: torch.Tensor, place: torch.Tensor, hidden: torch.Tensor, attend: Any) -> Any:
        out = healthy(ids, place, hidden, attend)
        positions.append(place)
        heard.append((ids.tolist(), out.features))
        return out

    replace_passes(model, mtp)
    engine.add(Request("a", prompts(1)[0], SamplingParams(max_tokens=2, temperature=0)))
    engine.step()
    # absorb, then two passes of three nodes each; siblings share a position
    assert [len(ids) for ids, _ in heard[1:]] == [3, 3] and all(len(set(p.tolist())) == 1 for p in positions[1:])
    first, second = heard[1][0], heard[2][0]
    # Each node of the second pass is what a chain would give that is forced through one of the first pass' nodes.
    for node in range(3):
        alone = [through(model, healthy, parent, second[node]) for parent in first]
        assert min((output - heard[2][1][node]).abs().max().item() for output in alone) < 1e-5
    replace_passes(model, healthy)


def through(model: DecoderModel, mtp: Any, first: int, second: int) -> torch.Tensor:
    """The MTP layer's output at the second draft of a chain whose drafts are these."""
    outputs: list[torch.Tensor] = []

    def forced(ids: torch.Tensor, place: torch.Tensor, hidden: torch.Tensor, attend: Any) -> Any:
        if len(outputs) in (1, 2):
            ids = torch.tensor([first if len(outputs) == 1 else second])
        out = mtp(ids, place, hidden, attend)
        outputs.append(out.features)
        return out

    replace_passes(model, forced)
    engine = tiny_engine(model, 3)
    engine.add(Request("a", prompts(1)[0], SamplingParams(max_tokens=5, temperature=0)))
    engine.step()
    return outputs[2][0]


def test_requests_choose_their_own_depth() -> None:
    model, asked = tiny_model(), prompts(6)
    depths = [None, 0, 1, 2, None, 0]
    for shape in (3, tree(3, 4, 12), SpecConfig(speculative_algorithm="MTP+NGRAM", speculative_num_steps=3)):
        engine = tiny_engine(model, shape)
        for i, (prompt, depth) in enumerate(zip(asked, depths, strict=True)):
            speculation = Speculation(enabled=depth != 0, num_steps=depth)
            engine.add(Request(str(i), prompt, SamplingParams(max_tokens=20, temperature=0.9, seed=i, speculation=speculation)))
        deepest = dict.fromkeys(map(str, range(6)), 0)
        while engine.has_work:
            for event in engine.step():
                assert event.error is None
                levels = [0]
                for parent in event.proposal.parents:
                    levels.append(levels[parent] + 1)
                deepest[event.id] = max(deepest[event.id], *levels)
        wanted = [3, 0, 1, 2, 3, 0] if not (isinstance(shape, SpecConfig) and shape.ngram) else [None, 0, 1, 2, None, 0]
        assert all(draft_depth is None or deepest[str(i)] == draft_depth for i, draft_depth in enumerate(wanted)), deepest


@pytest.mark.parametrize("shape", [3, tree(3, 3, 9)], ids=["chain", "tree"])
def test_a_prediction_that_is_right_goes_fast_and_one_that_is_wrong_changes_nothing(shape: int | SpecConfig) -> None:
    model, asked = tiny_model(), prompts(3)
    params = SamplingParams(max_tokens=40, temperature=0)
    plain = run(tiny_engine(model, 0), asked, params)
    guesses = [plain[0], [*plain[1][:12], (plain[1][12] + 1) % VOCAB, *plain[1][13:]], [5, 6, 7] * 4]
    engine = tiny_engine(model, shape)
    for i, (prompt, guess) in enumerate(zip(asked, guesses, strict=True)):
        engine.add(Request(str(i), prompt, params, prediction=guess))
    texts: dict[str, list[int]] = {str(i): [] for i in range(3)}
    steps, taken = dict.fromkeys(texts, 0), dict.fromkeys(texts, 0)
    while engine.has_work:
        for event in engine.step():
            texts[event.id] += event.tokens
            steps[event.id] += 1
            taken[event.id] += sum(event.proposal.sources[node - 1] == "prediction" for node in event.proposal.path)
    assert list(texts.values()) == plain
    assert steps["0"] <= 13 and taken["0"] >= 20, "up to nine tokens a step"
    assert steps["1"] <= 16 and taken["1"] >= 20, "found again behind the wrong token"
    engine.check_integrity()


def test_several_continuations_share_their_prompts_pages() -> None:
    model, prompt = tiny_model(), prompts(1, seed=4, longest=2)[0] * 23
    params = [SamplingParams(max_tokens=12, temperature=0.9, seed=i) for i in range(4)]
    alone = [run(tiny_engine(model, 2), [prompt], each)[0] for each in params]
    for pages in (400, 30):
        engine = tiny_engine(model, 2, pages=pages, budget=16)
        for i, each in enumerate(params):
            engine.add(Request(str(i), prompt, each))
        texts: dict[str, list[int]] = {str(i): [] for i in range(4)}
        most = 0
        while engine.has_work:
            for event in engine.step():
                assert event.error is None
                texts[event.id] += event.tokens
            most = max(most, engine.stats.pages_used)
            engine.check_integrity()
        assert list(texts.values()) == alone
        assert pages != 400 or most < 4 * (len(prompt) + 12 + 6) // 4 - 2 * (len(prompt) // 4), "the prompt's pages are held once"


# -- the pieces -------------------------------------------------------------------------------------------------------------------


def test_ancestors_depths_and_paths() -> None:
    made = tree_of(torch.tensor([[0, 0, 1, 3, 2], [0, 1, 2, 3, 4]]), 5)
    assert made.depths.tolist() == [[0, 1, 1, 2, 3, 2], [0, 1, 2, 3, 4, 5]]
    assert made.ancestors[0].tolist() == [1, 0b11, 0b101, 0b1011, 0b11011, 0b100101]
    assert path_to(made, torch.tensor([[4], [2]]), 3).tolist() == [[0, 1, 3, 4], [0, 1, 2, 2]]
    assert isinstance(made, Tree)


def test_the_best_of_the_pool_form_a_tree() -> None:
    generator = torch.Generator().manual_seed(0)
    first = -torch.rand(200, 3, generator=generator)
    second = first.repeat_interleave(3, 1) - torch.rand(200, 9, generator=generator)
    pools = [
        Pool(torch.randint(50, (200, 3)), first, torch.full((200, 3), -1)),
        Pool(torch.randint(50, (200, 9)), second, torch.arange(3).repeat_interleave(3).expand(200, 9)),
    ]
    most = torch.randint(1, 9, (200,), generator=generator)
    drafts = choose(pools, torch.tensor([2, 1] * 100), most, 6)
    assert drafts.tree is not None
    for r in range(200):
        count, parents = int(drafts.num_draft_tokens[r]), drafts.tree.parents[r].tolist()
        assert count == min(6 if r % 2 == 0 else 3, most[r]) and all(parent <= node for node, parent in enumerate(parents[:count]))
        scores = torch.cat([first[r], second[r]]) if r % 2 == 0 else first[r]
        tokens = torch.cat([pools[0].tokens[r], pools[1].tokens[r]])
        best = scores.topk(count).indices
        assert drafts.tokens[r, :count].tolist() == tokens[best].tolist()


def test_what_followed_before() -> None:
    text = torch.tensor([[1, 2, 3, 4, 9, 1, 2, 3, 5, 8, 2, 3, 0, 0], [1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0], list(range(14))])
    tokens, count = continued(text, torch.arange(3), torch.tensor([12, 6, 14]), 4)
    assert tokens[0, : int(count[0])].tolist() == [5, 8, 2, 3], "the last time, not the first"
    assert tokens[1, : int(count[1])].tolist() == [1], "what overlaps with its own end goes on as far as it is known"
    assert count[2] == 0
    guess = torch.tensor([[7, 3, 6, 7, 3, 8]])
    prompt, size = torch.tensor([2]), torch.tensor([6])
    assert predicted(guess, size, torch.tensor([[7, 3]]), torch.tensor([2]), prompt, 3)[0].tolist() == [[7, 3, 6]], "from its beginning"
    tokens, count = predicted(guess, size, torch.tensor([[0, 0, 6, 7, 3]]), torch.tensor([5]), prompt, 3)
    assert tokens[0, : int(count)].tolist() == [8]


def test_who_had_a_prediction_leaves_nothing_behind() -> None:
    """Its seat still knows the prediction when a step drafts for others alone."""
    engine = tiny_engine(tiny_model(), 3)
    for i, prompt in enumerate(prompts(3)):
        engine.add(Request(str(i), prompt, SamplingParams(max_tokens=4 + 8 * i), prediction=[1, 2, 3] if i == 0 else []))
    while engine.has_work:
        assert all(event.error is None for event in engine.step())
