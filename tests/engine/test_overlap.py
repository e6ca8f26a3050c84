"""Steps launched before the last ones were read: no text, no count and no page depends on it.

The fake device executes as late as it may, so whatever the engine does in between is done too early if it matters.
"""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from mtpserve.core.request import Finish
from mtpserve.core.sampling import GrammarSpec
from tests import selection
from tests.engine.harness import OUTPUT, PROMPTS, REFERENCE, Bench

LATE = pytest.mark.parametrize("overlap", [1, 2])


def counts(bench: Bench) -> tuple[object, ...]:
    stats = bench.engine.stats
    return (
        stats.prompt_tokens_total, stats.generation_tokens_total, stats.drafts_total, stats.draft_tokens_total, stats.accepted_tokens_total,
        tuple(stats.accept_lengths), tuple(stats.accepted_tokens_per_position),
    )  # fmt: skip


def run(overlap: int, *, stops: dict[str, int] | None = None, late: bool = True, **options: object) -> Bench:
    bench = Bench(overlap=overlap, **options)  # type: ignore[arg-type]
    for i, name in enumerate(PROMPTS):
        stop = (stops or {}).get(name)
        bench.add(name, seed=i, stop_token_ids=() if stop is None else (stop,))
        if late:
            bench.step()
    bench.drain()
    return bench


@LATE
@pytest.mark.parametrize("drafts", [0, 1, 3, 7])
@pytest.mark.parametrize("tight", [False, True])
def test_the_text_and_the_counts_are_the_same(overlap: int, drafts: int, tight: bool) -> None:
    page_size = 3
    longest = max(map(len, PROMPTS.values())) + OUTPUT + (2 + overlap) * (drafts + 1)
    pages = -(-longest // page_size) if tight else 400
    bench = run(overlap, drafts=drafts, pages=pages, page_size=page_size, budget=max(8, drafts + 1))
    assert bench.texts == REFERENCE
    assert all(event.finish is Finish.LENGTH for event in bench.last.values())
    # The pool asks for preemption here: whoever is preempted has nothing in flight.
    assert (bench.engine.stats.preemptions_total > 0) == (tight and drafts < 7)
    if not tight:
        assert counts(bench) == counts(run(0, drafts=drafts, pages=pages, page_size=page_size, budget=max(8, drafts + 1)))


@LATE
@pytest.mark.parametrize("drafts", [1, 3])
def test_what_is_sampled_is_the_same(overlap: int, drafts: int) -> None:
    """The noisy runner commits what depends on the drafts verified."""
    options = {"drafts": drafts, "noisy": True}
    assert run(overlap, **options).texts == run(0, **options).texts  # type: ignore[arg-type]
    tight = run(overlap, **options, pages=22, running=8)  # type: ignore[arg-type]
    assert tight.texts == run(0, **options).texts and tight.engine.stats.preemptions_total > 0  # type: ignore[arg-type]


@LATE
@pytest.mark.parametrize("place", [0, 1, 2, 5, 11])
def test_what_comes_behind_a_stop_is_neither_seen_nor_counted(overlap: int, place: int) -> None:
    stops = {name: text[place] for name, text in REFERENCE.items()}
    bench, plain = run(overlap, stops=stops, accuracy=0.9), run(0, stops=stops, accuracy=0.9)
    assert bench.texts == plain.texts and counts(bench) == counts(plain)
    assert all(event.finish is Finish.STOP for event in bench.last.values())
    assert all(text[-1] == stops[name] and stops[name] not in text[:-1] for name, text in bench.texts.items())


@LATE
def test_steps_really_overlap(overlap: int) -> None:
    bench = Bench(overlap=overlap)
    bench.add("r3")
    for step in range(overlap):
        assert bench.step() == [] and len(bench.runner.steps) == step + 1
    (event,) = bench.step()
    assert event.tokens == REFERENCE["r3"][:1] and len(bench.runner.steps) == overlap + 1


@LATE
def test_a_request_that_needs_the_host_is_booked_before_its_next_step(overlap: int) -> None:
    """The fake runner asserts it; the others' text is theirs all the same."""
    bench = Bench(overlap=overlap)
    for name in PROMPTS:
        bench.add(name, grammar=GrammarSpec("json_object") if name in ("r1", "r4") else None)
    bench.drain()
    assert bench.texts == REFERENCE


@LATE
def test_nothing_is_launched_for_who_is_sure_to_have_ended(overlap: int) -> None:
    bench = Bench(drafts=0, overlap=overlap)
    bench.add("r3", max_tokens=4)
    bench.drain()
    assert len(bench.runner.steps) == 4 and bench.texts["r3"] == REFERENCE["r3"][:4]


@LATE
@pytest.mark.parametrize("step", [1, 2, 5])
def test_a_step_that_raises_ends_its_own_requests_only(overlap: int, step: int) -> None:
    bench = Bench(running=2, overlap=overlap)
    bench.runner.raise_at = {step}
    for name in PROMPTS:
        bench.add(name)
    bench.drain()
    hit = {name for name, *_ in bench.runner.steps[step - 1]}
    failed = {name for name, event in bench.last.items() if event.finish is Finish.ERROR}
    assert failed and failed <= hit
    assert {name: text for name, text in bench.texts.items() if name not in failed} == {
        name: text for name, text in REFERENCE.items() if name not in failed
    }


@LATE
def test_a_failed_row_ends_its_request_and_no_other(overlap: int) -> None:
    bench = Bench(overlap=overlap)
    bench.runner.fail_ids = {"r2"}
    for name in PROMPTS:
        bench.add(name)
    bench.drain()
    assert bench.last["r2"].finish is Finish.ERROR and bench.texts.pop("r2") == []
    assert bench.texts == {name: text for name, text in REFERENCE.items() if name != "r2"}


@selection.examples(60)
@given(st.integers(1, 2), st.integers(0, 4), st.sampled_from([18, 24, 40, 200]), st.randoms(use_true_random=False))
def test_random_arrivals_and_aborts(overlap: int, drafts: int, pages: int, random: object) -> None:
    """Aborts at any time, ids that come again, a pool that is too small for all: the text of who stays is the text alone."""
    choose = random.random  # type: ignore[attr-defined]
    bench = Bench(drafts=drafts, pages=pages, overlap=overlap, running=3, budget=9, eos=(7,))
    waiting, aborted = list(PROMPTS), set()
    while waiting or bench.engine.has_work:
        if waiting and choose() < 0.4:
            bench.add(waiting.pop(0))
        for name in list(bench.engine._scheduler.live):
            if choose() < 0.02:
                bench.engine.abort(name)
                aborted.add(name)
        bench.step()
    for name, text in REFERENCE.items():
        whole = text[: text.index(7) + 1] if 7 in text else text
        got = bench.texts.get(name, [])
        assert got == whole if name not in aborted else got == whole[: len(got)]
    assert bench.engine.stats.pages_used == 0
