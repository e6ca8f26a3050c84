"""Random input for the verdict's kernels and those that move slots, for every device's tests; and what agreeing with a reference means."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def settings(seats: int, dice: torch.Generator, **given: Any) -> dict[str, Tensor]:
    """Per seat, drawn at random; a value that is given holds for all."""

    def choice(name: str, options: list[float], dtype: torch.dtype) -> Tensor:
        if name in given:
            return torch.full((seats,), given[name], dtype=dtype)
        return torch.tensor(options)[torch.randint(len(options), (seats,), generator=dice)].to(dtype)

    return {
        "length": torch.randint(1, 1000, (seats,), generator=dice),
        "temperature": choice("temperature", [0.0, 0.3, 1.0, 2.0], torch.float32),
        "top_k": choice("top_k", [0, 1, 3, 20], torch.int64),
        "top_p": choice("top_p", [1.0, 0.9, 0.5, 1e-6], torch.float32),
        "min_p": choice("min_p", [0.0, 0.05, 0.6], torch.float32),
        "seed": torch.randint(-(1 << 62), 1 << 62, (seats,), generator=dice),
        "coupled": choice("coupled", [0, 1], torch.bool),
    }


def tree_of(requests: int, nodes: int, dice: torch.Generator) -> tuple[Tensor, Tensor]:
    parents = torch.stack([(torch.rand(requests, generator=dice) * (i + 1)).long() for i in range(nodes - 1)], 1)
    depths = torch.zeros(requests, nodes, dtype=torch.int64)
    for i in range(nodes - 1):
        depths[:, i + 1] = depths.gather(1, parents[:, i : i + 1]).squeeze(1) + 1
    return parents, depths


def case(requests: int, nodes: int, vocab: int, seed: int, tree: bool, drawn: bool, **given: Any) -> tuple[Any, ...]:
    """Logits of few likely tokens and drafts among them, so that drafts are accepted and refused."""
    dice = torch.Generator().manual_seed(seed)
    req_indices = torch.randperm(requests + 2, generator=dice)[:requests]
    logits = torch.randn(requests, nodes, vocab, generator=dice) * 2
    likely = logits.topk(min(3, vocab), -1).indices
    drafts = likely[:, :-1].gather(2, torch.randint(likely.shape[2], (requests, nodes - 1, 1), generator=dice)).squeeze(2)
    parents, depths = tree_of(requests, nodes, dice) if tree else (None, None)
    if parents is not None and depths is not None:  # as the engine keeps them: a part of wider rows
        parents, depths = torch.nn.functional.pad(parents, (0, 3))[:, : nodes - 1], torch.nn.functional.pad(depths, (0, 2))[:, :nodes]
    if parents is not None:
        own = logits.argmax(-1)
        follow = torch.rand(requests, nodes - 1, generator=dice) < 0.6
        drafts = torch.where(follow, own.gather(1, parents), drafts)
        # Siblings differ: a repeated one is taken out.
        for i in range(nodes - 1):
            twin = ((parents[:, :i] == parents[:, i : i + 1]) & (drafts[:, :i] == drafts[:, i : i + 1])).any(1)
            drafts[twin, i] = -1
    per_seat = settings(requests + 2, dice, **given)
    q = torch.full((requests + 2, nodes - 1, vocab), torch.nan)
    q[req_indices] = (logits[:, :-1] + torch.randn(requests, nodes - 1, vocab, generator=dice)).softmax(-1)
    count = torch.randint(nodes, (requests,), generator=dice)
    depth = nodes - 1 if depths is None else int(depths.max())
    return (logits, drafts, count, parents, depths, req_indices, *per_seat.values(), q if drawn and nodes > 1 else None, depth)


def agree(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """tokens, accepted, path, failed of two verdicts. After a request's end tokens are void, and all of it where it failed."""
    tokens, accepted, path, failed = actual
    assert torch.equal(failed, expected[3])
    fine = ~failed
    assert torch.equal(accepted[fine], expected[1][fine])
    counts = torch.arange(tokens.shape[1]) <= accepted.unsqueeze(1)
    assert torch.equal(tokens[fine][counts[fine]], expected[0][fine][counts[fine]])
    assert torch.equal(path[fine], expected[2][fine])


def paths(heads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """pool [3, 40, heads, dim]; source and target [4, 4]: paths of trees that overlap with where they go, or nothing."""
    dice = torch.Generator().manual_seed(dim)
    pool = torch.randn(3, 40, heads, dim, generator=dice).to(dtype)
    # Slots of four requests, ten each; a path is an increasing choice of nodes, its end repeated, or nothing.
    base = torch.randperm(40, generator=dice).view(4, 10)
    chosen = torch.tensor([[1, 2, 3, 4], [2, 3, 5, 9], [3, 3, 3, 3], [1, 4, 4, 4]])
    source, target = base.gather(1, chosen), base[:, 1:5].clone()
    repeated = torch.tensor([[False] * 4, [False] * 4, [False, True, True, True], [False, False, True, True]])
    source[repeated] = target[repeated] = -1
    return pool, source.contiguous(), target.contiguous()


def places(number: int, page: int) -> tuple[Tensor, Tensor, Tensor]:
    """page_table [6, 40], seats and index [number]"""
    dice = torch.Generator().manual_seed(number)
    table = torch.randint(1 << 40, (6, 40), generator=dice)
    req_indices, index = (torch.randint(most, (number,), generator=dice) for most in (6, 40 * page))
    return table, req_indices, index


def boundary(width: int, page: int) -> tuple[Tensor, Tensor, Tensor]:
    """rows [9, width] of pages, slots [n] in the first eight, hidden [n, width]"""
    dice = torch.Generator().manual_seed(width)
    kept = torch.randn(9, width, generator=dice)
    taken = torch.randperm(8 * page, generator=dice)[: 5 * page]
    return kept, taken, torch.randn(len(taken), width, generator=dice)
