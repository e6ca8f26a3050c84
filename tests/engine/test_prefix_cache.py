"""What requests find of each other's pages, and what they must not. The fake runner's texts depend on every token in the pages."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from mtpserve.core.request import Finish
from tests import selection
from tests.engine.fake_runner import draw, greedy_text
from tests.engine.harness import OUTPUT, VOCAB, Bench

PAGE = 4
SHARED = [draw("shared", i, below=VOCAB) for i in range(40)]


def own(name: str, count: int = 5) -> list[int]:
    return [draw(name, i, below=VOCAB) for i in range(count)]


def computed(bench: Bench, name: str) -> int:
    """Rows of committed tokens that a request has had, its output's included."""
    return sum(length for step in bench.runner.steps for id, _, length, _ in step if id == name)


def alone(bench: Bench, name: str, prompt: list[int], output: int = OUTPUT, salt: str = "") -> int:
    """Run one request to its end → prompt tokens that it found."""
    bench.add(name, prompt, output, salt=salt)
    before = bench.engine.stats.cached_prompt_tokens_total
    bench.drain()
    cached = bench.engine.stats.cached_prompt_tokens_total - before
    assert bench.texts[name] == greedy_text(prompt, output, VOCAB)
    return cached


@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 39, 40])
def test_a_prompt_is_computed_once(length: int, overlap: int) -> None:
    bench = Bench(overlap=overlap)
    assert alone(bench, "first", SHARED[:length]) == 0
    # All whole pages; and the last token again, since what follows it is unknown.
    assert alone(bench, "second", SHARED[:length]) == min(length // PAGE * PAGE, length - 1)
    assert bench.engine.stats.cached_prompt_tokens_total == min(length // PAGE * PAGE, length - 1)


def test_the_next_turn_finds_what_was_generated() -> None:
    bench = Bench()
    alone(bench, "turn 1", SHARED)
    history = [*SHARED, *bench.texts["turn 1"]]
    # The last token of an answer is never computed for it.
    assert alone(bench, "turn 2", [*history, *own("you")]) == (len(history) - 1) // PAGE * PAGE


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_pages_are_found_while_their_request_runs(overlap: int) -> None:
    bench = Bench(overlap=overlap)
    bench.add("first", SHARED, 24)
    for _ in range(5):
        bench.step()
    bench.add("second", [*SHARED, *own("second")], 24)
    bench.drain()
    assert bench.texts == {"first": greedy_text(SHARED, 24, VOCAB), "second": greedy_text([*SHARED, *own("second")], 24, VOCAB)}
    assert bench.engine.stats.cached_prompt_tokens_total == 40


@pytest.mark.parametrize("overlap", [0, 2])
def test_those_that_arrive_together_wait_for_the_first_to_compute_what_they_share(overlap: int) -> None:
    bench = Bench(budget=16, running=16, overlap=overlap, long_prefill_token_threshold=100)
    for i in range(8):
        bench.add(str(i), [*SHARED, *own(str(i))], 8)
    bench.add("other", own("other", 9), 8)
    bench.step()
    assert {id for id, *_ in bench.runner.steps[0]} == {"0"}, "the first fills the step"
    bench.drain()
    assert bench.engine.stats.cached_prompt_tokens_total == 7 * 40
    assert all(bench.texts[str(i)] == greedy_text([*SHARED, *own(str(i))], 8, VOCAB) for i in range(8))
    first_rows = {id: number for number, step in reversed(list(enumerate(bench.runner.steps))) for id, *_ in step}
    assert first_rows["other"] <= first_rows["1"], "nobody waits for what it does not need"


def test_who_waits_for_pages_goes_on_when_their_request_is_aborted() -> None:
    bench = Bench(budget=8)
    bench.add("first", SHARED)
    bench.add("second", SHARED)
    bench.step()
    bench.engine.abort("first")
    bench.drain()
    assert bench.texts["second"] == greedy_text(SHARED, OUTPUT, VOCAB)
    assert computed(bench, "second") < 40 + OUTPUT, "what the first had computed is there"


def test_equal_texts_end_up_in_equal_pages() -> None:
    """Two requests that say the same hold one page for it: the second gives its own back."""
    bench = Bench(pages=40, drafts=0)
    bench.add("a", SHARED[:8], 24)
    bench.step()
    bench.add("b", SHARED[:8], 24)
    while any(len(bench.texts[name]) < 20 for name in "ab"):
        bench.step()
    pages = [req.cache.blocks[0].pages for req in bench.engine._scheduler.running]
    assert len(set(pages[0]) & set(pages[1])) >= 6
    bench.drain()
    assert bench.texts["a"] == bench.texts["b"] == greedy_text(SHARED[:8], 24, VOCAB)


def test_a_salt_isolates() -> None:
    bench = Bench()
    assert alone(bench, "first", SHARED, salt="blue") == 0
    assert alone(bench, "second", SHARED) == 0
    assert alone(bench, "third", SHARED, salt="green") == 0
    assert alone(bench, "fourth", SHARED, salt="blue") == 39
    assert computed(bench, "third") == computed(bench, "first"), "not a row tells that others have the prompt"


def test_another_salt_does_not_wait_for_pages_that_are_being_computed() -> None:
    bench = Bench(budget=16)
    bench.add("first", SHARED[:8], salt="blue")
    bench.add("second", SHARED[:8], salt="green")
    bench.step()
    assert {id for id, *_ in bench.runner.steps[0]} == {"first", "second"}


def test_an_empty_cache_is_empty() -> None:
    bench = Bench()
    alone(bench, "first", SHARED)
    assert bench.engine.stats.pages_cached > 0
    bench.engine.reset_prefix_cache()
    assert bench.engine.stats.pages_cached == 0
    assert alone(bench, "second", SHARED) == 0
    assert alone(bench, "third", SHARED) == 39


def test_emptying_the_cache_disturbs_nobody() -> None:
    bench = Bench()
    bench.add("first", SHARED, 24)
    for _ in range(3):
        bench.step()
    bench.engine.reset_prefix_cache()
    bench.add("second", SHARED, 24)
    bench.drain()
    assert bench.texts == dict.fromkeys(("first", "second"), greedy_text(SHARED, 24, VOCAB))


def test_without_a_cache_nothing_is_found() -> None:
    bench = Bench(cache=False)
    assert [alone(bench, name, SHARED) for name in "ab"] == [0, 0]
    assert bench.engine.stats.pages_cached == 0


def test_the_pages_of_a_failed_request_are_not_found() -> None:
    """Its numbers were wrong before they showed; what it had found itself may be why."""
    bench = Bench(budget=16)
    alone(bench, "good", SHARED[:8])
    bench.runner.fail_ids.add("bad")
    bench.add("bad", SHARED)
    bench.drain()
    assert bench.last["bad"].finish is Finish.ERROR
    bench.runner.fail_ids.clear()
    assert alone(bench, "next", SHARED) == 0


def test_prompts_that_are_scored_are_computed_whole() -> None:
    bench = Bench()
    alone(bench, "first", SHARED)
    bench.add("scored", SHARED, 4, prompt_logprobs=1)
    bench.drain()
    assert computed(bench, "scored") >= 40
    assert bench.last["scored"].num_cached_tokens == 0


@pytest.mark.parametrize("overlap", [0, 2])
def test_who_was_preempted_comes_back_cheaply(overlap: int) -> None:
    bench = Bench(pages=34, overlap=overlap, running=2, context=120)
    bench.add("old", SHARED, 30)
    bench.add("young", own("young", 40), 40)
    bench.drain()
    assert bench.engine.stats.preemptions_total > 0
    assert bench.texts["young"] == greedy_text(own("young", 40), 40, VOCAB)
    # Its own tokens once, some drafts beside, and a page or two for each time that it came back; without a cache the prompt each time.
    assert computed(bench, "young") <= 80 + 30 * bench.engine.stats.preemptions_total


def test_the_least_recently_used_goes_first_and_its_end_before_its_beginning() -> None:
    bench = Bench(pages=30)
    alone(bench, "a", [*SHARED[:16], *own("a", 8)], 4)
    alone(bench, "b", own("b", 24), 4)
    alone(bench, "a again", [*SHARED[:16], *own("a", 8)], 4)
    alone(bench, "c", own("c", 76), 4)  # takes what is free, and some pages of b
    found = {name: alone(bench, f"{name} last", prompt, 1) for name, prompt in (("a", [*SHARED[:16], *own("a", 8)]), ("b", own("b", 24)))}
    assert found["a"] == 23 and 0 <= found["b"] < 23


@selection.examples(60)
@given(data=st.data())
@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_no_text_depends_on_the_cache(data: st.DataObject, windows: tuple[int | None, ...], overlap: int) -> None:
    """Conversations that share beginnings, in pools that are too small, with salts, aborts, priorities and an emptied cache."""
    pages = data.draw(st.integers(24, 60))
    policy = data.draw(st.sampled_from(["fcfs", "lpm", "priority"]))
    bench = Bench(
        windows=windows, pages=(pages, *[pages] * (len(windows) - 1)), overlap=overlap, budget=data.draw(st.integers(8, 40)),
        drafts=data.draw(st.integers(0, 3)), policy=policy, running=data.draw(st.integers(1, 5)), context=80,
        schedule_conservativeness=data.draw(st.sampled_from([0.0, 1.0])), long_prefill_token_threshold=data.draw(st.integers(3, 60)),
    )  # fmt: skip
    prompts: dict[str, tuple[list[int], int]] = {}
    heads = [SHARED[:20], own("head", 13), []]
    aborted = set()
    for number in range(data.draw(st.integers(2, 14))):
        name = str(number)
        begin = data.draw(st.sampled_from([*heads, *(prompt for prompt, _ in prompts.values())]))
        prompt = [*begin, *own(name, data.draw(st.integers(1, 8)))][:50]
        prompts[name] = prompt, data.draw(st.integers(1, 12))
        priority = {"priority": data.draw(st.integers(-1, 1))} if policy == "priority" else {}
        bench.add(name, *prompts[name], salt=data.draw(st.sampled_from(["", "x"])), **priority)
        for _ in range(data.draw(st.integers(0, 4))):
            bench.step()
        if data.draw(st.integers(0, 9)) == 0:
            bench.engine.abort(name)
            aborted.add(name)
        if data.draw(st.integers(0, 9)) == 0:
            bench.engine.reset_prefix_cache()
    bench.drain()
    for name, (prompt, output) in prompts.items():
        text = greedy_text(prompt, output, VOCAB)
        assert bench.texts[name] == (text[: len(bench.texts[name])] if name in aborted else text)
