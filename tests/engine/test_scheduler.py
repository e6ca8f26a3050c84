"""Who gets which rows, seats and pages. The texts that come of it are tested in test_engine.py."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest

from mtpserve.cache.groups import PageGroups
from mtpserve.core.plan import NOT_FINITE, NewRequest, SpanPlan, SpanResult, StepResult
from mtpserve.core.request import Finish, Request, TokenLogprob
from mtpserve.core.sampling import SamplingParams
from mtpserve.core.state.request_state import RequestState
from mtpserve.engine.integrity import check_integrity
from mtpserve.engine.queue import UNLIMITED, SchedulingPolicy, WaitingQueue
from mtpserve.engine.scheduler import Scheduler
from mtpserve.engine.spans import deferred
from mtpserve.engine.steps import RequestEvent, ScheduledStep
from mtpserve.engine.stopping import until_stop

EOS = 9


def make(
    *, pages: int = 100, page_size: int = 4, seats: int = 4, budget: int = 16, drafts: int = 3, service: SchedulingPolicy = UNLIMITED
) -> Scheduler:
    groups = PageGroups([None], [pages], page_size, budget)
    return Scheduler(groups, max_running=seats, token_budget=budget, max_drafts=drafts, eos_ids=(EOS,), service=service)


def request(name: str, prompt: int, output: int = 20, **sampling: object) -> RequestState:
    request = Request(name, [1] * prompt, SamplingParams(**sampling), seed=0)  # type: ignore[arg-type]
    return RequestState(request, [1] * prompt, prompt + output, num_write_ahead=3, num_lookahead_tokens=8)


def run(scheduler: Scheduler, planned: ScheduledStep, *, accept: int = 0, drafts: int = 3, token: int = 1) -> list[RequestEvent]:
    """Commit a step in which each verification accepts `accept` of its drafts."""
    results = []
    for span in planned.plan.spans:
        accepted = min(accept, span.num_draft_tokens)
        tokens = [token] * (accepted + 1) if span.samples else []
        results.append(SpanResult(tokens, accepted, drafts if span.drafts_next else 0))
    outcomes = scheduler.commit(planned, StepResult(results))
    check_integrity(scheduler)
    return outcomes


def rows(planned: ScheduledStep) -> list[tuple[str, int, int, int]]:
    return [
        (req.id, span.start, span.num_tokens, span.num_draft_tokens) for req, span in zip(planned.reqs, planned.plan.spans, strict=True)
    ]


def ids(sequences: Seq[RequestState | NewRequest]) -> list[str]:
    return [each.id for each in sequences]


def test_decoding_first_then_chunks_then_admission() -> None:
    scheduler = make(budget=16)
    for name, prompt in (("a", 4), ("b", 20), ("c", 5)):
        scheduler.add(request(name, prompt))
    planned = scheduler.plan(3)
    assert rows(planned) == [("a", 0, 4, 0), ("b", 0, 12, 0)]
    assert ids(planned.plan.new_requests) == ["a", "b"]
    run(scheduler, planned)
    planned = scheduler.plan(3)
    assert rows(planned) == [("a", 4, 1, 3), ("b", 12, 8, 0), ("c", 0, 4, 0)]
    assert ids(planned.plan.new_requests) == ["c"]
    run(scheduler, planned, accept=2)
    assert rows(scheduler.plan(3)) == [("a", 7, 1, 3), ("b", 20, 1, 3), ("c", 4, 1, 0)]


def test_one_token_left_of_a_prompt_brings_no_drafts() -> None:
    scheduler = make(budget=4)
    scheduler.add(request("a", 5))
    planned = scheduler.plan(3)
    assert [span.drafts_next for span in planned.plan.spans] == [False]
    run(scheduler, planned)
    planned = scheduler.plan(3)
    assert rows(planned) == [("a", 4, 1, 0)] and planned.plan.spans[0].samples


def test_drafts_are_clipped_by_the_requests_own_room_only() -> None:
    scheduler = make(budget=6)
    scheduler.add(request("a", 1, output=4))
    run(scheduler, scheduler.plan(3))
    planned = scheduler.plan(3)
    assert rows(planned) == [("a", 1, 1, 2)]  # room for 3: two drafts and the target's own
    run(scheduler, planned, accept=1)
    assert rows(scheduler.plan(3)) == [("a", 3, 1, 0)]


def test_a_span_that_does_not_fit_waits_its_turn_whole() -> None:
    scheduler = make(budget=10, seats=5)
    for name in "abcde":
        scheduler.add(request(name, 1, output=200))
    run(scheduler, scheduler.plan(3))
    served = []
    for _ in range(10):
        planned = scheduler.plan(3)
        assert [span.num_draft_tokens for span in planned.plan.spans] == [3, 3]
        served += ids(planned.reqs)
        run(scheduler, planned)
    assert "".join(served) == "abcde" * 4


def test_one_decoding_request_fills_the_smallest_budget() -> None:
    scheduler = make(budget=4)
    scheduler.add(request("a", 1))
    run(scheduler, scheduler.plan(3))
    assert rows(scheduler.plan(3)) == [("a", 1, 1, 3)]
    with pytest.raises(ValueError, match="budget of 3"):
        make(budget=3)


def test_first_come_first_served_skips_nobody() -> None:
    scheduler = make(pages=12, page_size=4, budget=64)  # 48 tokens, of which 8 + 4 stand behind each prompt
    scheduler.add(request("a", 20))
    scheduler.add(request("big", 20))
    scheduler.add(request("small", 1))
    assert ids(scheduler.plan(3).reqs) == ["a"]
    assert [req.id for req in scheduler.waiting] == ["big", "small"]


def test_seats_limit_and_are_given_back() -> None:
    scheduler = make(seats=2)
    for name in "abc":
        scheduler.add(request(name, 1))
    run(scheduler, scheduler.plan(3))
    assert [(req.id, req.req_idx) for req in scheduler.running] == [("a", 0), ("b", 1)]
    aborted = scheduler.abort("a")
    assert aborted is not None and aborted.finish is Finish.ABORT and aborted.req_idx is None and not aborted.cache.blocks
    scheduler.plan(3)
    assert [(req.id, req.req_idx) for req in scheduler.running] == [("b", 1), ("c", 0)]
    assert scheduler.abort("nobody") is None


def test_priorities_order_the_line_and_take_nobodys_seat() -> None:
    scheduler = make(seats=2)
    for name, priority in (("a", 0), ("b", 5), ("c", 0), ("d", -3), ("e", 5), ("f", -3)):
        scheduler.add(request(name, 1, priority=priority))
    run(scheduler, scheduler.plan(3))
    assert [req.id for req in scheduler.running] == ["d", "f"] and [req.id for req in scheduler.waiting] == ["a", "c", "b", "e"]
    scheduler.add(request("g", 1, priority=-9))
    run(scheduler, scheduler.plan(3))
    assert [req.id for req in scheduler.running] == ["d", "f"] and [req.id for req in scheduler.waiting] == ["g", "a", "c", "b", "e"]
    scheduler.abort("d")
    run(scheduler, scheduler.plan(3))
    assert [req.id for req in scheduler.running] == ["g", "f"]


def test_pages_cover_the_span_and_the_lookahead() -> None:
    scheduler = make(page_size=1, budget=100)
    scheduler.add(request("a", 5))
    for _ in range(4):
        planned = scheduler.plan(3)
        for req, span in zip(planned.reqs, planned.plan.spans, strict=True):
            assert req.cache.blocks[0].end >= span.start + span.num_rows + req.num_lookahead_tokens
        run(scheduler, planned, accept=3)


def preempting(**priorities: int) -> Scheduler:
    """a, b and c run in a full pool; the next verification of the first needs a page."""
    scheduler = make(pages=9, page_size=8, budget=100)
    for name in "abc":
        scheduler.add(request(name, 12, output=40, priority=priorities.get(name, 0)))
    run(scheduler, scheduler.plan(3))
    run(scheduler, scheduler.plan(3))
    assert [len(req.cache.blocks[0].pages) for req in scheduler.running] == [3, 3, 3]
    return scheduler


def test_the_youngest_gives_way_and_is_first_in_line() -> None:
    scheduler = preempting()
    scheduler.add(request("d", 1))
    youngest = scheduler.running[-1]
    planned = scheduler.plan(3)
    assert rows(planned) == [("a", 13, 1, 3), ("b", 13, 1, 3)]
    assert [req.id for req in scheduler.waiting] == ["c", "d"] and scheduler.preemptions == 1
    assert (youngest.num_computed_tokens, youngest.num_draft_tokens, youngest.cache.blocks, youngest.req_idx) == (0, 0, [], None)
    check_integrity(scheduler)


def test_the_least_urgent_gives_way_and_waits_behind_the_more_urgent() -> None:
    scheduler = preempting(a=2)
    scheduler.add(request("d", 1, priority=1))
    assert [req.id for req in scheduler.running] == ["b", "c", "a"]
    assert ids(scheduler.plan(3).reqs) == ["b", "c"]  # d needs as many pages as are free, and one more
    assert [req.id for req in scheduler.waiting] == ["d", "a"] and scheduler.preemptions == 1
    check_integrity(scheduler)


def test_recomputation_stops_before_the_last_token_and_goes_on_with_drafts() -> None:
    scheduler = preempting()
    run(scheduler, scheduler.plan(3))
    scheduler.abort("a")
    planned = scheduler.plan(3)
    assert ids(planned.reqs) == ["b", "c"] and rows(planned)[1] == ("c", 0, 13, 0)
    recomputed = planned.plan.spans[1]
    assert recomputed.drafts_next and not recomputed.samples
    (new_request,) = planned.plan.new_requests
    assert new_request.num_tokens == 14 and len(new_request.request.prompt) == 12
    assert [event.id for _, event in run(scheduler, planned)] == ["b"]
    assert rows(scheduler.plan(3))[1] == ("c", 13, 1, 3)


@pytest.mark.parametrize("budget", [4, 12, 100])
@pytest.mark.parametrize("accept", [0, 1, 3])
@pytest.mark.parametrize("page_size", [1, 3, 8])
def test_no_request_comes_back_in_the_plan_that_preempted_it(page_size: int, accept: int, budget: int) -> None:
    scheduler = make(pages=80 // page_size, page_size=page_size, budget=budget)
    for name, prompt in zip("abcdef", (12, 9, 20, 1, 5, 14), strict=True):
        scheduler.add(request(name, prompt, output=40))
    while scheduler.live:
        before, oldest = scheduler.preemptions, next(iter(scheduler.live))
        planned = scheduler.plan(3)
        assert scheduler.preemptions == before or not planned.plan.new_requests
        assert not scheduler.running or scheduler.running[0].id == oldest, "the oldest request was preempted"
        assert [span.req_idx for span in planned.plan.spans] == [req.req_idx for req in planned.reqs]
        run(scheduler, planned, accept=accept)
    assert scheduler.preemptions > 0 or budget == 4  # one verification at a time lets few decode together


def test_result_of_an_aborted_request_is_ignored() -> None:
    scheduler = make()
    scheduler.add(request("a", 3))
    scheduler.add(request("b", 3))
    planned = scheduler.plan(3)
    scheduler.abort("a")
    scheduler.add(request("a", 3))  # the same name again is somebody else
    assert [event.id for _, event in run(scheduler, planned)] == ["b"]
    assert scheduler.live["a"].tokens == [1, 1, 1]


@pytest.mark.parametrize("result", [SpanResult([], 0, 0), SpanResult([1, 1], 1, 0), SpanResult([1], 0, 4)])
def test_a_result_that_does_not_fit_changes_nothing(result: SpanResult) -> None:
    scheduler = make()
    scheduler.add(request("a", 3))
    planned = scheduler.plan(3)
    for broken in (StepResult([result]), StepResult([])):
        with pytest.raises(ValueError, match=r"does not fit|1 spans but 0 results"):
            scheduler.commit(planned, broken)
    assert scheduler.live["a"].num_computed_tokens == 0


def test_until_stop() -> None:
    req = request("a", 2, output=3, stop_token_ids=(7,))
    assert until_stop(req, [1, 2], (EOS,)) == ([1, 2], None)
    assert until_stop(req, [1, 7, 2, 3], (EOS,)) == ([1, 7], Finish.STOP)
    assert until_stop(req, [1, EOS, 2], (EOS,)) == ([1, EOS], Finish.STOP)
    assert until_stop(req, [1, 2, 3, 4], (EOS,)) == ([1, 2, 3], Finish.LENGTH)
    assert until_stop(req, [1, 2, EOS, 4], (EOS,)) == ([1, 2, EOS], Finish.STOP)
    assert until_stop(request("b", 2, ignore_eos=True), [1, EOS, 2], (EOS,)) == ([1, EOS, 2], None)
    assert until_stop(req, [], (EOS,)) == ([], None)


def test_a_failed_row_ends_its_request_only() -> None:
    scheduler = make()
    scheduler.add(request("a", 3))
    scheduler.add(request("b", 3))
    planned = scheduler.plan(3)
    outcomes = scheduler.commit(planned, StepResult([SpanResult([0], 0, 0, error=NOT_FINITE), SpanResult([1], 0, 0)]))
    assert [(event.id, event.tokens, event.finish) for _, event in outcomes] == [("a", [], Finish.ERROR), ("b", [1], None)]
    assert outcomes[0][1].error == NOT_FINITE
    check_integrity(scheduler)


def test_long_prompts_have_a_few_rows_in_every_other_step_beside_short_ones() -> None:
    scheduler = make(service=SchedulingPolicy(long_prompt_tokens=8, long_chunk_tokens=6, max_long_prompts=1))
    for name in ("long", "longer"):
        scheduler.add(request(name, 40))
    found = []
    for step in range(5):
        if step:
            scheduler.add(request(f"short {step}", 4, output=1))
        planned = scheduler.plan(3)
        found.append([row for row in rows(planned) if row[0].startswith("long")])
        run(scheduler, planned)
    assert found == [[("long", 0, 6, 0)], [], [("long", 6, 6, 0)], [], [("long", 12, 6, 0)]]


def test_admission_leaves_pages_for_those_that_run() -> None:
    """The first one may still produce 20 tokens, in 5 pages; the second one needs 4 of the 8 that are free."""
    for reserved, running in ((0.0, ["a", "b"]), (1.0, ["a"])):
        scheduler = make(pages=12, service=SchedulingPolicy(reserved_fraction=reserved))
        scheduler.add(request("a", 4))
        scheduler.add(request("b", 4))
        scheduler.plan(3)
        assert ids(scheduler.running) == running


def test_the_longest_prefix_is_served_first() -> None:
    line, matched = WaitingQueue(longest_prefix=True), {"a": 4, "b": 8, "c": 8}
    for arrival, name in enumerate(matched):
        req = request(name, 12)
        req.queue.key = (0, arrival)
        line.add(req)
    assert ids(list(line.order(lambda req: matched[req.id]))) == ["b", "c", "a"]


def test_tokens_behind_a_stop_fill_no_page_that_others_find() -> None:
    scheduler, req = make(), request("a", 4)
    req.cache.hash_root = b"root"
    scheduler.add(req)
    run(scheduler, scheduler.plan(3))
    planned = scheduler.plan(3)
    assert rows(planned) == [("a", 4, 1, 3)]
    ((_, outcome),) = scheduler.commit(planned, StepResult([SpanResult([1, EOS, 1, 1], 3, 0)]))
    assert outcome.tokens == [1, EOS] and req.cache.num_hashed_blocks == len(req.cache.block_hashes) == 1
    check_integrity(scheduler)


def test_a_request_s_stop_tokens_count_where_the_end_of_text_does_not() -> None:
    req = request("a", 2, ignore_eos=True, stop_token_ids=(7,))
    assert until_stop(req, [1, EOS, 7, 2], (EOS,)) == ([1, EOS, 7], Finish.STOP)


SCORE = TokenLogprob(-1.0, 1, [])


def test_scores_behind_a_stop_are_dropped_with_their_tokens() -> None:
    scheduler = make()
    scheduler.add(request("a", 4))
    run(scheduler, scheduler.plan(3))
    ((_, outcome),) = scheduler.commit(scheduler.plan(3), StepResult([SpanResult([1, EOS, 1, 1], 3, 0, logprobs=[SCORE] * 4)]))
    assert outcome.tokens == [1, EOS] and outcome.logprobs == [SCORE] * 2


def test_scores_of_a_prompt_are_told_once_though_it_is_computed_again() -> None:
    scheduler = make(budget=4)
    scheduler.add(request("a", 8, prompt_logprobs=0))
    told = []
    for _ in range(3):
        planned = scheduler.plan(3)
        scored = [SCORE] * min(4, 7 - planned.plan.spans[0].start)
        result = SpanResult([1] if planned.plan.spans[0].samples else [], 0, 0, prompt_logprobs=scored)
        told.append([len(outcome.prompt_logprobs or ()) for _, outcome in scheduler.commit(planned, StepResult([result]))])
        if len(told) == 1:
            scheduler._preempt_last()
    assert told == [[4], [], [3]]


def test_beside_prompts_only_those_rows_wait_whose_earlier_ones_do() -> None:
    """What a request with no row that waits has in such a step is absorbed with it: nobody keeps it."""
    req, span, waits = request("a", 4), SpanPlan(0, 4, 1, 0, True, True, None), []
    for beside in (True, False, True, True, True, True):
        ((_, told),) = deferred([(req, span)], draft_depth=0, max_deferred_tokens=3, beside_prompts=beside)
        waits.append((told.defers_kv, told.num_deferred_tokens, req.draft.num_deferred_tokens))
    assert waits == [(False, 0, 0), (True, 0, 1), (True, 0, 2), (True, 0, 3), (False, 3, 0), (False, 0, 0)]
