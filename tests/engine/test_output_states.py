"""States where outputs end: how many of the kept ones they take."""

from __future__ import annotations

from mtpserve.cache.groups import PageGroups
from mtpserve.core.plan import SpanPlan
from mtpserve.engine.pages.output_states import OutputStates
from tests.engine.test_scheduler import request

PAGE = 4


def test_outputs_leave_half_of_the_states_to_prompts() -> None:
    groups = PageGroups([None], [40], PAGE, 16, states=4)
    outputs, span = OutputStates(groups), SpanPlan(0, 0, PAGE, 0, True, True, None)
    kept = [outputs.plan(request(name, PAGE), span) for name in ("a", "b", "c")]
    assert [span.checkpoint and span.checkpoint[0] for span in kept] == [PAGE, PAGE, None]
    assert len(outputs.pages) == 2 and groups.groups[groups.dense].allocator.free_count == 2


def test_a_request_that_leaves_gives_its_states_back() -> None:
    groups, req = PageGroups([None], [40], PAGE, 16, states=4), request("a", PAGE)
    outputs = OutputStates(groups)
    outputs.plan(req, SpanPlan(0, 0, PAGE, 0, True, True, None))
    assert outputs.leave(req, trusted=True) == [] and outputs.pages == []
    assert groups.groups[groups.dense].allocator.free_count == 4
