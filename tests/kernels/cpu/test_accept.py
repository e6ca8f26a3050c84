"""The verdict and the largest of each row, against the laws written down plainly; alone and among others, with one thread and with two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mtpserve_kernels import noise
from mtpserve_kernels.cpu import accept as cpu
from mtpserve_kernels.spec import reference
from scipy.stats import chisquare
from torch import Tensor

from tests.kernels.cases import agree, case, settings

WithThreads = Callable[[int, Callable[[], Any]], Any]
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0, "coupled": 0}


def compare(arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Rounding could decide once in a million draws: no number is that unlucky here, and each seed gives the same numbers."""
    actual = cpu.accept(*arguments)
    agree(actual, reference.accept(*arguments))
    return actual


def test_the_noise_is_the_same_number() -> None:
    """Of equal weights the token with the least noise wins: one wrong bit of a seed, an index or a token is seen."""
    req_indices, index = torch.arange(400), torch.randint(0, 1 << 30, (400,))
    seed = torch.randint(-(1 << 62), 1 << 62, (400,))
    seed[0], seed[1], index[2] = 0, -1, 0
    ones, zeros = torch.ones(400), torch.zeros(400, dtype=torch.int64)
    tokens = cpu.draw(torch.zeros(400, 5003), req_indices, index, ones, zeros, ones, torch.zeros(400), seed, None, None)
    keys = torch.stack([noise.keyed(s, i, 2) for s, i in zip(seed, index, strict=True)])
    assert tokens.equal(noise.noise(keys, 5003).argmin(1))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("drawn", [False, True], ids=["coupled", "drawn"])
@pytest.mark.parametrize(("requests", "nodes", "vocab"), [(5, 4, 100), (3, 1, 7), (3, 8, 257), (4, 3, 5003), (1, 2, 1)])
def test_chains(requests: int, nodes: int, vocab: int, drawn: bool, seed: int) -> None:
    compare(case(requests, nodes, vocab, seed, tree=False, drawn=drawn))


@pytest.mark.parametrize(("requests", "nodes", "vocab"), [(3, 7, 100), (1, 32, 64), (2, 56, 333)])
def test_trees(requests: int, nodes: int, vocab: int) -> None:
    lengths = []
    for seed in range(12):
        lengths += compare(case(requests, nodes, vocab, seed, tree=True, drawn=False, coupled=1))[1].tolist()
    assert max(lengths) > 1


CUTS = [
    {"top_k": 5}, {"top_k": 1}, {"top_k": 299}, {"top_k": 300}, {"top_k": 4000}, {"top_p": 0.7}, {"top_p": 1e-6}, {"top_p": 0.999},
    {"min_p": 0.1}, {"min_p": 1.0}, {"top_k": 9, "top_p": 0.8, "min_p": 0.05}, {"top_k": 40, "top_p": 0.95, "temperature": 0.6},
]  # fmt: skip


@pytest.mark.parametrize("vocab", [300, 20011])
@pytest.mark.parametrize("given", CUTS, ids=str)
def test_each_cut(given: dict[str, Any], vocab: int) -> None:
    for seed in range(6):
        compare(case(4, 3, vocab, seed, tree=False, drawn=True, **OFF | given))


@pytest.mark.parametrize("scale", [0.0, 1e-6, 30.0])
def test_flat_and_steep_rows(scale: float) -> None:
    """Where all tokens are candidates of a cut, and where nearly all weigh nothing."""
    for seed in range(6):
        arguments = list(case(3, 2, 3000, seed, tree=False, drawn=True, **OFF | {"top_k": (0, 50)[seed % 2], "top_p": 0.9}))
        arguments[0] = arguments[0] * scale
        compare(tuple(arguments))


@pytest.mark.parametrize("given", [{"top_k": 4}, {"top_p": 0.5}, {"min_p": 0.99}], ids=str)
def test_ties_stay_together(given: dict[str, Any]) -> None:
    logits = torch.full((1, 1, 600), -9.0)
    logits[0, 0, 100:110] = 0.0
    seen = set()
    for seed in range(40):
        arguments = list(case(1, 1, 600, seed, tree=False, drawn=False, **OFF | {"coupled": 1} | given))
        arguments[0] = logits
        seen.add(int(compare(tuple(arguments))[0][0, 0]))
    assert seen <= set(range(100, 110)) and len(seen) > 6


def test_forbidden_tokens_are_never_drawn() -> None:
    """-inf, as grammars and rules write it; also where top_k asks for more tokens than are left."""
    for seed in range(20):
        arguments = list(case(2, 2, 700, seed, tree=False, drawn=True, **OFF | {"top_k": (0, 500)[seed % 2]}))
        arguments[0] = arguments[0].masked_fill(torch.arange(700) % 7 != 3, -torch.inf)
        tokens, accepted, _, failed = compare(tuple(arguments))
        assert not failed.any()
        assert all(int(tokens[r, int(accepted[r])]) % 7 == 3 for r in range(2))


def test_rows_that_are_not_finite() -> None:
    arguments = list(case(6, 3, 400, 1, tree=False, drawn=True))
    logits, drafts, count = arguments[0], arguments[1], arguments[2]
    count[:] = 2
    arguments[6] = arguments[6].clone()
    logits[0, 0, 3], logits[1, 0, 5], logits[2, 0] = torch.nan, torch.inf, -torch.inf
    drafts[3, 0] = 399 - int(logits[3, 0].argmax())
    logits[4, 2] = torch.nan  # counts only if node 2 is reached
    logits[5, 0, :200] = -torch.inf
    failed = compare(tuple(arguments))[3]
    assert failed[:3].all() and not failed[3] and not failed[5]


def test_rows_that_decide_nothing_are_not_read() -> None:
    arguments = list(case(2, 4, 50, 3, tree=False, drawn=False, temperature=0))
    arguments[1] = 49 - arguments[0][:, :-1].argmax(-1)  # all are refused
    arguments[0][:, 1:] = torch.nan
    _, accepted, _, failed = compare(tuple(arguments))
    assert not failed.any() and not accepted.any()


def alone(arguments: tuple[Any, ...], r: int) -> tuple[Any, ...]:
    """The same step with one request."""
    per_request = {0, 1, 2, 3, 4, 5}
    return tuple(x[r : r + 1].contiguous() if i in per_request and isinstance(x, Tensor) else x for i, x in enumerate(arguments))


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_a_request_is_judged_as_if_alone(tree: bool, with_threads: WithThreads) -> None:
    arguments = case(9, 5, 20000, 4, tree=tree, drawn=not tree, **({"coupled": 1} if tree else {}))
    one, two = (with_threads(threads, lambda: cpu.accept(*arguments)) for threads in (1, 2))
    for r in range(9):
        lone = cpu.accept(*alone(arguments, r))
        for part, again, own in zip(one, two, lone, strict=True):
            assert torch.equal(part, again) and torch.equal(part[r : r + 1], own)


def test_the_law_of_a_chain() -> None:
    """Drafts drawn from q, one step of many requests: the first token's law is the target's."""
    vocab, requests = 4, 20000
    dice = torch.Generator().manual_seed(2)
    p_logits, q = torch.tensor([2.0, 0.0, 0.0, 1.0]), torch.tensor([0.0, 1.5, 0.0, 1.0]).softmax(-1)
    logits = p_logits.expand(requests, 2, vocab).contiguous()
    drafts = torch.multinomial(q, requests, replacement=True, generator=dice).unsqueeze(1)
    per_seat = settings(requests, dice, **OFF | {"temperature": 0.8})
    tokens, accepted, _, _ = cpu.accept(
        logits, drafts, torch.ones(requests, dtype=torch.int64), None, None, torch.arange(requests), *per_seat.values(),
        q.expand(requests, 1, vocab).contiguous(), 1,
    )  # fmt: skip
    law = reference.law(p_logits, 0.8, 0, 1.0, 0.0)
    counts = torch.bincount(tokens[:, 0], minlength=vocab)
    assert 0.2 < accepted.float().mean() < 1
    assert chisquare(counts.numpy(), (law * requests).numpy(), sum_check=False).pvalue > 1e-4
    assert chisquare(counts.numpy(), (q * requests).numpy(), sum_check=False).pvalue < 1e-6, "and not the drafts' law"


@pytest.mark.parametrize("vocab", [1, 7, 256, 257, 40001])
def test_argmax(vocab: int, with_threads: WithThreads) -> None:
    logits = torch.randint(-3, 4, (9, vocab)).float()  # full of ties
    logits[1], logits[2, vocab // 2], logits[3, vocab // 3 :] = -torch.inf, torch.nan, torch.nan
    logits[4, vocab // 2 :] = torch.inf
    wide = torch.cat([logits, torch.full((9, 5), 100.0)], 1)
    for threads in (1, 2):
        assert torch.equal(with_threads(threads, lambda: cpu.argmax(wide[:, :vocab])), logits.argmax(-1))
