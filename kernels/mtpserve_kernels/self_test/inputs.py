"""Random input of the kernels, small and of odd sizes. All tensors are on the CPU; what a kernel must not read is NaN."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mtpserve_kernels.lora.reference import row_adapters
from mtpserve_kernels.recurrent.reference import LayerState, Rule, StateSpans
from mtpserve_kernels.requests.reference import RequestTable

PAGE = 16
SEATS = 5
RULE = Rule(2, 4, 64, 64, 4)
TREE = [0, 0, 1, 1]  # the parent of each draft; node 0 is the root


class Random:
    """Numbers from one seed."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        """`dtype`: of a model's weights, and of what goes through its layers."""
        self.generator, self.dtype = torch.Generator().manual_seed(seed), dtype

    def floats(self, *shape: int) -> Tensor:
        """float32"""
        return torch.randn(shape, generator=self.generator)

    def normal(self, *shape: int) -> Tensor:
        return self.floats(*shape).to(self.dtype)

    def matrix(self, *shape: int) -> Tensor:
        """[..., N, K]: products are about as large as what is multiplied."""
        return self.floats(*shape).mul(float(shape[-1]) ** -0.5).to(self.dtype)

    def nan(self, *shape: int) -> Tensor:
        return torch.full(shape, torch.nan, dtype=self.dtype)

    def integers(self, end: int, *shape: int) -> Tensor:
        return torch.randint(end, shape, generator=self.generator)

    def order(self, number: int) -> Tensor:
        return torch.randperm(number, generator=self.generator)


def rotation(random: Random, rows: int, rope: int) -> tuple[Tensor, Tensor, Tensor]:
    """→ positions [rows], cos and sin [50, rope / 2]"""
    angles = torch.outer(torch.arange(50.0), 10_000 ** -(torch.arange(0, rope, 2) / rope))
    return random.integers(50, rows), angles.cos(), angles.sin()


def add_lora(random: Random) -> tuple[Any, ...]:
    """Rows of two adapters and of none."""
    parts, rank = (96, 33, 31), 8
    a, b = random.matrix(3, len(parts) * rank, 200), random.matrix(3, rank, sum(parts))
    slots = torch.tensor([-1, 0, 2, 2, -1, 0])
    return random.normal(6, 200), random.normal(6, sum(parts)), row_adapters(slots), a, b, parts


def rope_store(random: Random) -> tuple[Any, ...]:
    rows, heads, kv_heads, dim = 5, 6, 2, 64
    qkv, norms = random.normal(rows, heads + 2 * kv_heads, dim), (random.normal(dim), random.normal(dim))
    caches = random.nan(32, kv_heads, dim), random.nan(32, kv_heads, dim)
    return qkv, *rotation(random, rows, dim), random.order(32)[:rows], *caches, heads, *norms, 1e-6, False


def latent_store(random: Random) -> tuple[Any, ...]:
    rows, heads, rank, rope, nope = 4, 3, 512, 64, 128
    q, down = random.normal(rows, heads, nope + rope), random.normal(rows, rank + rope)
    return (
        q,
        down,
        *rotation(random, rows, rope),
        random.order(16)[:rows],
        random.nan(16, 1, rank + rope),
        random.normal(rank),
        1e-6,
        nope,
        True,
    )


def spans(random: Random, shape: tuple[int, int, int | None, int], tree: bool) -> tuple[Any, ...]:
    """The arguments of span_gqa, or of span_mla where there is no value_dim: requests in prompts and with drafts. `shape`: kv_heads,
    key_dim, value_dim, heads."""
    kv_heads, key_dim, value_dim, heads = shape
    before, rows = [0, 37, 250, 5], [23, 1, len(TREE) + 1, len(TREE) + 1]
    lengths = [first + count for first, count in zip(before, rows, strict=True)]
    pages = [-(-length // PAGE) for length in lengths]
    order, start = random.order(sum(pages) + 1), 0
    block_table = torch.full((SEATS, max(pages) + 1), 1 << 40)
    keys = random.nan((sum(pages) + 1) * PAGE, kv_heads, key_dim)
    values = keys if value_dim is None else random.nan(len(keys), kv_heads, value_dim)
    seats = random.order(SEATS)[: len(rows)]
    for req_idx, length, count in zip(seats.tolist(), lengths, pages, strict=True):
        block_table[req_idx, :count] = order[start : start + count]
        slots = (order[start : start + count].unsqueeze(1) * PAGE + torch.arange(PAGE)).flatten()[:length]
        keys[slots] = random.normal(length, kv_heads, key_dim)
        if value_dim is not None:
            values[slots] = random.normal(length, kv_heads, value_dim)
        start += count
    bits, starts = None, None
    if tree:
        ancestors = [1]
        for node, parent in enumerate(TREE, 1):
            ancestors.append(ancestors[parent] | 1 << node)
        bits = torch.tensor([bit for count in rows for bit in ([-1] * count if count <= 1 or count > 5 else ancestors)])
        starts = torch.tensor([length - count for length, count in zip(lengths, rows, strict=True)])
    query_start_loc = torch.tensor([0, *rows]).cumsum(0)
    index = torch.cat([torch.arange(first, end) for first, end in zip(before, lengths, strict=True)])
    where = block_table, seats, query_start_loc, torch.tensor(lengths), index, bits, starts, PAGE, key_dim**-0.5
    q = random.normal(len(index), heads, key_dim)
    return (q, keys, *where, 512) if value_dim is None else (q, keys, values, *where)


def select(random: Random) -> tuple[Any, ...]:
    """Rows of lightning indexer heads over 90 columns of pages."""
    rows, heads, dim, columns = 4, 8, 128, 90
    pages = -(-columns // PAGE)
    block_table = random.order(SEATS * pages).view(SEATS, pages)
    keys = random.normal(SEATS * pages * PAGE, 1, dim)
    ends = torch.tensor([columns, 40, 3, 64])
    return (
        random.normal(rows, heads, dim),
        random.floats(rows, heads),
        keys,
        block_table,
        random.order(SEATS)[:rows],
        ends,
        None,
        None,
        PAGE,
        32,
    )


def selected_mla(random: Random) -> tuple[Any, ...]:
    rows, best, counts = 3, 40, torch.tensor([40, 7, 33])
    slots = torch.stack([random.order(64)[:best] for _ in range(rows)])
    return random.normal(rows, 16, 576), random.normal(64, 1, 576), slots, counts, 576**-0.5, 512


def linear(random: Random) -> tuple[Any, ...]:
    return random.normal(4, 512), random.matrix(272, 512), random.normal(272)


def linear_fp8(random: Random) -> tuple[Any, ...]:
    return random.normal(5, 384), random.normal(272, 384).to(torch.float8_e4m3fn), random.floats(3, 3).abs() * 0.05, random.normal(272)


def linear_rows(random: Random) -> tuple[Any, ...]:
    """Four-bit integers with a scale and a zero for 32 of them."""
    scale = random.floats(256, 8).abs() * 0.05
    return random.normal(3, 256), random.integers(256, 256, 128).to(torch.uint8), scale, random.integers(16, 256, 8).to(torch.uint8)


def route(random: Random) -> tuple[Any, ...]:
    return random.normal(7, 256), random.matrix(64, 256).float(), random.floats(64) * 0.1, 6, 8, 3, True, 2.5


def experts(random: Random, rows: int) -> tuple[Any, ...]:
    number, hidden, size, top = 8, 256, 128, 3
    topk_ids = torch.stack([random.order(number)[:top] for _ in range(rows)])
    shared = random.matrix(2 * size, hidden), random.matrix(hidden, size)
    matrices = random.matrix(number, 2 * size, hidden), random.matrix(number, hidden, size)
    return random.normal(rows, hidden), random.floats(rows, top).softmax(-1), topk_ids, *matrices, *shared


def recur(random: Random) -> tuple[Any, ...]:
    rule, lengths, drafts, ring = RULE, [1, 7, 40], [3, 0, 2], 4
    seats, query_start_loc = random.order(SEATS)[:3], torch.tensor([0, *(n + k for n, k in zip(lengths, drafts, strict=True))]).cumsum(0)
    total = int(query_start_loc[-1])

    def gates(*shape: int) -> Tensor:
        return torch.stack([-random.floats(*shape).abs(), random.floats(*shape).sigmoid()], -2)

    layer = LayerState(
        random.floats(SEATS, rule.value_heads, rule.key_dim, rule.value_dim), random.normal(SEATS, rule.taps - 1, rule.channels),
        random.normal(SEATS, ring, rule.channels), gates(SEATS, ring, rule.value_heads),
    )  # fmt: skip
    fresh, replay = torch.tensor([0, 0, 1]), torch.tensor([2, 0, 0])
    states = StateSpans(seats, query_start_loc, torch.tensor(lengths), replay, fresh, None, None, None, ring, max(lengths))
    conv = random.floats(rule.taps, rule.channels)
    return random.normal(total, rule.channels), gates(total, rule.value_heads), conv, layer, states, rule


def sampling(random: Random) -> tuple[Tensor, ...]:
    """temperature, top_k, top_p, min_p, seed and coupled of each seat: greedy, cut in each way, and not cut."""
    return (
        torch.tensor([0.0, 1.0, 0.6, 1.0, 0.8]),
        torch.tensor([0, 0, 20, 0, 5]),
        torch.tensor([1.0, 0.9, 1.0, 1.0, 0.95]),
        torch.tensor([0.0, 0.0, 0.0, 0.05, 0.02]),
        random.integers(1 << 40, SEATS),
        torch.tensor([True, False, True, False, False]),
    )


def accept(random: Random, tree: bool) -> tuple[Any, ...]:
    """Drafts among the likely tokens, so that some are accepted and some are not."""
    vocab, drafts = 5_000, len(TREE)
    logits = random.floats(SEATS, drafts + 1, vocab) * 3
    likely = logits.topk(2, -1).indices
    parents = torch.tensor(TREE).repeat(SEATS, 1) if tree else None
    before = torch.tensor(TREE) if tree else torch.arange(drafts)
    # Siblings differ: the second child of a node is its second likely token.
    rank = torch.tensor([list(TREE[:i]).count(parent) if tree else 0 for i, parent in enumerate(TREE)])
    tokens = likely[:, before, rank]
    depths = torch.tensor([0, 1, 1, 2, 2]).repeat(SEATS, 1) if tree else None
    counts = torch.tensor([drafts, drafts, drafts - 1, 0, drafts])
    probs = None if tree else (logits[:, :-1] + random.floats(SEATS, drafts, vocab)).softmax(-1)
    *cuts, coupled = sampling(random)
    law = torch.ones(SEATS, dtype=torch.bool) if tree else coupled
    return (
        logits,
        tokens,
        counts,
        parents,
        depths,
        torch.arange(SEATS),
        random.integers(1_000, SEATS),
        *cuts,
        law,
        probs,
        2 if tree else drafts,
    )


def draw(random: Random) -> tuple[Any, ...]:
    vocab = 5_000
    return (
        random.floats(SEATS, vocab) * 3,
        torch.arange(SEATS),
        random.integers(1_000, SEATS),
        *sampling(random),
        torch.full((SEATS, vocab), torch.nan),
    )


def request_table(random: Random) -> RequestTable:
    """Requests at random places. Some have ended; one stops at a token that is committed next."""
    width, columns = 96, 96 // PAGE
    computed = random.integers(40, SEATS)
    counts = torch.stack([computed + 1, computed, computed // 2, computed + 20, random.integers(4, SEATS)])
    done, stops = torch.tensor([False, True, False, False, False]), torch.tensor([[3], [-1], [-1], [7], [-1]])
    block_table = random.order(SEATS * columns).view(SEATS, columns)
    return RequestTable(random.integers(40, SEATS, width), counts, stops, done, block_table, PAGE)


def place(random: Random) -> tuple[Any, ...]:
    spans = [4, 1, 7]
    offset = torch.cat([torch.arange(count) for count in spans])
    row_span = torch.arange(len(spans)).repeat_interleave(torch.tensor(spans))
    starts, ones = torch.tensor([0, *spans]).cumsum(0), torch.ones(len(spans), dtype=torch.int64)
    return request_table(random), random.order(SEATS)[: len(spans)], row_span, offset, starts, 3 * ones, ones


def following(random: Random) -> tuple[Any, ...]:
    return request_table(random), random.integers(SEATS, 9), random.integers(60, 9)


def hold(random: Random) -> tuple[Any, ...]:
    return request_table(random), random.order(SEATS)[:3], random.integers(40, 3, 4), torch.tensor([4, 0, 2])


def advance(random: Random) -> tuple[Any, ...]:
    spans = torch.tensor([0, 5, 6, 10])
    last, ones = torch.tensor([1, 5, 6]), torch.ones(3, dtype=torch.int64)
    return request_table(random), random.order(SEATS)[:3], spans, last, ones, torch.tensor([3, 0, 2]), random.integers(40, 3, 4)


def slots(random: Random) -> tuple[Any, ...]:
    return random.integers(1 << 40, 6, 40), random.integers(6, 33), random.integers(40 * PAGE, 33), PAGE


def compact(random: Random) -> tuple[Any, ...]:
    """Accepted nodes move to the front of their request's rows; where there is nothing to move both are -1."""
    base = random.order(40).view(4, 10)
    nodes = torch.tensor([[1, 2, 3, 4], [2, 3, 5, 9], [3, 5, 6, 7], [1, 4, 4, 4]])
    source, target = base.gather(1, nodes), base[:, 1:5].clone()
    repeated = torch.tensor([[False, *(first == second for first, second in pairwise(row))] for row in nodes.tolist()])
    source[repeated] = target[repeated] = -1
    return random.normal(3, 40, 2, 64), source.contiguous(), target


def store_boundary(random: Random) -> tuple[Any, ...]:
    taken = random.order(8 * PAGE)[: 5 * PAGE]
    return random.normal(9, 200), taken, random.normal(len(taken), 200), PAGE
