"""The schedule of models some of whose layers see a window: pages that no row sees any more are given again."""

from __future__ import annotations

import pytest

from tests.engine.fake_runner import draw, greedy_text
from tests.engine.harness import PROMPTS, REFERENCE, VOCAB, Bench

# A window of 6 tokens, chunks of 16, and what 3 drafts hold ahead: the most that a request holds of its group.
WINDOW, BUDGET = 6, 16
LONG = [draw("long", i, below=VOCAB) for i in range(120)]


def bench(full: int = 400, window: int = 60, **options: object) -> Bench:
    return Bench(pages=(full, window), windows=(None, WINDOW), budget=BUDGET, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize(
    ("full", "window"), [(400, 200), (400, 24), (30, 200), (30, 24)], ids=["roomy", "few", "few of all", "few of both"]
)
def test_texts_do_not_depend_on_the_pages_of_windows(full: int, window: int, drafts: int, overlap: int) -> None:
    runs = bench(full, window, drafts=drafts, overlap=overlap)
    for name in PROMPTS:
        runs.add(name)
    runs.drain()
    assert dict(runs.texts) == REFERENCE
    assert full != 30 or runs.engine.stats.preemptions_total > 0


@pytest.mark.parametrize("overlap", [0, 2])
def test_a_long_text_holds_a_bounded_number_of_pages(overlap: int) -> None:
    runs = bench(drafts=3, overlap=overlap, context=400)
    runs.add("long", LONG, max_tokens=200)
    lookahead, most = runs.runner.sizes.num_lookahead_tokens(overlap), 0
    while runs.engine.has_work:
        runs.step()
        for req in runs.engine._scheduler.running:
            most = max(most, len(req.cache.blocks[1].pages))
            assert req.cache.blocks[0].first == 0 and req.cache.blocks[1].end * 4 >= req.num_scheduled_tokens
    # What is in flight is not booked, and its pages have no keys yet.
    assert most <= -(-(WINDOW + (1 + overlap) * BUDGET + lookahead) // 4) + 1 < len(LONG) // 4
    assert runs.texts["long"] == greedy_text(LONG, 200, VOCAB)


def test_a_pool_that_holds_the_windows_alone_serves_any_text() -> None:
    """Three long requests, one after the other and side by side, in a group that could hold none of their texts."""
    runs = bench(full=400, window=30, drafts=3, context=400)
    for i in range(3):
        runs.add(f"long{i}", LONG[i:], max_tokens=60)
    runs.drain()
    assert runs.texts == {f"long{i}": greedy_text(LONG[i:], 60, VOCAB) for i in range(3)}


def test_a_context_is_as_long_as_the_pages_allow() -> None:
    assert bench(full=400, window=60, context=1600).engine.context_length == 1600 - 8
    assert bench(full=400, window=9, context=1600).engine.context_length == 1600 - 8
    assert bench(full=400, window=8, context=1600).engine.context_length == 8 * 4 - 8, "a request holds 9 pages at most"
