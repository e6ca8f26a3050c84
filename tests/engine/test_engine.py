"""The engine over the fake runner: the text never depends on scheduling, nothing leaks, faults stay where they belong."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from mtpserve.core.errors import ConfigError, EngineBusy, InvalidRequest
from mtpserve.core.request import Finish, FirstTokenTimes
from tests import selection
from tests.engine.harness import OUTPUT, PROMPTS, REFERENCE, VOCAB, Bench

# ------------------------------------------------------------------------------------------------- identity


@pytest.mark.parametrize("drafts", range(8))
@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize("budget", [8, 11, 64])
def test_greedy_text_is_the_same_for_any_schedule(drafts: int, tight: bool, budget: int) -> None:
    # In the tight pool one request of the greatest length just fits, so that eight of them preempt each other all the time.
    page_size = 3
    longest = max(len(prompt) for prompt in PROMPTS.values()) + OUTPUT + 2 * (drafts + 1)
    pages = -(-longest // page_size) if tight else 400
    bench = Bench(drafts=drafts, pages=pages, page_size=page_size, budget=budget)
    for name in PROMPTS:
        bench.add(name)
    bench.drain()
    assert bench.texts == REFERENCE
    assert all(event.finish is Finish.LENGTH for event in bench.last.values())
    assert (bench.engine.stats.preemptions_total > 0) == tight


@pytest.mark.parametrize("draft_depth", [0, 1, 2])
def test_fewer_drafts_than_the_runner_could(draft_depth: int) -> None:
    bench = Bench(drafts=3, draft_depth=draft_depth)
    for name in PROMPTS:
        bench.add(name)
    bench.drain()
    assert bench.texts == REFERENCE
    assert max(size for step in bench.runner.steps for *_, size in step) == draft_depth


@pytest.mark.parametrize("overlap", [0, 1])
def test_no_drafts_in_a_crowd(overlap: int) -> None:
    bench = Bench(drafts=3, running=6, overlap=overlap, plain_above=2)
    for name in PROMPTS:
        bench.add(name)
    bench.drain()
    assert bench.texts == REFERENCE
    for first, then, step in zip(bench.runner.steps, bench.runner.steps[1:], bench.runner.steps[2:], strict=False):
        if len(first) > 2 and len(then) > 2:  # who is admitted with a step counts from the next one on
            assert all(drafts == 0 for *_, drafts in step)
    assert any(drafts > 0 for step in bench.runner.steps for *_, drafts in step), "the last two are drafted for again"


@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_a_seeded_text_depends_on_the_request_alone(drafts: int) -> None:
    """The noisy runner commits what depends on the drafts verified: trimming them, or forgetting them, would show."""
    alone: dict[str, list[int]] = {}
    for i, name in enumerate(PROMPTS):
        bench = Bench(drafts=drafts, noisy=True)
        bench.add(name, seed=i)
        bench.drain()
        alone |= bench.texts
    preemptions = 0
    for budget, pages, running in ((64, 400, 8), (8, 400, 8), (drafts + 1, 400, 3), (13, 20, 8), (8, 16, 8)):
        bench = Bench(drafts=drafts, noisy=True, budget=budget, pages=pages, running=running)
        for i, name in enumerate(PROMPTS):
            bench.add(name, seed=i)
            bench.step()
        bench.drain()
        assert bench.texts == alone
        preemptions += bench.engine.stats.preemptions_total
    assert preemptions > 0


@selection.examples(40)
@given(st.data(), st.integers(0, 3), st.sampled_from([18, 24, 200]), st.integers(0, 2))
def test_no_text_depends_on_priorities(data: st.DataObject, drafts: int, pages: int, overlap: int) -> None:
    bench = Bench(drafts=drafts, pages=pages, budget=8, policy="priority", overlap=overlap)
    for name in PROMPTS:
        bench.add(name, priority=data.draw(st.integers(-2, 2)))
        bench.step()
    bench.drain()
    assert bench.texts == REFERENCE


def test_a_shorter_limit_gives_a_prefix() -> None:
    for limit in range(1, OUTPUT):
        bench = Bench(accuracy=0.9)
        bench.add("r3", max_tokens=limit)
        bench.drain()
        assert bench.texts["r3"] == REFERENCE["r3"][:limit]
        assert bench.last["r3"].finish is Finish.LENGTH
        assert bench.engine.stats.generation_tokens_total == limit


# ------------------------------------------------------------------------------------------------- stopping


def stop_places() -> list[int]:
    """Places in r2's text where a token stands for the first time."""
    text = REFERENCE["r2"]
    return [i for i, token in enumerate(text) if token not in text[:i]]


@pytest.mark.parametrize("by_eos", [True, False])
def test_stops_inside_an_accepted_run(by_eos: bool) -> None:
    surplus = 0
    for place in stop_places():
        token = REFERENCE["r2"][place]
        bench = Bench(accuracy=1.0, eos=(token,) if by_eos else ())
        bench.add("r2", stop_token_ids=() if by_eos else (token,))
        bench.drain()
        event, stats = bench.last["r2"], bench.engine.stats
        assert bench.texts["r2"] == REFERENCE["r2"][: place + 1]
        assert event.finish is Finish.STOP
        # All drafts are right: place 0 comes without any, then each verification commits four tokens, the last of them no draft.
        assert event.num_accepted_tokens == (0 if place == 0 else min((place - 1) % 4 + 1, len(event.proposal.tokens)))
        assert stats.generation_tokens_total == place + 1
        assert sum(stats.accept_lengths) == stats.drafts_total
        assert sum((n + 1) * times for n, times in enumerate(stats.accept_lengths)) == place
        assert stats.accepted_tokens_total == sum(stats.accepted_tokens_per_position)
        surplus += len(event.proposal.tokens) > event.num_accepted_tokens
    assert surplus > 0


def test_eos_can_be_ignored_and_stop_ids_still_count() -> None:
    eos, stop = REFERENCE["r2"][2], REFERENCE["r2"][stop_places()[-1]]
    bench = Bench(eos=(eos,))
    bench.add("r2", ignore_eos=True, stop_token_ids=(stop,))
    bench.drain()
    assert bench.texts["r2"] == REFERENCE["r2"][: stop_places()[-1] + 1]


def test_without_a_limit_the_text_fills_the_context() -> None:
    bench = Bench(context=40)
    bench.add("r3", max_tokens=None)
    bench.drain()
    assert len(bench.texts["r3"]) == 40 - len(PROMPTS["r3"])


# ------------------------------------------------------------------------------------- fairness and statistics


def test_first_tokens_come_in_the_order_of_arrival() -> None:
    bench = Bench(budget=8, running=3)
    for name in PROMPTS:
        bench.add(name)
    bench.drain()
    assert list(bench.texts) == list(PROMPTS)


def test_lower_priorities_come_first() -> None:
    bench = Bench(budget=8, running=1, policy="priority")
    order = {name: (i * 5) % 8 for i, name in enumerate(PROMPTS)}
    for name, priority in order.items():
        bench.add(name, priority=priority)
    bench.drain()
    assert list(bench.texts) == sorted(PROMPTS, key=order.__getitem__)


def test_nobody_starves_with_the_smallest_budget() -> None:
    """One verification fills the budget: whoever decodes gets a turn each round, and new requests follow as others end."""
    bench = Bench(drafts=3, budget=4, running=8, accuracy=0.0)
    names = [f"s{i}" for i in range(8)]
    for i, name in enumerate(names):
        bench.add(name, prompt=[i])
    heard: dict[str, int] = {}
    for step in range(1000):
        for event in bench.step():
            assert step - heard.get(event.id, step) <= 8
            heard[event.id] = step
    assert list(heard) == names
    assert all(len(bench.texts[name]) == OUTPUT for name in names)


@pytest.mark.parametrize(("accuracy", "lengths"), [(1.0, [0, 0, 0, 6]), (0.0, [23 - 1, 0, 0, 0])])
def test_statistics(accuracy: float, lengths: list[int]) -> None:
    bench = Bench(accuracy=accuracy)
    bench.add("r1", max_tokens=25 if accuracy else OUTPUT)
    bench.drain()
    stats = bench.engine.stats
    assert stats.accept_lengths == lengths
    assert stats.drafts_total == sum(lengths)
    assert stats.prompt_tokens_total == len(PROMPTS["r1"])
    assert stats.accepted_tokens_total == lengths[3] * 3
    assert stats.accepted_tokens_per_position == [lengths[3]] * 3
    assert stats.steps_total == len(bench.runner.steps) == sum(stats.step_tokens)
    assert stats.step_tokens_total == len(PROMPTS["r1"]) + stats.generation_tokens_total - 1  # the last one is never computed
    assert sum(stats.draft_tokens_per_position) == stats.draft_tokens_total
    # With room for r tokens only r - 1 drafts are worth verifying, so the later positions see fewer at the end.
    assert stats.draft_tokens_per_position == ([6, 6, 6] if accuracy else [22, 21, 20])


def test_preemption_counts_no_prompt_and_no_token_twice() -> None:
    bench = Bench(pages=16, running=8)
    for name in PROMPTS:
        bench.add(name)
    bench.drain()
    stats = bench.engine.stats
    assert stats.preemptions_total > 0
    assert stats.prompt_tokens_total == sum(map(len, PROMPTS.values()))
    assert stats.generation_tokens_total == OUTPUT * len(PROMPTS)


def test_the_first_token_brings_its_waiting_times_and_no_other_does(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    for module in ("engine", "steps"):
        monkeypatch.setattr(f"mtpserve.engine.{module}.perf_counter", lambda: now)
    bench = Bench(drafts=0, running=1, budget=4)
    for name in ("r1", "r2"):
        bench.add(name, max_tokens=3)
    seen: dict[str, list[FirstTokenTimes | None]] = {"r1": [], "r2": []}
    while bench.engine.has_work:
        now += 1
        for event in bench.step():
            seen[event.id].append(event.times)
    # r1's prompt of 6 tokens takes the steps 1 and 2, its text the steps to 4; r2, with 11, gets the seat in step 5.
    assert seen == {"r1": [FirstTokenTimes(1, 1), None, None], "r2": [FirstTokenTimes(5, 2), None, None]}


def test_waiting_times_of_a_preempted_request_are_of_its_first_seat() -> None:
    bench = Bench(pages=16, running=8)
    for name in PROMPTS:
        bench.add(name)
    times: dict[str, int] = dict.fromkeys(PROMPTS, 0)
    while bench.engine.has_work:
        for event in bench.step():
            times[event.id] += event.times is not None
    assert bench.engine.stats.preemptions_total > 0
    assert set(times.values()) == {1}


# ----------------------------------------------------------------------------------------------------- aborts


@selection.examples(60)
@given(data=st.data(), drafts=st.integers(0, 4), pages=st.integers(18, 40), accuracy=st.sampled_from([0.0, 0.7, 1.0]))
def test_random_aborts_leak_nothing_and_change_nobody(data: st.DataObject, drafts: int, pages: int, accuracy: float) -> None:
    bench = Bench(drafts=drafts, pages=pages, accuracy=accuracy, budget=8)
    aborted: set[str] = set()
    inside: list[str] = []

    def abort_inside() -> None:
        for name in inside:
            bench.engine.abort(name)

    bench.runner.while_running = abort_inside
    names = list(PROMPTS)
    for name in names:
        bench.add(name)
    while bench.engine.has_work:
        between = data.draw(st.lists(st.sampled_from(names), max_size=1))
        inside[:] = data.draw(st.lists(st.sampled_from(names), max_size=1))
        for name in between:
            bench.engine.abort(name)
        bench.engine.check_integrity()
        aborted |= {*between, *inside}
        bench.step()
    bench.drain()
    for name in names:
        text = bench.texts[name]
        assert text == REFERENCE[name][: len(text)]
        assert name in aborted or len(text) == OUTPUT


def test_an_aborted_id_can_be_used_again_at_once() -> None:
    bench = Bench()
    bench.runner.while_running = lambda: bench.engine.abort("r1")
    bench.add("r1")
    assert bench.step() == []
    bench.runner.while_running = lambda: None
    bench.add("r1")
    bench.drain()
    assert bench.texts["r1"] == REFERENCE["r1"]


# ----------------------------------------------------------------------------------------------------- faults


def test_a_failed_row_ends_its_request_and_no_other() -> None:
    bench = Bench()
    bench.runner.fail_ids = {"r2"}
    for name in PROMPTS:
        bench.add(name)
    bench.drain()
    assert bench.last["r2"].finish is Finish.ERROR and bench.last["r2"].tokens == []
    assert bench.last["r2"].error == "the model produced non-finite numbers (NaN) for this request"
    assert {name: text for name, text in bench.texts.items() if name != "r2"} == {n: t for n, t in REFERENCE.items() if n != "r2"}
    assert bench.engine.stats.failed_requests_total == 1


def test_a_refused_request_leaves_the_step_alone() -> None:
    bench = Bench()
    bench.runner.refuse_ids = {"r0", "r2"}
    for name in PROMPTS:
        bench.add(name)
    bench.drain()
    assert {name for name, event in bench.last.items() if event.finish is Finish.ERROR} == {"r0", "r2"}
    assert bench.last["r2"].error == "the engine could not start this request: ValueError"
    assert bench.texts["r1"] == REFERENCE["r1"]


@pytest.mark.parametrize("step", [1, 2, 5])
def test_a_step_that_raises_ends_its_own_requests_only(step: int) -> None:
    bench = Bench()
    bench.runner.raise_at = {step}
    for name in PROMPTS:
        bench.add(name)
    bench.drain()
    hit = {name for name, *_ in bench.runner.steps[step - 1]}
    assert {name for name, event in bench.last.items() if event.finish is Finish.ERROR} == hit
    assert bench.engine.stats.failed_requests_total == len(hit)
    for name in PROMPTS:
        text = bench.texts[name]
        assert text == (REFERENCE[name][: len(text)] if name in hit else REFERENCE[name])
        if name in hit:
            assert bench.last[name].error == "the engine failed in the step that computed this request: RuntimeError"
    assert set(bench.last) == set(PROMPTS) and len(hit) < len(PROMPTS)


# ------------------------------------------------------------------------------------------------- validation


@pytest.mark.parametrize(
    ("prompt", "sampling", "param", "message"),
    [
        ([], {}, "prompt", "must not be empty"),
        ([1, VOCAB], {}, "prompt", r"in \[0, 49\], got 50"),
        ([-1], {}, "prompt", "got -1"),
        ([1] * 40, {"max_tokens": None}, "prompt", "prompt has 40 tokens, but prompt and output together may have at most 40"),
        ([1] * 30, {"max_tokens": 11}, "max_tokens", "at most 10 for a prompt of 30 tokens and a context of 40, got 11"),
        ([1], {"max_tokens": 10**9}, "max_tokens", "got 1000000000"),
        ([1], {"stop_token_ids": (3, VOCAB)}, "stop_token_ids", "got 50"),
        ([1], {"priority": 3}, "priority", "must be 0 unless --scheduling-policy is priority, got 3"),
    ],
)
def test_invalid_requests(prompt: list[int], sampling: dict[str, object], param: str, message: str) -> None:
    bench = Bench(context=40)
    with pytest.raises(InvalidRequest, match=message) as error:
        bench.add("a", prompt, **sampling)  # type: ignore[arg-type]
    assert error.value.param == param
    assert not bench.engine.has_work and bench.engine.step() == []


def test_an_id_in_use_is_refused() -> None:
    bench = Bench()
    bench.add("r1")
    with pytest.raises(InvalidRequest, match="'r1' is in use"):
        bench.add("r1")


def test_the_queue_limit_counts_those_beyond_the_seats() -> None:
    bench = Bench(running=2, queued=3)
    assert bench.engine.card.capacity == 5 and Bench().engine.card.capacity is None
    for i in range(5):
        bench.add(f"q{i}", [i])
    with pytest.raises(EngineBusy, match="--max-queued-requests is 3"):
        bench.add("q5", [5])
    bench.step()
    with pytest.raises(EngineBusy):
        bench.add("q5", [5])
    bench.engine.abort("q4")
    bench.add("q5", [5])
    bench.drain()
    assert set(bench.texts) == {"q0", "q1", "q2", "q3", "q5"}


def test_a_small_pool_shortens_the_context() -> None:
    bench = Bench(pages=8, page_size=4, drafts=3)
    assert bench.engine.context_length == bench.engine.card.context_length == 32 - 8
    bench.add("r1", prompt=[1] * 23, max_tokens=1)
    bench.add("r2", prompt=[1], max_tokens=None)
    bench.drain()
    assert len(bench.texts["r2"]) == 23


def test_impossible_configurations() -> None:
    with pytest.raises(ConfigError, match="--chunked-prefill-size must be at least 4, for one token and 3 drafts of a request, got 3"):
        Bench(budget=3)
    with pytest.raises(ConfigError, match="--max-total-tokens must be at least 10"):
        Bench(pages=2)
    with pytest.raises(ConfigError, match="--speculative-num-steps must be in"):
        Bench(draft_depth=4)


def test_a_request_without_a_seed_gets_one_of_its_own() -> None:
    def texts(random_seed: int | None) -> list[list[int]]:
        bench = Bench(noisy=True, drafts=0, random_seed=random_seed)
        for name in ("a", "b"):
            bench.add(name, prompt=[1, 2])
        bench.drain()
        return list(bench.texts.values())

    drawn = [tuple(text) for seed in (None, None, 7, 8) for text in texts(seed)]
    assert len(set(drawn)) == 8 and texts(7) == texts(7)
