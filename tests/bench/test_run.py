"""When requests are sent, in a clock of the test: open loop, slots, lateness, turns, warm-up."""

from __future__ import annotations

import pytest

from mtpserve.tools.bench.dataset.asked import AskedConversation, AskedTurn, Questions
from mtpserve.tools.bench.exported import ServerCounters
from mtpserve.tools.bench.serve.client import History
from mtpserve.tools.bench.serve.measured import Failure, Measured, Sent
from mtpserve.tools.bench.serve.run import WARM_OUTPUT, Load, RawRun, measure, send_all
from tests.bench.fake import FakeClient, FakeClock

SINGLE = AskedConversation((AskedTurn("x", 4),))


def sent(load: Load, client: FakeClient, asked: AskedConversation = SINGLE) -> list[Measured]:
    seen: list[Measured] = []
    made = client.clock.run(send_all(client, [asked] * len(load.times), load, seen.append))  # type: ignore[attr-defined]
    assert sorted(map(id, made)) == sorted(map(id, seen))
    return list(made)


def test_a_slow_server_does_not_slow_down_those_who_ask() -> None:
    made = sent(Load((0.5, 1.0, 1.5, 9.0)), FakeClient(FakeClock(), takes=5.0))
    assert [each.sent.at for each in made] == [0.5, 1.0, 1.5, 9.0] and [each.end for each in made] == [5.5, 6.0, 6.5, 14.0]
    assert all(each.sent.lateness == each.sent.slot_wait == 0 for each in made)


def test_a_late_client_is_seen() -> None:
    clock = FakeClock()
    clock.behind = 0.25
    made = sent(Load((0.5, 1.0, 1.125)), FakeClient(clock))
    # The second wait begins 0.25 s late and ends 0.25 s late; the third request's time is over by then.
    assert [each.sent.lateness for each in made] == [0.25, 0.25, 0.125]
    assert all(each.from_planned == each.e2e + each.sent.lateness for each in made)


def test_the_wait_for_a_slot_is_no_lateness() -> None:
    made = sent(Load((0.0, 0.0, 0.5, 8.0), concurrency=1), FakeClient(FakeClock(), takes=2.0))
    assert [each.sent.at for each in made] == [0, 2, 4, 8]
    assert [each.sent.slot_wait for each in made] == [0, 2, 3.5, 0] and [each.sent.lateness for each in made] == [0, 0, 0, 0]
    assert [each.e2e for each in made] == [2, 2, 2, 2] and [each.from_planned for each in made] == [2, 4, 5.5, 2]


def test_turns_follow_each_other_with_the_servers_answers() -> None:
    client = FakeClient(FakeClock())
    made = sent(Load((1.0,), pause=3.0), client, AskedConversation((AskedTurn("a"), AskedTurn("b"), AskedTurn("c"))))
    assert [each.sent.at for each in made] == [1, 5, 9] and [each.sent.planned_at for each in made] == [1, 5, 9]
    assert [history.exchanges for _, history in client.asked] == [(), (("a", "!"),), (("a", "!"), ("b", "!"))]


def test_turns_after_a_failure_have_failed_too() -> None:
    class Failing(FakeClient):
        async def ask(self, turn: AskedTurn, history: History, planned: float, ready: float, category: str = "") -> Measured:
            at = self.clock.now()
            self.asked.append((turn, history))
            return Measured(Sent(planned, ready, at), at, failure=Failure("HTTP 500"))

    client = Failing(FakeClock())
    made = sent(Load((0.0,)), client, AskedConversation((AskedTurn("a"), AskedTurn("b"))))
    assert [each.failure and each.failure.reason for each in made] == ["HTTP 500", "not sent: the turn before it failed"]
    assert len(client.asked) == 1


def counted(verifications: float) -> ServerCounters:
    return ServerCounters("mtpserve", verifications, 3 * verifications, verifications, (verifications,), None, 0, 0, 0)


@pytest.mark.parametrize("counters", [True, False])
def test_the_warm_up_is_not_measured(counters: bool) -> None:
    clock = FakeClock()
    client = FakeClient(clock)
    client.counted = [counted(10), counted(25)] if counters else [None]
    questions = Questions((SINGLE,) * 3, (AskedConversation((AskedTurn("w", 500), AskedTurn("more"))),) * 2)
    run: RawRun = clock.run(measure(client, questions, Load((0.0,) * 3), lambda _: None, flush=True))
    assert [turn.prompt for turn, _ in client.asked] == ["w", "w", "x", "x", "x"] and client.flushed == [2]
    assert client.asked[0][0].output == WARM_OUTPUT
    assert len(run.requests) == 3 and (run.start, run.seconds) == (1.0, 1.0)
    assert (run.server is not None and run.server.verifications == 15) is counters
