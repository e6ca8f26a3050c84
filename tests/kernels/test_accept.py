"""The verdict's kernels against the laws written down plainly: chains drawn from q, point masses, trees, every cut, broken rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mtpserve_kernels.spec import reference
from mtpserve_kernels.spec.accept import accept
from scipy.stats import chisquare
from torch import Tensor

from tests.kernels.cases import agree, case, settings


def rounds(device: torch.device) -> range:
    """The interpreter takes a tenth of a second for a node."""
    return range(1 if device.type == "cpu" else 10)


def on(device: torch.device, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.to(device) if isinstance(x, Tensor) else x for x in arguments)


def compare(device: torch.device, arguments: tuple[Any, ...], **options: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    actual = accept(*on(device, arguments), **options)
    assert actual[3].dtype == torch.bool
    tokens, accepted, path, failed = (x.cpu() for x in actual)
    agree((tokens, accepted, path, failed), reference.accept(*arguments))
    return tokens, accepted, path, failed


@pytest.mark.parametrize("drawn", [False, True], ids=["coupled", "drawn"])
@pytest.mark.parametrize(("requests", "nodes", "vocab"), [(5, 4, 100), (3, 1, 7), (3, 8, 257), (1, 3, 5000)])
def test_chains(device: torch.device, requests: int, nodes: int, vocab: int, drawn: bool) -> None:
    for seed in rounds(device):
        compare(device, case(requests, nodes, vocab, seed, tree=False, drawn=drawn))


@pytest.mark.parametrize(("requests", "nodes", "vocab"), [(3, 7, 100), (1, 32, 64), (1, 56, 33)])
def test_trees(device: torch.device, requests: int, nodes: int, vocab: int) -> None:
    lengths = []
    for seed in rounds(device):
        arguments = case(requests, nodes, vocab, seed, tree=True, drawn=False, coupled=1)
        lengths += compare(device, arguments)[1].tolist()
    assert max(lengths) > 0


CUTS = [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 1}, {"top_p": 1e-6}, {"top_k": 9, "top_p": 0.8, "min_p": 0.05}]


@pytest.mark.parametrize("given", CUTS)
def test_each_cut_alone(device: torch.device, given: dict[str, Any]) -> None:
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0, "coupled": 0} | given
    compare(device, case(4, 3, 300, 3, tree=False, drawn=True, **off))


WIDE_CUTS = [
    ({"top_k": 9, "top_p": 0.8, "min_p": 0.05}, 3.0),  # among the candidates of the chunks
    ({"top_k": 500}, 1.0),  # below their bounds, as the next ones
    ({"top_p": 0.9}, 0.2),
    ({"top_k": 40, "top_p": 0.999}, 1.0),
    ({"min_p": 0.5}, 0.1),
]


@pytest.mark.parametrize(("given", "spread"), WIDE_CUTS)
def test_cuts_of_several_chunks(device: torch.device, given: dict[str, Any], spread: float) -> None:
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0, "coupled": 1} | given
    arguments = case(2, 2, 9001, 4, tree=False, drawn=False, **off)
    arguments[0].mul_(spread)
    compare(device, arguments)


def test_cuts_through_more_equal_logits_than_candidates(device: torch.device) -> None:
    """All are kept, or none; a chunk of one number alone has none that its bound is below."""
    off = {"top_k": 3, "top_p": 0.9, "min_p": 0.0, "temperature": 1.0, "coupled": 1}
    logits = torch.full((1, 1, 9000), -2.0)
    logits[0, 0, 4100:4200] = 1.0
    for seed in range(4):
        arguments = list(case(1, 1, 9000, seed, tree=False, drawn=False, **off))
        arguments[0] = logits
        assert 4100 <= int(compare(device, tuple(arguments))[0][0, 0]) < 4200


def test_ties_stay_together(device: torch.device) -> None:
    """As many equal logits as you like: all of them are kept, or none."""
    logits = torch.zeros(1, 1, 50)
    logits[0, 0, 10:] = -1.0
    off = {"top_k": 4, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0, "coupled": 1}
    seen = set()
    for seed in range(20):
        arguments = list(case(1, 1, 50, seed, tree=False, drawn=False, **off))
        arguments[0] = logits
        seen.add(int(compare(device, tuple(arguments))[0][0, 0]))
    assert seen <= set(range(10)) and len(seen) > 3


def test_rows_that_are_not_finite(device: torch.device) -> None:
    arguments = list(case(6, 3, 40, 1, tree=False, drawn=True))
    logits, drafts, count = arguments[0], arguments[1], arguments[2]
    count[:] = 2
    arguments[6] = arguments[6].clone()
    logits[0, 0, 3], logits[1, 0, 5], logits[2, 0] = torch.nan, torch.inf, -torch.inf
    drafts[3, 0] = 39 - int(logits[3, 0].argmax())  # refused or not, node 1 of request 4 counts only if it is reached
    logits[4, 2] = torch.nan
    logits[5, 0, :20] = -torch.inf
    failed = compare(device, tuple(arguments))[3]
    assert failed[:3].all() and not failed[3] and not failed[5]


GREEDY = {"temperature": 0.0}
NO_CUTS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


@pytest.mark.parametrize("given", [GREEDY, NO_CUTS, NO_CUTS | {"temperature": 1.0}, NO_CUTS | {"temperature": 1.0, "coupled": 0}, {}])
@pytest.mark.parametrize(("vocab", "shift"), [(1, 0.0), (4099, -80.0), (9001, 30.0)])
def test_rows_of_several_chunks(device: torch.device, vocab: int, shift: float, given: dict[str, Any]) -> None:
    """Logits of one sign alone: what is beside a row's chunks must not look larger."""
    arguments = case(3, 3, vocab, vocab, tree=False, drawn=True, **given)
    arguments[0].add_(shift)
    options = {f"any_{name}": False for name in ("top_k", "top_p", "min_p")} if given else {}
    compare(device, arguments, **options)
    if given is GREEDY:
        compare(device, arguments, all_greedy=True)


def test_ties_across_chunks(device: torch.device) -> None:
    """A greedy request takes the first of equal logits, and a sampled one may take each of them."""
    logits = torch.full((1, 1, 9000), -torch.inf)
    logits[0, 0, [4000, 4100, 8999]] = -3.0
    tokens = set()
    for seed in range(6):
        arguments = list(case(1, 1, 9000, seed, tree=False, drawn=False, **NO_CUTS, temperature=1.0))
        arguments[0] = logits
        tokens.add(int(compare(device, tuple(arguments))[0][0, 0]))
    assert tokens <= {4000, 4100, 8999} and len(tokens) > 1
    arguments = list(case(1, 1, 9000, 0, tree=False, drawn=False, **GREEDY))
    arguments[0] = logits
    assert int(compare(device, tuple(arguments))[0][0, 0]) == 4000


def test_requests_do_not_change_each_other(device: torch.device) -> None:
    """A request's verdict is the same alone, with the launches that it needs, and beside others that need more."""
    arguments = list(case(6, 3, 5000, 7, tree=False, drawn=True))
    seats = arguments[5]
    arguments[7][seats] = torch.tensor([0.0, 1.0, 0.7, 0.0, 1.5, 1.0])
    arguments[8][seats[:3]], arguments[9][seats[:3]], arguments[10][seats[:3]] = 0, 1.0, 0.0
    together = compare(device, tuple(arguments))
    for r in range(3):
        alone = [x[r : r + 1] if i in (0, 1, 2, 5) else x for i, x in enumerate(arguments)]
        verdict = compare(device, tuple(alone), all_greedy=r == 0, any_top_k=False, any_top_p=False, any_min_p=False)
        for one, all_of_them in zip(verdict, together, strict=True):
            assert one[0].equal(all_of_them[r])


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_drafts_by_the_rows_of_a_step(device: torch.device, tree: bool) -> None:
    """The drafts may be the ids of a step's rows, of which each node has one."""
    arguments = list(case(4, 4, 300, 5, tree=tree, drawn=not tree, **({"coupled": 1} if tree else {})))
    expected = compare(device, tuple(arguments))
    drafts = arguments[1]
    rows = torch.randperm(40, generator=torch.Generator().manual_seed(3))[:16].view(4, 4)
    ids = torch.full((40,), -(1 << 40)).index_put_((rows[:, 1:],), drafts)
    arguments[1] = ids
    actual = accept(*on(device, tuple(arguments)), sample_rows=rows.to(device))
    agree(tuple(part.cpu() for part in actual), expected)


def test_the_law_of_a_chain(device: torch.device) -> None:
    """Drafts drawn from q, one step of many requests: the first token's law is the target's."""
    vocab, requests = 4, 4000 if device.type == "cuda" else 120
    dice = torch.Generator().manual_seed(2)
    p_logits, q = torch.tensor([2.0, 0.0, 0.0, 1.0]), torch.tensor([0.0, 1.5, 0.0, 1.0]).softmax(-1)
    logits = p_logits.expand(requests, 2, vocab).contiguous()
    drafts = torch.multinomial(q, requests, replacement=True, generator=dice).unsqueeze(1)
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 0.8, "coupled": 0}
    per_seat = settings(requests, dice, **off)
    arguments = (logits, drafts, torch.ones(requests, dtype=torch.int64), None, None, torch.arange(requests), *per_seat.values(),
                 q.expand(requests, 1, vocab).contiguous(), 1)  # fmt: skip
    tokens, accepted, _, _ = accept(*on(device, arguments), any_top_k=False, any_top_p=False, any_min_p=False)
    law = reference.law(p_logits, 0.8, 0, 1.0, 0.0)
    counts = torch.bincount(tokens[:, 0].cpu(), minlength=vocab)
    assert 0.2 < accepted.float().mean() < 1
    assert chisquare(counts.numpy(), (law * requests).numpy(), sum_check=False).pvalue > 1e-4
    assert chisquare(counts.numpy(), (q * requests).numpy(), sum_check=False).pvalue < 1e-6, "and not the drafts' law"
