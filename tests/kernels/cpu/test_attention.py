"""Attention of a CPU against the reference, and bit by bit against plain decoding; everything that must not be read is NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mtpserve_kernels.attention import reference
from mtpserve_kernels.cpu.attention import span_gqa, span_mla
from torch import Tensor

from mtpserve.config import SpecConfig
from mtpserve.core.sampling import SamplingParams
from tests.kernels.spans import RAGGED, Span, SpanCase, check
from tests.tiny import prompts, run as run_engine, tiny_engine, tiny_model

FP32, BF16 = torch.float32, torch.bfloat16
CPU = torch.device("cpu")
# Blocks of 64 columns: spans that end before, at and after a border; trees over one; prompts of several pieces.
MANY: list[Span] = [*RAGGED, (63, 1), (60, 9), (127, 2), (300, 64), (120, 40), (0, 210)]
LATENT: list[Span] = [(0, 3), (70, 4), (126, 5), (9, 1)]
CHAIN = SpecConfig(speculative_algorithm="MTP", speculative_num_steps=3)
TREE = SpecConfig(speculative_algorithm="MTP", speculative_num_steps=2, speculative_eagle_topk=2, speculative_num_draft_tokens=5)
WithThreads = Callable[[int, Callable[[], Any]], Any]

KINDS = [pytest.param(dtype, tree, id=f"{dtype}-{'tree' if tree else 'chain'}"[6:]) for dtype in (FP32, BF16) for tree in (False, True)]


def run(case: SpanCase, made: dict[str, Any], functions: Any = (span_gqa, span_mla)) -> Tensor:
    arguments = (made["q"], *made["caches"], *made["common"], *([case.value_dim] if case.latent else []))
    out: Tensor = functions[case.latent](*arguments, window=case.window, shift=case.shift, sinks=made["sinks"])
    return out


def expected(case: SpanCase, made: dict[str, Any]) -> Tensor:
    return run(case, made, (reference.span_gqa, reference.span_mla))


def decoding(case: SpanCase, made: dict[str, Any], r: int, row: int) -> Tensor:
    """The same query in plain decoding: alone, its ancestors the last tokens before it, in pages of its own."""
    table, seats, _, _, index, bits, starts, page, scale = made["common"]
    columns = torch.arange(int(index[row]) + 1)
    if case.tree and int(bits[row]) != -1:
        nodes = torch.tensor([node for node in range(64) if int(bits[row]) >> node & 1])
        columns = torch.cat([torch.arange(int(starts[r])), starts[r] + nodes])
    low = max(len(columns) - case.window, 0) if case.window else 0
    place = columns[low:] + case.shift
    slots = table[seats[r], place // page] * page + place % page
    pages = -(-(len(columns) + case.shift) // page)
    own = torch.full((1, pages), 1 << 40)
    first = (low + case.shift) // page
    own[0, first:] = torch.randperm(pages)[first:]
    to = torch.arange(low, len(columns)) + case.shift
    to = own[0, to // page] * page + to % page
    caches = []
    for cache in made["caches"]:
        caches.append(cache.new_full((pages * page, *cache.shape[1:]), torch.nan))
        caches[-1][to] = cache[slots]
    last = torch.tensor([len(columns)])
    common = own, torch.tensor([0]), torch.tensor([0, 1]), last, last - 1, None, None, page, scale
    return run(case, {**made, "q": made["q"][row : row + 1], "caches": caches, "common": common})[0]


def check_decoding(case: SpanCase, spans: list[Span], heads: int, seed: int = 0) -> None:
    """Every row of a batch is what it is in plain decoding, to the last bit."""
    made = case.make(spans, heads, CPU, seed)
    out = run(case, made)
    check(out, expected(case, made))
    ends = made["common"][2].tolist()
    for r in range(len(spans)):
        for row in range(ends[r], ends[r + 1]):
            assert torch.equal(out[row], decoding(case, made, r, row)), (r, row)


@pytest.mark.parametrize(("dtype", "tree"), KINDS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "key_dim", "value_dim", "page"),
    [
        (4, 4, 64, 64, 64),
        (6, 2, 80, 80, 16),
        (7, 1, 128, 128, 32),
        (10, 2, 96, 72, 16),
        (4, 2, 192, 128, 128),
        (4, 2, 256, 256, 1),
        (2, 1, 8, 6, 4),
    ],
)
def test_grouped_heads(heads: int, kv_heads: int, key_dim: int, value_dim: int, page: int, dtype: torch.dtype, tree: bool) -> None:
    check_decoding(SpanCase(kv_heads, key_dim, value_dim, page, dtype=dtype, tree=tree), MANY, heads)


@pytest.mark.parametrize(("dtype", "tree"), KINDS)
@pytest.mark.parametrize("heads", [2, 5, 16, 40, 128])
def test_latent(heads: int, dtype: torch.dtype, tree: bool) -> None:
    check_decoding(SpanCase(1, 576, 512, 16, latent=True, dtype=dtype, tree=tree), LATENT, heads)


@pytest.mark.parametrize(
    ("tree", "window", "shift"),
    [(False, 0, 1), (False, 1, 0), (False, 7, 3), (False, 64, 1), (False, 65, 0), (True, 0, 1), (True, 40, 0), (True, 70, 1)],
)
def test_windows_and_shifts(tree: bool, window: int, shift: int) -> None:
    check_decoding(SpanCase(2, 64, 64, 16, tree=tree, window=window, shift=shift), MANY, 4)
    check_decoding(SpanCase(1, 80, 48, 4, dtype=BF16, tree=tree, window=window, shift=shift), [*MANY, (257, 5)], 3)
    check_decoding(SpanCase(1, 72, 64, 16, latent=True, tree=tree, window=window, shift=shift), LATENT, 4)


@pytest.mark.parametrize(("tree", "window", "shift"), [(False, 0, 0), (False, 7, 3), (True, 0, 1), (True, 40, 0)])
def test_sinks(tree: bool, window: int, shift: int) -> None:
    check_decoding(SpanCase(2, 64, 64, 16, tree=tree, window=window, shift=shift, sinks=True), MANY, 6)
    check_decoding(SpanCase(1, 80, 48, 4, dtype=BF16, tree=tree, window=window, shift=shift, sinks=True), [*MANY, (257, 5)], 3)
    check_decoding(SpanCase(1, 72, 64, 16, latent=True, tree=tree, window=window, shift=shift, sinks=True), LATENT, 4)


@pytest.mark.parametrize("widest", [32, 64])
@pytest.mark.parametrize("before", [0, 1, 50, 63, 64, 127])
def test_wide_trees(widest: int, before: int) -> None:
    """All 64 bits are used; a tree lies in one block of columns, or in two."""
    check_decoding(SpanCase(2, 64, 64, 16, tree=True), [(before, widest), (1, 29)], 4)


@pytest.mark.parametrize("seed", range(6))
def test_random_batches(seed: int) -> None:
    dice = torch.Generator().manual_seed(seed)

    def some(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=dice))

    spans = [(some(0, 400), some(1, 30)) for _ in range(some(1, 6))]
    kv_heads = some(1, 5)
    case = SpanCase(
        kv_heads, some(1, 33) * 8, some(1, 33) * 8, 1 << some(0, 8), dtype=(FP32, BF16)[seed % 2], tree=seed % 3 == 0, shift=some(0, 4)
    )  # fmt: skip
    check_decoding(case, spans, kv_heads * some(1, 9), seed)


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("spans", [[(700, 1)], [(300, 7)], [(10, 150)], [(700, 1), (300, 2), (500, 4)]])
def test_threads_do_not_matter(spans: list[Span], tree: bool, latent: bool, with_threads: WithThreads) -> None:
    case = SpanCase(1, 576, 512, 16, latent=True, tree=tree) if latent else SpanCase(8, 128, 128, 16, tree=tree)
    made = case.make(spans, 16, CPU)
    alone = with_threads(1, lambda: run(case, made))
    check(alone, expected(case, made))
    for threads in (2, 3, 5):
        assert torch.equal(with_threads(threads, lambda: run(case, made)), alone)


def test_neighbours_do_not_matter() -> None:
    case = SpanCase(2, 64, 64, 16, tree=True)
    made = case.make(MANY, 4, CPU)
    whole = run(case, made)
    table, seats, ends, lengths, index, bits, starts, *rest = made["common"]
    for r in range(len(MANY)):
        start, stop = int(ends[r]), int(ends[r + 1])
        own = seats[r : r + 1], ends[r : r + 2] - start, lengths[r : r + 1], index[start:stop], bits[start:stop], starts[r : r + 1]
        common = table, *own, *rest
        assert torch.equal(run(case, {**made, "q": made["q"][start:stop], "common": common}), whole[start:stop])


def test_chunks_do_not_matter() -> None:
    case = SpanCase(2, 64, 64, 16, dtype=BF16, window=90)
    made = case.make([(0, 333)], 6, CPU)
    whole = run(case, made)
    table, seats, _, _, index, *rest = made["common"]
    for chunk in (1, 7, 64, 100):
        for start in range(0, 333, chunk):
            stop = min(start + chunk, 333)
            common = table, seats, torch.tensor([0, stop - start]), torch.tensor([stop]), index[start:stop], *rest
            assert torch.equal(run(case, {**made, "q": made["q"][start:stop], "common": common}), whole[start:stop])


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("heads", [2, 16])
def test_nan_is_not_lost_and_not_spread(part: int, heads: int) -> None:
    """Of a key or a value: every row that sees it is NaN, and no other row differs in a bit."""
    case = SpanCase(2, 64, 64, 16)
    for column, rows in ((200, [3]), (198, [1, 2, 3]), (90, [0, 1, 2, 3]), (0, [0, 1, 2, 3])):
        made = case.make([(197, 4), (50, 1)], heads, CPU)
        before = run(case, made)
        table, seats = made["common"][:2]
        made["caches"][part][table[seats[0], column // 16] * 16 + column % 16, :, -1] = torch.nan
        out = run(case, made)
        broken = torch.zeros(5, dtype=torch.bool)
        broken[rows] = True
        assert torch.equal(out[..., -1].isnan().all(1), broken)
        assert torch.equal(out[~broken], before[~broken])
        if part == 0:
            assert out[broken].isnan().all()


def test_large_scores() -> None:
    """The largest score moves from block to block, and e^score would overflow."""
    case = SpanCase(1, 64, 64, 16)
    made = case.make([(400, 3)], 2, CPU)
    made["q"] *= 40
    torch.testing.assert_close(run(case, made), expected(case, made), atol=1e-3, rtol=1e-3)


def test_queries_beside_other_numbers() -> None:
    """q as a part of the rows of a fused projection; keys and values of one head, of a tensor that holds more."""
    case = SpanCase(2, 64, 64, 16, dtype=BF16)
    made = case.make(RAGGED, 4, CPU)
    whole = run(case, made)
    wide = torch.full((len(made["q"]), 5, 64), torch.nan, dtype=BF16)
    wide[:, :4] = made["q"]
    assert torch.equal(run(case, {**made, "q": wide[:, :4]}), whole)
    k, v = made["caches"]
    second = run(case, {**made, "q": made["q"][:, 2:], "caches": (k[:, 1:], v[:, 1:])})
    assert torch.equal(second, whole[:, 2:])


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("family", ["deepseek", "mimo"])
@pytest.mark.parametrize("window", [None, 10])
def test_the_engines_tokens_are_those_of_plain_torch(family: str, shape: SpecConfig, window: int | None) -> None:
    asked, greedy = prompts(4, longest=40), SamplingParams(max_tokens=12, temperature=0)
    wanted = run_engine(tiny_engine(tiny_model(family, window=window, kernels="torch"), shape, page_size=16), asked, greedy)
    engine = tiny_engine(tiny_model(family, window=window, kernels="torch"), shape, page_size=16, backend="cpu")
    assert run_engine(engine, asked, greedy) == wanted
    assert engine.stats.accepted_tokens_total > 0
